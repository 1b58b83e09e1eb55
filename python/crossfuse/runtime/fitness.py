"""Whether a kernel library fits where it is loaded: tvm-ffi of its release, a GPU of its limits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from crossfuse._compat import installed_version
from crossfuse.errors import ArtefactRefused, refuse
from crossfuse.runtime.manifest import Manifest

#: Attributes of CUDA's driver for limits that a manifest has: multiprocessors, shared memory of a
#: CTA that asks for it.
_ATTRIBUTES = {"sms": 16, "max_shared_bytes": 97}
_WORDS = {"sms": "multiprocessors", "max_shared_bytes": "bytes of shared memory in a CTA"}


def check_version(manifest: Manifest, where: str) -> None:
    """Refuse a library that was built against another release of tvm-ffi.

    Its calls go through tvm-ffi's binary interface, which other releases may change. What else it
    was made with is inside of it.

    Parameters
    ----------
    manifest : Manifest
        Of the library.
    where : str
        The file, for messages.

    Raises
    ------
    ArtefactRefused
        Naming both releases.
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
    """Refuse a GPU that has less than what the kernels of a library were planned and checked for.

    Multiprocessors matter to cooperative launches alone, whose CTAs wait for each other and so run
    at the same time.

    Parameters
    ----------
    manifest : Manifest
        Of the library.
    limits : Mapping[str, int]
        Of the GPU, see `gpu_limits`; what is not there is not checked.

    Raises
    ------
    ArtefactRefused
        Naming what is too little.
    """
    together = any(each.cooperative for each in manifest.launches)
    check_room(manifest.name, manifest.device, manifest.limits, limits, together=together)


def check_room(
    name: str, device: str, needs: Mapping[str, int], limits: Mapping[str, int], *, together: bool
) -> None:
    """Refuse a GPU that has less than some kernels need.

    Parameters
    ----------
    name : str
        Of what has the kernels, for messages.
    device : str
        What they were compiled for.
    needs, limits : Mapping[str, int]
        Limits of that device, and of the GPU, see `gpu_limits`; what is not there is not checked.
    together : bool
        Whether CTAs may wait for each other, so that multiprocessors count.

    Raises
    ------
    ArtefactRefused
        Naming what is too little.
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


def gpu_limits(device: int = 0) -> dict[str, int]:
    """Ask the driver for the limits of a GPU; what it does not tell is left out.

    Parameters
    ----------
    device : int
        Index of the GPU.
    """
    found: dict[str, int] = {}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        handle, value = ctypes.c_int(), ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), device):
            return {}
        for name, attribute in _ATTRIBUTES.items():
            status = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
            if status == 0 and value.value > 0:
                found[name] = value.value
    except (OSError, AttributeError):  # no driver, or a stand-in for one
        return {}
    return found
