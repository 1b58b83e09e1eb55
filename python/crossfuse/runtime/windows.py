"""Memory that GPUs share: windows whose rows lie in different GPUs, and who the ranks are."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from crossfuse.errors import EnvironmentRefused, RefusedError, Rule, refuse
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


# Who the ranks of a group are: GPUs of this process, or processes of which each has one.


_refused = Rule(EnvironmentRefused, "peer-group")

Result = TypeVar("Result")


class Members(Protocol):
    """The ranks of a group, as one process sees them."""

    #: How many there are, in all processes.
    count: int
    #: GPUs of those that this process launches, by rank.
    local: Mapping[int, int]

    def window(self, driver: Driver, row_bytes: int) -> Window:
        """Make a window with a row in the memory of each rank; all processes call it together."""
        ...

    def together(self, step: Callable[[], Result]) -> Result:
        """Take a step that all processes take, and go on once all have; one's refusal is all's."""
        ...


class OneProcess:
    """Ranks that are GPUs of this process."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.count = len(devices)
        self.local: Mapping[int, int] = dict(enumerate(devices))

    def window(self, driver: Driver, row_bytes: int) -> Window:
        """See `Members.window`."""
        devices = [*self.local.values()]
        rows = (create(driver, each, row_bytes) for each in devices)
        return Window(driver, rows, row_bytes, self.count, devices)

    def together(self, step: Callable[[], Result]) -> Result:
        """See `Members.together`."""
        return step()


class OneOfProcesses:
    """A rank that is this process, in a process group of ``torch.distributed``.

    Memory goes from process to process as file descriptors, through sockets of the host: that works
    without rights to look into other processes, and keeps windows what they are in one process.
    Processes wait `timeout` seconds for each other, beside what the process group itself waits.
    """

    def __init__(self, group: Any, device: int, timeout: float) -> None:
        import torch.distributed as dist

        self._group = group
        self._timeout = timeout
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.local: Mapping[int, int] = {self.rank: device}

    def gather(self, value: Any) -> list[Any]:
        """What each rank has in the place of a value."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    def check_host(self) -> None:
        """Refuse ranks on several hosts."""
        hosts = self.gather(host())
        if len({boot for boot, _ in hosts}) > 1:
            raise _refused(
                "process group",
                found=f"ranks on hosts {', '.join(dict.fromkeys(name for _, name in hosts))}",
                limit="GPUs of one host",
                instead="make a process group of each host's ranks (torch.distributed.new_group), "
                "and leave what lies between hosts to NCCL",
            )

    def together(self, step: Callable[[], Result]) -> Result:
        """See `Members.together`."""
        made, refusal = None, None
        try:
            made = step()
        except RefusedError as error:
            refusal = error
        texts = self.gather(None if refusal is None else str(refusal))
        if refusal is not None:
            raise refusal
        for rank, text in enumerate(texts):
            if text is not None:
                raise _refused(
                    f"rank {rank}",
                    found=text,
                    limit="memory and GPUs as all ranks of a group need them",
                    instead="see what that rank was refused for",
                )
        return made  # type: ignore[return-value]

    def window(self, driver: Driver, row_bytes: int) -> Window:
        """See `Members.window`."""
        (device,) = self.local.values()
        own, descriptor = self.together(lambda: _shown(driver, device, row_bytes))
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            listener = stack.enter_context(_listener(self.count))
            addresses = self.gather(listener.getsockname())

            def made() -> Window:
                given = self._exchanged(listener, addresses, descriptor)
                for each in given.values():
                    stack.callback(os.close, each)
                rows = self._rows(driver, own, given)
                return Window(driver, rows, row_bytes, self.count, (device,))

            return self.together(made)

    def _rows(self, driver: Driver, own: Memory, given: Mapping[int, int]) -> Iterator[Memory]:
        for rank in range(self.count):
            yield own if rank == self.rank else memory_of(driver, given[rank])

    def _exchanged(
        self, listener: socket.socket, addresses: Sequence[bytes], own: int
    ) -> dict[int, int]:
        """File descriptors of all other ranks, each of which gets the own one.

        Nobody waits for another to accept: what is sent fits the buffers.
        """
        listener.settimeout(self._timeout)
        found: dict[int, int] = {}
        try:
            for rank, address in enumerate(addresses):
                if rank != self.rank:
                    with socket.socket(socket.AF_UNIX) as peer:
                        peer.settimeout(self._timeout)
                        peer.connect(address)
                        socket.send_fds(peer, [self.rank.to_bytes(2, "little")], [own])
            while len(found) < self.count - 1:
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(self._timeout)
                    word, descriptors, *_ = socket.recv_fds(peer, 2, 1)
                    found[int.from_bytes(word, "little")] = descriptors[0]
        except OSError as error:
            for each in found.values():
                os.close(each)
            missing = sorted(set(range(self.count)) - {self.rank, *found})
            raise _refused(
                f"rank {self.rank}",
                found=f"no memory of ranks {', '.join(map(str, missing))}: {error}",
                limit="processes of one host and one network namespace",
                instead="run all ranks in one container, or leave collectives to NCCL",
            ) from None
        return found


def host() -> tuple[str, str]:
    """What tells hosts apart, and the name of this one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname()
    return (boot.read_text(encoding="ascii").strip() if boot.is_file() else name), name


def _listener(count: int) -> socket.socket:
    """A socket to which as many processes of the host connect; the kernel gives it an address."""
    made = socket.socket(socket.AF_UNIX)
    made.bind("")
    made.listen(count)
    return made


def _shown(driver: Driver, device: int, size: int) -> tuple[Memory, int]:
    """Memory of the own GPU, and the descriptor by which others map it."""
    memory = create(driver, device, size, shared=True)
    try:
        return memory, descriptor_of(driver, memory)
    except RefusedError:
        release(driver, memory)
        raise
