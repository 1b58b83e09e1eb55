"""Limits of Hopper GPUs, to which legality checks and the lowering hold kernels.

And which GPUs this machine has.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.files import sha256

if TYPE_CHECKING:
    import tvm


#: Shared memory that one CTA can own on compute capability 9.0, in bytes (227 KiB).
MAX_SHARED_BYTES = 232448
#: Bytes that rows of a tensor map begin on multiples of (CUDA driver API, ``cuTensorMapEncode``).
TMA_PITCH = 16

#: Threads of a warp, and of a warpgroup: the four warps that issue wgmma together.
WARP, WARPGROUP = 32, 128
#: How ``mma.m16n8k16`` spreads a fragment over a warp: groups of lanes that share a row of it,
#: lanes of a group, and rows of the fragment (PTX ISA, matrix fragments).
MMA_GROUPS, MMA_LANES, MMA_ROWS = 8, 4, 16
#: Rows that a warpgroup multiplies, M of every wgmma, and so of each box that it stores.
WARPGROUP_ROWS = 64
#: Bytes of a row of a tile in shared memory: one pattern of the 128-byte swizzle. PTX ISA, tensor
#: swizzling modes.
ROW_BYTES = 128

#: What the CTAs of an SM share at most: 32-bit registers, threads, and places for CTAs (CUDA C++
#: Programming Guide, compute capability 9.0).
SM_REGISTERS, SM_THREADS, SM_CTAS = 65536, 2048, 32

#: CTAs of a cluster, and clusters at once on an H100 SXM (``crossfuse calibrate``), where groups of
#: SMs hold fewer than all SMs would.
_CLUSTERS = (
    *((3, 39), (4, 30), (5, 22), (6, 17), (7, 15), (8, 15), (9, 9)),
    *((size, 7) for size in range(10, 17)),
)


@checked
@dataclass(frozen=True)
class Device:
    """Limits of one GPU model.

    Attributes
    ----------
    name : str
        Target name, such as ``"nvidia-h100"``.
    arch : str
        nvcc architecture; ``sm_90a`` has wgmma and setmaxnreg.
    sms : int
        Streaming multiprocessors of the SXM part.
    max_shared_bytes : int
        Dynamic shared memory limit of one CTA, in bytes.
    max_cluster, portable_cluster : int
        CTAs in a cluster at most, and at most without the non-portable launch attribute.
    max_threads : int
        Threads in a CTA at most.
    registers : int
        32-bit registers of one SM.
    l2_bytes : int
        L2 cache, in bytes.
    clusters : tuple[tuple[int, int], ...]
        CTAs of a cluster, and clusters that run at the same time with one CTA an SM, where that is
        fewer than the SMs would hold: a cluster stays within a group of SMs (GPC), and some groups
        have fewer. Measured on an H100 SXM; others are taken to be divided likewise.
    memory_bits, memory_mhz, clock_mhz : int
        Width of the memory's bus, its clock, and that of the SMs at most: what rates go with where
        none were measured, see `crossfuse.planner.cost.rates.scaled`.
    record : str
        Hash of the record that ``crossfuse calibrate`` keeps of this device for its user; empty
        without one.

    Examples
    --------
    >>> device("nvidia-h100").sms
    132
    """

    name: str
    arch: str = "sm_90a"
    sms: int = 132
    max_shared_bytes: int = MAX_SHARED_BYTES
    max_cluster: int = 16
    portable_cluster: int = 8
    max_threads: int = 1024
    registers: int = SM_REGISTERS
    l2_bytes: int = 50 * 2**20
    clusters: tuple[tuple[int, int], ...] = _CLUSTERS
    memory_bits: int = 5120
    memory_mhz: int = 2619
    clock_mhz: int = 1980
    record: str = ""

    def resident_clusters(self, size: int) -> int:
        """Clusters of `size` CTAs that run at the same time; the driver has the last word.

        Parameters
        ----------
        size : int
            CTAs of a cluster.

        Returns
        -------
        int
            At least 1.
        """
        share = self.sms // size
        return max(1, min(share, dict(self.clusters).get(size, share)))


DEVICES = {
    each.name: each
    for each in (
        Device("nvidia-h100"),
        Device("nvidia-h200", l2_bytes=60 * 2**20, memory_bits=6144, memory_mhz=3201),
    )
}
#: What the driver calls the parts that `DEVICES` are.
_PARTS = {"NVIDIA H100 80GB HBM3": "nvidia-h100", "NVIDIA H200": "nvidia-h200"}


@checked
def device(name: str | Device | None = None) -> Device:
    """Look a device up by its target name.

    Parameters
    ----------
    name : str | Device | None
        ``"nvidia-h100"``, ``"nvidia-h200"``, or the name of the GPU of this machine, which is the
        driver's in lower case with dashes (``"nvidia-h20"``). A `Device` is returned as it is.
        None: the GPU of this machine if it is a Hopper, else an H100.

    Returns
    -------
    Device
        Its limits.

    Raises
    ------
    EnvironmentRefused
        If the device is unknown.

    Examples
    --------
    >>> device("nvidia-h100").max_shared_bytes
    232448
    """
    if isinstance(name, Device):
        return name
    here = [] if name in DEVICES else [each for each in local_devices() if each is not None]
    if name is None:
        name = here[0].name if here else "nvidia-h100"
    known = {**{each.name: each for each in here}, **DEVICES}
    if name not in known:
        raise refuse(
            EnvironmentRefused,
            "target",
            "device",
            found=repr(name),
            limit=", ".join(sorted(known)),
            instead="name one of these targets; clusters and DSM need compute capability 9.0",
        )
    path = record_path(name)
    return replace(known[name], record=sha256(path.read_bytes())) if path.is_file() else known[name]


@lru_cache(maxsize=1)
def local_devices() -> tuple[Device | None, ...]:
    """GPUs of this machine in the driver's order, None for any that is no Hopper; asked once."""
    return tuple(device_of(each) if each.capability == (9, 0) else None for each in find_gpus())


def device_of(gpu: Gpu) -> Device:
    """Limits of a Hopper GPU, as its driver states them.

    A whole part known to `DEVICES` gives that entry. Any other, such as a MIG slice with fewer
    multiprocessors, gets a device with the driver's facts, named after it; facts that the driver
    does not give are an H100's.
    """
    part = DEVICES.get(_PARTS.get(gpu.name, ""))
    if part is not None and gpu.sms in (0, part.sms):
        return part
    base = part or DEVICES["nvidia-h100"]
    told = ("sms", "max_shared_bytes", "l2_bytes", "memory_bits", "memory_mhz", "clock_mhz")
    facts = {each: getattr(gpu, each) or getattr(base, each) for each in told}
    share = facts["sms"] / base.sms
    clusters = tuple((size, max(1, int(count * share))) for size, count in base.clusters)
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return Device(name, clusters=clusters, **facts)


def record_path(name: str) -> Path:
    """Where ``crossfuse calibrate`` stores this user's record of a device."""
    import platformdirs

    folder = platformdirs.user_data_dir("crossfuse", appauthor=False)
    return Path(folder) / "devices" / f"{name}.json"


@checked
def tvm_target(name: str | Device) -> tvm.target.Target:
    """TVM target with the true limits of a device (TVM's own default is 48 KiB of shared memory).

    Parameters
    ----------
    name : str | Device
        See `device`.

    Returns
    -------
    tvm.target.Target
        CUDA target for sm_90a with an LLVM host.

    Examples
    --------
    >>> str(tvm_target("nvidia-h100").arch)
    'sm_90a'
    """
    import tvm

    spec = device(name)
    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": spec.arch,
            "max_shared_memory_per_block": spec.max_shared_bytes,
            "max_threads_per_block": spec.max_threads,
            "thread_warp_size": WARP,
        },
        host="llvm",
    )


# The GPUs of this machine, asked from the driver itself: no CUDA package need be installed.

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
