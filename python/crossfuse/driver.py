"""The GPUs of this machine, asked from the driver itself: no CUDA package need be installed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_CAPABILITY_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
_NAME_BYTES = 256
#: Attributes of what a kernel may take and of how fast memory is, with what their unit is divided
#: by: MULTIPROCESSOR_COUNT, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, L2_CACHE_SIZE,
#: GLOBAL_MEMORY_BUS_WIDTH, MEMORY_CLOCK_RATE and CLOCK_RATE (both in kHz).
_FACTS = {
    "sms": (16, 1),
    "max_shared_bytes": (97, 1),
    "l2_bytes": (38, 1),
    "memory_bits": (37, 1),
    "memory_mhz": (36, 1000),
    "clock_mhz": (13, 1000),
}


@dataclass(frozen=True)
class Gpu:
    """Facts that the driver gives about one CUDA device."""

    #: As the driver calls it, such as ``"NVIDIA H100 80GB HBM3"``.
    name: str
    #: Compute capability, major and minor.
    capability: tuple[int, int]
    #: Newest CUDA version that the driver supports, major and minor.
    driver_cuda: tuple[int, int]
    #: Facts that the driver does not give are 0. Bytes of shared memory are those of a CTA that
    #: opts in to the maximum.
    sms: int = 0
    max_shared_bytes: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    #: Bits of the memory bus; the multiprocessors' clock is its maximum.
    memory_bits: int = 0
    memory_mhz: int = 0
    clock_mhz: int = 0


def find_gpus() -> tuple[Gpu, ...]:
    """List the visible CUDA devices without creating a context on them.

    The list is empty without a driver, without a device, or when the driver does not start.
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
    facts = {each: _fact(driver, *what, device) for each, what in _FACTS.items()}
    return Gpu(
        name.value.decode(), (major, minor), cuda, memory_bytes=_memory(driver, device), **facts
    )


def _fact(driver: ctypes.CDLL, attribute: int, unit: int, device: int) -> int:
    """A device attribute in the unit of `Gpu`; 0 where the driver does not know it."""
    try:
        return max(0, _integer(driver.cuDeviceGetAttribute, attribute, device)) // unit
    except OSError:
        return 0


def _memory(driver: ctypes.CDLL, device: int) -> int:
    size = ctypes.c_size_t()
    total = getattr(driver, "cuDeviceTotalMem_v2", None)
    return 0 if total is None or total(ctypes.byref(size), device) != 0 else size.value


def _integer(function: ctypes._NamedFuncPointer, *arguments: int) -> int:
    """Call a driver function that writes an int through its first parameter."""
    result = ctypes.c_int()
    _check(function(ctypes.byref(result), *arguments))
    return result.value


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"the CUDA driver answered {status}")
