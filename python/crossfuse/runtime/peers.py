"""Kernels of functions over several GPUs, and the memory that these share, in one process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, Protocol

from crossfuse.calls import Seconds, checked
from crossfuse.errors import ArtefactRefused, EnvironmentRefused, RefusedError, refuse
from crossfuse.lower.image import BufferSpec
from crossfuse.lower.ranks import ARRIVALS, RANK
from crossfuse.runtime.kernel import DLManagedTensor, DLTensor, LoadedKernel, capsule_of
from crossfuse.runtime.launcher import DTYPES

# Windows: one range of addresses whose rows lie in the memory of different GPUs.

_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # CUmemLocationType, CUmemAllocationType, CUmemAccess_flags
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


class Window:
    """Addresses of which row r lies in the memory of GPU ``devices[r]``; all GPUs reach all rows.

    Ordinary loads and stores of a kernel go through NVLink where a row lies elsewhere (CUDA driver
    API, virtual memory management).
    """

    def __init__(self, driver: Driver, devices: Sequence[int], row_bytes: int) -> None:
        self._driver = driver
        self._row_bytes = row_bytes
        self._size = row_bytes * len(devices)
        self._mapped = 0
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(self._size)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, _long(0), _long(0), _long(0))
        #: Of row 0.
        self.address = int(address.value)
        try:
            for device in devices:
                self._add_row(device)
            self._open(tuple(dict.fromkeys(devices)))
        except RefusedError:
            self.close()
            raise

    def _call(self, name: str, *arguments: Any) -> None:
        check_driver(getattr(self._driver, name)(*arguments), name)

    def _add_row(self, device: int) -> None:
        properties = _Properties(_PINNED, 0, _Location(_DEVICE, device), None, 0)
        memory, size = ctypes.c_uint64(), ctypes.c_size_t(self._row_bytes)
        self._call("cuMemCreate", ctypes.byref(memory), size, ctypes.byref(properties), _long(0))
        place = _long(self.address + self._mapped * self._row_bytes)
        try:
            self._call("cuMemMap", place, size, ctypes.c_size_t(0), memory, _long(0))
            self._mapped += 1
        finally:
            # The mapping keeps the memory.
            self._call("cuMemRelease", memory)

    def _open(self, devices: tuple[int, ...]) -> None:
        allowed = (_Access * len(devices))(
            *(_Access(_Location(_DEVICE, each), _READ_WRITE) for each in devices)
        )
        size, count = ctypes.c_size_t(self._size), ctypes.c_size_t(len(devices))
        self._call("cuMemSetAccess", _long(self.address), size, allowed, count)

    def close(self) -> None:
        """Give the memory back; no kernel may use it any more."""
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


def _tensor(address: int, buffer: BufferSpec, device: int) -> tuple[Any, Any]:
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


# Kernels that several GPUs run together.


@checked
class PeerGroup:
    """GPUs of one process that compute functions together.

    Parameters
    ----------
    devices : sequence of int
        Index of the GPU of each rank. One that comes several times runs these ranks side by side,
        which works where it has room for all of their CTAs.
    deadline : float
        Seconds after which a kernel gives up waiting for another rank, 2 million at most.

    Raises
    ------
    EnvironmentRefused
        If there is no torch with CUDA, no such GPU, or two that do not reach each other's memory.

    Examples
    --------
    >>> import crossfuse
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.row_parallel import schedule_row_parallel
    >>> from crossfuse.workload import row_parallel
    >>> image = lower(schedule_row_parallel(row_parallel(m=16, k=4096, n=4096, ranks=2))).image
    >>> made = crossfuse.runtime.build_library(image, "row_parallel.so")  # doctest: +SKIP
    >>> group = PeerGroup([0, 1])  # doctest: +SKIP
    >>> kernel = group.join(crossfuse.load(made.shared_object))  # doctest: +SKIP
    >>> kernel([A0, A1], [B0, B1], [out0, out1])  # of GPUs 0 and 1  # doctest: +SKIP
    >>> kernel.check()  # doctest: +SKIP
    """

    def __init__(self, devices: Sequence[int], *, deadline: Seconds = 10.0) -> None:
        import torch

        self.devices = tuple(devices)
        self.deadline = deadline
        available = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not self.devices or not all(0 <= each < available for each in self.devices):
            raise refuse(
                EnvironmentRefused,
                "peer-group",
                f"GPUs {', '.join(map(str, self.devices)) or 'none'}",
                found=f"{available} GPUs that torch sees",
                limit="the index of such a GPU for each rank",
                instead="run it where there are as many GPUs, or let ranks share one",
            )
        for device in dict.fromkeys(self.devices):
            torch.zeros(1, device=f"cuda:{device}")  # starts CUDA there
        self._driver: Driver = ctypes.CDLL("libcuda.so.1")
        check_reach(self._driver, self.devices)

    def join(self, kernel: LoadedKernel) -> PeerKernel:
        """Give a kernel the memory that its GPUs share.

        Parameters
        ----------
        kernel : LoadedKernel
            Of a function over as many ranks as the group has GPUs.

        Returns
        -------
        PeerKernel
            The callable; others of the group share no memory with it.

        Raises
        ------
        ArtefactRefused
            If it is of another number of ranks, or of one GPU alone.
        EnvironmentRefused
            If the memory cannot be had.
        """
        counts = {each.ranks for each in kernel.buffers if each.ranks}
        if counts != {len(self.devices)}:
            found = f"a function over {max(counts)} GPUs" if counts else "a function of one GPU"
            raise refuse(
                ArtefactRefused,
                "peer-group",
                kernel.name,
                found=found,
                limit=f"{len(self.devices)} ranks, as the group has",
                instead="make a group of that many GPUs, or load another kernel",
            )
        return PeerKernel(kernel, self.devices, self.deadline, self._driver)


#: Bits of a nanosecond count that the unit of deadlines leaves out, see ``device/ranks.cuh``, and
#: the largest number of such units, an int32.
_DEADLINE_BITS, _LONGEST = 20, 2**31 - 1


def deadline_units(seconds: float) -> int:
    """A deadline as kernels count it; what they cannot count is the longest one."""
    return min(int(seconds * 1e9) >> _DEADLINE_BITS, _LONGEST)


class PeerKernel:
    """A kernel of a function over ranks, with its windows; made by `PeerGroup.join`."""

    def __init__(
        self, kernel: LoadedKernel, devices: tuple[int, ...], deadline: float, driver: Driver
    ) -> None:
        import torch

        self._kernel = kernel
        self.devices = devices
        places = [f"cuda:{each}" for each in devices]
        self._ranks = [
            torch.tensor([rank], dtype=torch.int32, device=place)
            for rank, place in enumerate(places)
        ]
        shared = len(set(devices)) < len(devices)
        self._streams = [torch.cuda.Stream(place) for place in places] if shared else []
        self._windows: list[Window] = []
        self._lent: list[Any] = []
        #: Windows of each rank, in the order of the kernel's buffers.
        self._peers: list[list[Any]] = [[] for _ in devices]
        try:
            for buffer in kernel.buffers:
                if buffer.ranks:
                    self._add(buffer, driver)
        except RefusedError:
            self.close()
            raise
        for rank, counts in enumerate(self._counts()):
            counts[len(devices) + 1] = deadline_units(deadline)
            torch.cuda.synchronize(self.devices[rank])

    def _add(self, buffer: BufferSpec, driver: Driver) -> None:
        """Make a window, zero at first."""
        _, bits = DTYPES[buffer.dtype]
        row_bytes = prod(buffer.shape[1:]) * bits // 8
        window = Window(driver, self.devices, row_bytes)
        self._windows.append(window)
        for rank, device in enumerate(self.devices):
            tensor, lent = _tensor(window.address, buffer, device)
            self._lent.append(lent)
            self._peers[rank].append(tensor)
            tensor[rank].zero_()

    def _counts(self) -> list[Any]:
        """Counts of arrivals of each rank, in its own memory."""
        names = [each.name for each in self._kernel.buffers if each.ranks]
        place = names.index(ARRIVALS)
        return [mine[place][rank] for rank, mine in enumerate(self._peers)]

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Arguments of each rank, in order."""
        every = self._kernel.buffers
        return tuple(each for each in every if not each.ranks and each.name != RANK)

    def launch(self, rank: int, *arguments: Any) -> None:
        """Run the kernels of one rank on the current stream of its GPU; the call does not wait.

        All ranks have to be launched as often. In a CUDA graph each GPU captures its own.

        Parameters
        ----------
        rank : int
            Which GPU of the group.
        *arguments : tensor
            Its inputs and outputs, on that GPU.

        Raises
        ------
        ArtefactRefused, EnvironmentRefused
            As `crossfuse.runtime.LoadedKernel`.
        """
        self._kernel(*arguments, self._ranks[rank], *self._peers[rank])

    def __call__(self, *arguments: Sequence[Any]) -> None:
        """Run all ranks, each on the current stream of its GPU; the call does not wait.

        Parameters
        ----------
        *arguments : sequence of tensor
            For each buffer, a tensor of each rank.

        Raises
        ------
        ArtefactRefused, EnvironmentRefused
            As `launch`, or if there is not one tensor for each rank.
        """
        for buffer, tensors in zip(self.buffers, arguments, strict=False):
            if len(tensors) != len(self.devices):
                raise refuse(
                    ArtefactRefused,
                    "argument-ranks",
                    f"argument '{buffer.name}' of {self._kernel.name}",
                    found=f"{len(tensors)} tensors",
                    limit=f"{len(self.devices)}, one of each rank",
                    instead="pass the ranks' tensors as a list",
                )
        for rank in range(len(self.devices)):
            with ExitStack() as scopes:
                self._enter_stream(rank, scopes)
                self.launch(rank, *(each[rank] for each in arguments))

    def _enter_stream(self, rank: int, scopes: ExitStack) -> None:
        """Ranks that share a GPU run in streams of their own, behind and before its current one."""
        import torch

        if not self._streams:
            return
        device = self.devices[rank]
        current, own = torch.cuda.current_stream(device), self._streams[rank]
        own.wait_stream(current)
        scopes.callback(lambda: self._join(rank, current))
        scopes.enter_context(torch.cuda.stream(own))

    def _join(self, rank: int, current: Any) -> None:
        """The current stream waits for the ranks of its GPU once the last of them is launched."""
        mine = [each for each, device in enumerate(self.devices) if device == self.devices[rank]]
        if rank == mine[-1]:
            for each in mine:
                current.wait_stream(self._streams[each])

    def check(self) -> None:
        """Wait for all GPUs, and refuse to go on if one of them waited for another in vain.

        Raises
        ------
        EnvironmentRefused
            If a rank was late: results are wrong since, and the kernel has to be joined anew.
        """
        import torch

        for device in dict.fromkeys(self.devices):
            torch.cuda.synchronize(device)
        for rank, counts in enumerate(self._counts()):
            late = int(counts[len(self.devices)])
            if late:
                raise refuse(
                    EnvironmentRefused,
                    "peer-late",
                    f"rank {rank} of {self._kernel.name}",
                    found=f"no arrival of rank {late - 1} before the deadline",
                    limit="all ranks launched as often, within the deadline of the group",
                    instead="look for what ended or delayed that rank, and join the kernel to a "
                    "group again; a larger deadline is an option of PeerGroup",
                )

    def close(self) -> None:
        """Wait for all GPUs and give the windows back."""
        import torch

        for device in dict.fromkeys(self.devices):
            torch.cuda.synchronize(device)
        self._peers = [[] for _ in self.devices]
        while self._windows:
            self._windows.pop().close()
