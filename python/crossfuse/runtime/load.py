"""Loading a kernel library, once its two files are whole and belong together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from crossfuse.calls import checked
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.files import read_bytes, read_text, scratch, sha256
from crossfuse.runtime.fitness import check_limits, check_version, gpu_limits
from crossfuse.runtime.kernel import LoadedKernel
from crossfuse.runtime.manifest import LIBRARY_HASH, Manifest, unreadable
from crossfuse.schema import Damaged, parse


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
