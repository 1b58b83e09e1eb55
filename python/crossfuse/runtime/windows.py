"""Windows: ranges of addresses whose rows lie in the memory of different GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.lower.image import BufferSpec
from crossfuse.runtime.kernel import DLManagedTensor, DLTensor, capsule_of
from crossfuse.runtime.launcher import DTYPES

_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # CUmemLocationType, CUmemAllocationType, CUmemAccess_flags
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_CUDA = 2  # DLPack's kDLCUDA


class _Location(ctypes.Structure):
    # CUmemLocation of cuda.h.
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    # CUmemAllocationProp of cuda.h.
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    # CUmemAccessDesc of cuda.h.
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver(Protocol):
    """What is called of the CUDA driver; each call returns a CUresult."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        """A function of the driver by its name."""
        ...


#: Physical memory of a GPU, a CUmemGenericAllocationHandle.
Memory = ctypes.c_uint64


def create(driver: Driver, device: int, size: int, *, shared: bool = False) -> Memory:
    """Memory of a GPU; other processes may be given it if `shared`."""
    kinds = _DESCRIPTOR if shared else 0
    properties = _Properties(_PINNED, kinds, _Location(_DEVICE, device), None, 0)
    memory = Memory()
    arguments = (ctypes.byref(memory), ctypes.c_size_t(size), ctypes.byref(properties), _long(0))
    check_driver(driver.cuMemCreate(*arguments), "cuMemCreate")
    return memory


def release(driver: Driver, memory: Memory) -> None:
    """Give memory back once nothing maps it."""
    check_driver(driver.cuMemRelease(memory), "cuMemRelease")


def descriptor_of(driver: Driver, memory: Memory) -> int:
    """A file descriptor by which other processes map memory; to be closed."""
    name = "cuMemExportToShareableHandle"
    found = ctypes.c_int()
    kind = ctypes.c_int(_DESCRIPTOR)
    status = getattr(driver, name)(ctypes.byref(found), memory, kind, _long(0))
    check_driver(status, name)
    return found.value


def memory_of(driver: Driver, descriptor: int) -> Memory:
    """What `descriptor_of` was asked for in another process."""
    name = "cuMemImportFromShareableHandle"
    memory = Memory()
    given, kind = ctypes.c_void_p(descriptor), ctypes.c_int(_DESCRIPTOR)
    check_driver(getattr(driver, name)(ctypes.byref(memory), given, kind), name)
    return memory


class Window:
    """Addresses of which each row lies in the memory of some GPU; `devices` reach all of them.

    Ordinary loads and stores of a kernel go through NVLink where a row lies elsewhere (CUDA driver
    API, virtual memory management). `rows` are of `row_bytes` each, and released once mapped.
    """

    def __init__(
        self,
        driver: Driver,
        rows: Iterable[Memory],
        row_bytes: int,
        count: int,
        devices: Sequence[int],
    ) -> None:
        self._driver = driver
        self._row_bytes = row_bytes
        self._size = row_bytes * count
        self._mapped = 0
        address = _long(0)
        size = ctypes.c_size_t(self._size)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, _long(0), _long(0), _long(0))
        #: Of row 0.
        self.address = int(address.value)
        try:
            for memory in rows:
                self._add(memory)
            self._open(tuple(dict.fromkeys(devices)))
        except RefusedError:
            self.close()
            raise

    def _call(self, name: str, *arguments: Any) -> None:
        check_driver(getattr(self._driver, name)(*arguments), name)

    def _add(self, memory: Memory) -> None:
        place = _long(self.address + self._mapped * self._row_bytes)
        size = ctypes.c_size_t(self._row_bytes)
        try:
            self._call("cuMemMap", place, size, ctypes.c_size_t(0), memory, _long(0))
            self._mapped += 1
        finally:
            # The mapping keeps the memory.
            release(self._driver, memory)

    def _open(self, devices: tuple[int, ...]) -> None:
        allowed = (_Access * len(devices))(
            *(_Access(_Location(_DEVICE, each), _READ_WRITE) for each in devices)
        )
        size, count = ctypes.c_size_t(self._size), ctypes.c_size_t(len(devices))
        self._call("cuMemSetAccess", _long(self.address), size, allowed, count)

    def close(self) -> None:
        """Give the memory back; no kernel of this process may use it any more."""
        if not self.address:
            return
        address, self.address = self.address, 0
        if self._mapped:
            size = ctypes.c_size_t(self._mapped * self._row_bytes)
            self._call("cuMemUnmap", _long(address), size)
        self._call("cuMemAddressFree", _long(address), ctypes.c_size_t(self._size))


def _long(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def check_driver(status: int, name: str) -> None:
    """Refuse a call of the CUDA driver that failed."""
    if status == 0:
        return
    raise refuse(
        EnvironmentRefused,
        "cuda-driver",
        name,
        found=f"CUresult {status}",
        limit="GPUs that reach each other's memory, with as much of it free as the windows need",
        instead="take GPUs of one host that NVLink connects (nvidia-smi topo -m), or free memory",
    )


def window_tensor(address: int, buffer: BufferSpec, device: int) -> tuple[Any, Any]:
    """A window as a torch tensor of one of its GPUs, and what must live as long as that does.

    DLPack says which GPU: torch would ask the driver, which knows where row 0 lies.
    """
    import torch

    code, bits = DTYPES[buffer.dtype]
    shape = (ctypes.c_int64 * len(buffer.shape))(*buffer.shape)
    managed = DLManagedTensor(
        DLTensor(
            data=address,
            device_type=_CUDA,
            device_id=device,
            ndim=len(buffer.shape),
            code=code,
            bits=bits,
            lanes=1,
            shape=shape,
        )
    )
    return torch.from_dlpack(capsule_of(managed)), (managed, shape)


#: What two GPUs need of the way between them: CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED and
#: _NATIVE_ATOMIC_SUPPORTED. Counts of arrivals are added up in peers' memory.
_ABILITIES = {2: "loads and stores", 3: "atomic operations"}


def check_reach(driver: Driver, devices: Sequence[int]) -> None:
    """Refuse GPUs of which one cannot use another's memory as kernels do."""
    distinct = tuple(dict.fromkeys(devices))
    for device, peer in ((one, other) for one in distinct for other in distinct if one != other):
        for attribute, ability in _ABILITIES.items():
            value = ctypes.c_int()
            status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, device, peer)
            if status == 0 and value.value:
                continue
            raise refuse(
                EnvironmentRefused,
                "peer-group",
                f"GPU {device}",
                found=f"no {ability} in the memory of GPU {peer}",
                limit="GPUs that reach each other's memory, by atomic operations too",
                instead="take GPUs of one host that NVLink connects (nvidia-smi topo -m)",
            )
