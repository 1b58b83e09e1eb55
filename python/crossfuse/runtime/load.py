"""Loading a kernel library, once its two files are whole and belong together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossfuse._compat import installed_version
from crossfuse.calls import checked
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.files import read_bytes, read_text, scratch, sha256
from crossfuse.hardware import find_gpus
from crossfuse.runtime.kernel import LoadedKernel
from crossfuse.runtime.manifest import LIBRARY_HASH, Manifest, unreadable
from crossfuse.schema import Damaged, parse

# Whether a kernel library fits where it is loaded: its tvm-ffi release, and the GPU's limits.

#: Fields of `Gpu` that a manifest has as limits too.
_WORDS = {"sms": "multiprocessors", "max_shared_bytes": "bytes of shared memory in a CTA"}


def check_version(manifest: Manifest, where: str) -> None:
    """Raise `ArtefactRefused` for a library built against another release of tvm-ffi.

    Its calls go through tvm-ffi's binary interface, which other releases may change. All else that
    it was made with is inside it. `where` names the file in messages.
    """
    built, here = manifest.versions.get("tvm-ffi"), installed_version("apache-tvm-ffi")
    if built != here:
        raise refuse(
            ArtefactRefused,
            "artefact-version",
            where,
            found=f"a library built with apache-tvm-ffi {built}",
            limit=f"apache-tvm-ffi {here}, which is installed here",
            instead="build the library again here, or install that release",
        )


def check_limits(manifest: Manifest, limits: Mapping[str, int]) -> None:
    """Refuse a GPU with less than what a library's kernels were planned and checked for.

    Multiprocessors matter to cooperative launches alone, whose CTAs wait for each other and so must
    be resident at the same time.
    """
    together = any(each.cooperative for each in manifest.launches)
    check_room(manifest.name, manifest.device, manifest.limits, limits, together=together)


def check_room(
    name: str, device: str, needs: Mapping[str, int], limits: Mapping[str, int], *, together: bool
) -> None:
    """Raise `ArtefactRefused` for a GPU that has less than some kernels need.

    `needs` are limits of the device that they were compiled for, `limits` those of the GPU; what is
    missing there is not checked. Multiprocessors count only if CTAs may wait for each other
    (`together`). `name` and `device` are for messages.
    """
    for each, words in _WORDS.items():
        needed, found = needs.get(each, 0), limits.get(each)
        if each == "sms" and not together:
            continue
        if found is not None and found < needed:
            raise refuse(
                ArtefactRefused,
                "gpu-limits",
                name,
                found=f"a GPU of {found} {words}",
                limit=f"{needed}, those of {device}",
                instead="run it on such a GPU, or compile for this one",
            )


def gpu_limits() -> dict[str, int]:
    """Limits of the first GPU; what the driver does not state is left out."""
    return {
        name: limit for gpu in find_gpus()[:1] for name in _WORDS if (limit := getattr(gpu, name))
    }


@checked
def load(path: str | os.PathLike[str], *, check_device: bool = True) -> LoadedKernel:
    """Load a kernel library that `crossfuse.runtime.build_library` made.

    Parameters
    ----------
    path : path
        The ``.so`` file; its ``.json`` lies beside it.
    check_device : bool
        Whether to refuse now, and not at the first call, a GPU of another architecture. It starts
        CUDA in this process, so pass False before a fork. A machine without GPU loads either way.

    Returns
    -------
    LoadedKernel
        The callable.

    Raises
    ------
    ArtefactRefused
        If a file is missing, damaged, of another format version, or does not match the other; if
        it was built with another release of tvm-ffi; or if the GPU is of another architecture, or
        has fewer multiprocessors or less shared memory than the kernels were planned for.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> again = crossfuse.load(kernel.artefact.shared_object, check_device=False)
    >>> [each.name for each in again.manifest.buffers]
    ['A', 'B_gate', 'B_up', 'D', 'out']
    """
    library = Path(path).absolute()
    manifest, record = _read_manifest(library)
    check_version(manifest, str(library))
    try:
        module = open_library(library)
        embedded = parse(module[f"{manifest.name}_manifest"]())
        cubin = bytes(module[f"{manifest.name}_cubin"]())
    except (RuntimeError, AttributeError, ValueError) as error:
        raise _damaged(
            library, f"{type(error).__name__}: {error}", f"a kernel library of {manifest.name}"
        ) from error
    if embedded != {key: value for key, value in record.items() if key != LIBRARY_HASH}:
        differing = sorted(
            key
            for key in embedded.keys() | record.keys() - {LIBRARY_HASH}
            if embedded.get(key) != record.get(key)
        )
        raise _damaged(library, f"another {', '.join(differing)} inside", "that of the .json file")
    if sha256(cubin) != manifest.cubin_sha256:
        raise _damaged(library, f"a cubin of hash {sha256(cubin)}", manifest.cubin_sha256)
    kernel = LoadedKernel(module, manifest)
    if check_device and kernel.check_device():
        check_limits(manifest, gpu_limits())
    return kernel


def _read_manifest(library: Path) -> tuple[Manifest, dict[str, Any]]:
    path = library
    try:
        data = read_bytes(library)
        path = library.with_suffix(".json")
        text = read_text(path)
    except Damaged as error:
        raise refuse(
            ArtefactRefused,
            "artefact-file",
            str(path),
            found=error.found,
            limit="the .so and the .json that were built together",
            instead="copy both files, or build the library again",
        ) from None
    manifest = Manifest.from_json(text, str(path))
    record = parse(text)
    # Before the library is mapped: running a damaged one may end the process.
    found = sha256(data)
    if found != record.get(LIBRARY_HASH):
        raise _damaged(
            library, f"a file of hash {found}", f"{record.get(LIBRARY_HASH)}, as its .json says"
        )
    return manifest, record


def open_library(library: Path) -> Any:
    """Open a library as it is on disk now.

    The dynamic loader answers a path that it has seen with what it opened then, even if the file
    has been replaced since, so the path is a link of a new name.
    """
    import tvm_ffi

    with scratch() as folder:
        link = folder / "library.so"
        link.symlink_to(library)
        return tvm_ffi.load_module(str(link))


def _damaged(library: Path, found: str, limit: str) -> RefusedError:
    return unreadable(str(library), found, limit, "build or copy the .so and the .json again")
