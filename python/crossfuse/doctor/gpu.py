"""The GPUs of this machine, asked from the driver itself: no CUDA package need be installed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_CAPABILITY_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """One CUDA device.

    Attributes
    ----------
    name : str
        As the driver calls it, such as ``"NVIDIA H100 80GB HBM3"``.
    capability : tuple[int, int]
        Compute capability, major and minor.
    driver_cuda : tuple[int, int]
        Newest CUDA version that the driver supports, major and minor.
    """

    name: str
    capability: tuple[int, int]
    driver_cuda: tuple[int, int]


def find_gpus() -> tuple[Gpu, ...]:
    """List the visible CUDA devices without creating a context on them.

    Returns
    -------
    tuple[Gpu, ...]
        Empty without a driver, without a device, or when the driver does not start.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return _ask(driver)
    except (OSError, AttributeError):
        # No library, or a stand-in for one that lacks the functions: either way no device.
        return ()


def _ask(driver: ctypes.CDLL) -> tuple[Gpu, ...]:
    if driver.cuInit(0) != 0:
        return ()
    version = _integer(driver.cuDriverGetVersion)
    cuda = (version // 1000, version % 1000 // 10)
    return tuple(
        _describe(driver, index, cuda) for index in range(_integer(driver.cuDeviceGetCount))
    )


def _describe(driver: ctypes.CDLL, index: int, cuda: tuple[int, int]) -> Gpu:
    device = _integer(driver.cuDeviceGet, index)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _check(driver.cuDeviceGetName(name, _NAME_BYTES, device))
    major = _integer(driver.cuDeviceGetAttribute, _CAPABILITY_MAJOR, device)
    minor = _integer(driver.cuDeviceGetAttribute, _CAPABILITY_MINOR, device)
    return Gpu(name.value.decode(), (major, minor), cuda)


def _integer(function: ctypes._NamedFuncPointer, *arguments: int) -> int:
    """Call a driver function that writes an int through its first parameter."""
    result = ctypes.c_int()
    _check(function(ctypes.byref(result), *arguments))
    return result.value


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"the CUDA driver answered {status}")
