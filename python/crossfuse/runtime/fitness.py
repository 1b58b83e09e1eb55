"""Whether a kernel library fits where it is loaded: its tvm-ffi release, and the GPU's limits."""

from __future__ import annotations

from collections.abc import Mapping

from crossfuse._compat import installed_version
from crossfuse.driver import find_gpus
from crossfuse.errors import ArtefactRefused, refuse
from crossfuse.runtime.manifest import Manifest

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
