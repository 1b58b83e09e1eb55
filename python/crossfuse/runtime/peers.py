"""Kernels of functions over several GPUs, and the memory that these share."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

from crossfuse.calls import Seconds, checked
from crossfuse.errors import ArtefactRefused, EnvironmentRefused, RefusedError, Rule, refuse
from crossfuse.lower.image import RANK, WINDOW_UNIT, BufferSpec
from crossfuse.markers import MAX_RANKS, MOST_EXCHANGING
from crossfuse.runtime.kernel import LoadedKernel
from crossfuse.runtime.launcher import DTYPES
from crossfuse.runtime.windows import (
    Driver,
    Members,
    OneOfProcesses,
    OneProcess,
    Window,
    check_reach,
    window_tensor,
)

_refused = Rule(EnvironmentRefused, "peer-group")


@checked
class PeerGroup:
    """GPUs that compute functions together: those of this process, or one of each process.

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
    >>> from crossfuse.schedule.rules.ranks import schedule_row_parallel
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

        available = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not devices or not all(0 <= each < available for each in devices):
            raise _refused(
                f"GPUs {', '.join(map(str, devices)) or 'none'}",
                found=f"{available} GPUs that torch sees",
                limit="the index of such a GPU for each rank",
                instead="run it where there are as many GPUs, or let ranks share one",
            )
        self._begin(OneProcess(devices), deadline)
        check_reach(self._driver, devices)

    @classmethod
    def from_process_group(cls, group: Any = None, *, deadline: Seconds = 600.0) -> PeerGroup:
        """Make a group of processes, of which each has one GPU: its current one.

        All processes of the group call it, and `join`, in the same order.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup | None
            Processes of one host; None takes all.
        deadline : float
            Seconds after which a kernel gives up waiting for another rank. Processes that compile
            get ready at different times.

        Returns
        -------
        PeerGroup
            Of as many ranks as the process group has, with the same numbers.

        Raises
        ------
        EnvironmentRefused
            If there is no process group or this process is not in it, in one process there is no
            GPU, or GPUs are in several hosts or do not reach each other's memory.

        Examples
        --------
        >>> group = PeerGroup.from_process_group()  # under torchrun  # doctest: +SKIP
        >>> kernel = group.join(crossfuse.load("row_parallel.so"))  # doctest: +SKIP
        >>> kernel.launch(group.rank, A, B, out)  # of this process  # doctest: +SKIP
        """
        import torch

        check_process_group(group)
        ready = torch.cuda.is_available()
        device = torch.cuda.current_device() if ready else -1
        members = OneOfProcesses(group, device, min(deadline, 60.0))
        members.check_host()
        made = cls.__new__(cls)

        def begun() -> None:
            if not ready:
                raise _refused(
                    f"rank {members.rank}",
                    found="0 GPUs that torch sees",
                    limit="a GPU of each rank",
                    instead="run it where there are as many GPUs",
                )
            made._begin(members, deadline)

        members.together(begun)
        places = members.gather(str(torch.cuda.get_device_properties(device).uuid))
        members.together(lambda: check_reach(made._driver, _seen(places)))
        return made

    def _begin(self, members: Members, deadline: float) -> None:
        """Start CUDA on the GPUs of this process."""
        import torch

        self._members = members
        self.deadline = deadline
        for device in self.devices:
            torch.zeros(1, device=f"cuda:{device}")
        self._driver: Driver = ctypes.CDLL("libcuda.so.1")

    @property
    def devices(self) -> tuple[int, ...]:
        """GPUs of the ranks that this process has."""
        return tuple(self._members.local.values())

    @property
    def size(self) -> int:
        """Ranks of all processes."""
        return self._members.count

    @property
    def rank(self) -> int:
        """The first rank that this process has: of a process group, its only one."""
        return next(iter(self._members.local))

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
        check_size(kernel, self.size)
        _, *slabs = (_row_bytes(each) for each in kernel.buffers if each.ranks)
        return self.memory(*slabs).join(kernel)

    def memory(self, *slabs: int) -> PeerMemory:
        """Make memory that kernels which run one behind the other share.

        Parameters
        ----------
        *slabs : int
            Bytes of each buffer in peers' memory, of one rank.

        Returns
        -------
        PeerMemory
            Of this group.

        Raises
        ------
        EnvironmentRefused
            If the memory cannot be had.
        """
        return PeerMemory(self._members, slabs, self.deadline, self._driver)


def check_process_group(group: Any) -> None:
    """Refuse a process that is not in a process group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        found, instead = "no process group", "call torch.distributed.init_process_group before"
    elif dist.get_rank(group) < 0:
        found, instead = "a process that is not in it", "call it in the processes of the group"
    else:
        return
    raise _refused(
        "process group", found=found, limit="a process of an initialised group", instead=instead
    )


def check_size(kernel: LoadedKernel, size: int) -> None:
    """Refuse a kernel of another number of ranks than `size`."""
    counts = {each.ranks for each in kernel.buffers if each.ranks}
    if counts != {size}:
        found = f"a function over {max(counts)} GPUs" if counts else "a function of one GPU"
        raise refuse(
            ArtefactRefused,
            "peer-group",
            kernel.name,
            found=found,
            limit=f"{size} ranks, as the group has",
            instead="make a group of that many GPUs, or load another kernel",
        )


def _seen(places: Sequence[str]) -> list[int]:
    """Indices of GPUs that this process sees, by their UUIDs; others cannot be asked about."""
    import torch

    count = torch.cuda.device_count()
    known = {str(torch.cuda.get_device_properties(each).uuid): each for each in range(count)}
    return [known[each] for each in places if each in known]


def _row_bytes(buffer: BufferSpec) -> int:
    """Bytes of a row of a window, as a kernel has it."""
    return prod(buffer.shape[1:]) * DTYPES[buffer.dtype][1] // 8


#: Bytes of the counts of a rank, see ``device/ranks.cuh``: a line, and one for each CTA.
_COUNTS = 128 * (1 + MOST_EXCHANGING)
#: Bits of a nanosecond count that the unit of deadlines leaves out, see ``device/ranks.cuh``, and
#: the largest number of such units, an int32.
_DEADLINE_BITS, _LONGEST = 20, 2**31 - 1


def deadline_units(seconds: float) -> int:
    """A deadline as kernels count it; what they cannot count is the longest one."""
    return min(int(seconds * 1e9) >> _DEADLINE_BITS, _LONGEST)


def header(deadline: float, told: int) -> list[int]:
    """Words in front of the counts of CTAs: none has arrived; `told` is the address of a word."""
    address = struct.unpack("<2i", struct.pack("<Q", told))
    return [*[0] * MAX_RANKS, deadline_units(deadline), 0, *address]


class PeerMemory:
    """Counts of arrivals and slabs that kernels of a group share; made by `PeerGroup.memory`.

    Its kernels are one sequence, the same in all ranks: they run in one stream of each GPU, or in
    streams that wait for each other.
    """

    def __init__(
        self, members: Members, slabs: Sequence[int], deadline: float, driver: Driver
    ) -> None:
        self._members = members
        counts = _whole_units(_COUNTS)
        #: Bytes of a rank's row in each window, that of the counts first.
        self.row_bytes = (counts, *(_whole_units(each) for each in slabs))
        #: Name of the counts of all kernels.
        self._counted = ""
        self._windows: list[Window] = []
        self._lent: list[Any] = []
        try:
            for each in self.row_bytes:
                self._windows.append(members.window(driver, each))
            members.together(lambda: self._begin(deadline))
        except RefusedError:
            self.close()
            raise

    def _begin(self, deadline: float) -> None:
        """Clear the own rows: nobody has arrived."""
        import torch

        #: The number of each rank that this process has, in its own memory, and a word of the host
        #: that its kernels tell whom they waited for in vain: 1 + its rank.
        self.ranks: dict[int, Any] = {}
        self._late: dict[int, Any] = {}
        for rank, device in self._members.local.items():
            self.ranks[rank] = torch.tensor([rank], dtype=torch.int32, device=f"cuda:{device}")
            self._late[rank] = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            counts, *slabs = (self._own(each, rank, device) for each in range(len(self._windows)))
            for each in (counts, *slabs):
                each.zero_()
            words = header(deadline, self._late[rank].data_ptr())
            counts[: len(words)] = torch.tensor(words, dtype=torch.int32, device=counts.device)
            torch.cuda.synchronize(device)

    def _own(self, place: int, rank: int, device: int) -> Any:
        """The row of a rank in a window, as 32-bit words."""
        words = self.row_bytes[place] // 4
        spec = BufferSpec("row", (self._members.count, words), "int32", output=True)
        return self._tensor(place, spec, device)[rank]

    def _tensor(self, place: int, buffer: BufferSpec, device: int) -> Any:
        tensor, lent = window_tensor(self._windows[place].address, buffer, device)
        self._lent.append(lent)
        return tensor

    @property
    def local(self) -> Mapping[int, int]:
        """GPUs of the ranks that this process has, by rank."""
        return self._members.local

    def join(self, kernel: LoadedKernel) -> PeerKernel:
        """Give this memory to a kernel of as many ranks, whose slabs fit.

        All of its kernels wait for other ranks in the same way, between kernels or inside of one.
        """
        check_size(kernel, self._members.count)
        windows = [each for each in kernel.buffers if each.ranks]
        wanted = tuple(map(_row_bytes, windows))
        if wanted != self.row_bytes:
            raise _unfit(kernel, _rows(wanted), f"{_rows(self.row_bytes)}, as this memory has")
        counts = windows[0].name
        self._counted = self._counted or counts
        if counts != self._counted:
            raise _unfit(kernel, f"counts '{counts}'", f"'{self._counted}', as its kernels have")
        return PeerKernel(kernel, self)

    def slabs(self, dtype: str) -> Any:
        """The slabs of all ranks as a tensor, [ranks, elements], of the first GPU of this process.

        Of several buffers in peers' memory it is the first one.
        """
        _, size, *_ = self.row_bytes
        elements = size * 8 // DTYPES[dtype][1]
        spec = BufferSpec("slabs", (self._members.count, elements), dtype, output=True)
        return self._tensor(1, spec, next(iter(self.local.values())))

    def windows(self, buffers: Sequence[BufferSpec], device: int) -> list[Any]:
        """Windows as a kernel on a GPU takes them."""
        return [self._tensor(*each, device) for each in enumerate(buffers)]

    def synchronize(self) -> None:
        """Wait for all GPUs of this process."""
        import torch

        for device in dict.fromkeys(self.local.values()):
            torch.cuda.synchronize(device)

    def check(self, name: str = "kernels of the group") -> None:
        """Wait for all GPUs, and say whom one of them waited for in vain; see `check_late`."""
        try:
            self.synchronize()
        finally:
            self.check_late(name)

    def check_late(self, name: str = "kernels of the group") -> None:
        """Refuse to go on if a GPU is known to have waited for another in vain, without waiting.

        `name` is what ran, in messages. `EnvironmentRefused` is raised if a rank was late: the
        kernel that waited has ended with an error, and with it what this process has on the GPU.
        """
        for rank, word in self._late.items():
            if late := int(word[0]):
                raise refuse(
                    EnvironmentRefused,
                    "peer-late",
                    f"rank {rank} of {name}",
                    found=f"no arrival of rank {late - 1} before the deadline",
                    limit="all ranks launched as often, within the deadline of the group",
                    instead="look for what ended or delayed that rank, and start the processes "
                    "again: CUDA has stopped this one's kernels; a larger deadline is an option of "
                    "what made the group",
                )

    def close(self) -> None:
        """Wait for all GPUs of this process and give its windows back."""
        self.synchronize()
        while self._windows:
            self._windows.pop().close()


def _unfit(kernel: LoadedKernel, found: str, limit: str) -> RefusedError:
    return refuse(
        ArtefactRefused,
        "peer-memory",
        kernel.name,
        found=found,
        limit=limit,
        instead="call PeerGroup.join, which makes memory of its own for a kernel",
    )


def _rows(sizes: Sequence[int]) -> str:
    return f"rows of {', '.join(map(str, sizes))} bytes"


def _whole_units(size: int) -> int:
    return -(-size // WINDOW_UNIT) * WINDOW_UNIT


class PeerKernel:
    """A kernel of a function over ranks, with its windows; made by `PeerGroup.join`."""

    def __init__(self, kernel: LoadedKernel, memory: PeerMemory) -> None:
        import torch

        self._kernel = kernel
        self._memory = memory
        self.devices = tuple(memory.local.values())
        windows = [each for each in kernel.buffers if each.ranks]
        #: What each rank is given beside its own tensors, in the order of the kernel's buffers.
        self._given = {
            rank: (memory.ranks[rank], *memory.windows(windows, device))
            for rank, device in memory.local.items()
        }
        shared = len(set(self.devices)) < len(self.devices)
        self._streams = [torch.cuda.Stream(each) for each in self.devices] if shared else []

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
            Which GPU of the group; one of this process.
        *arguments : tensor
            Its inputs and outputs, on that GPU.

        Raises
        ------
        ArtefactRefused, EnvironmentRefused
            As `crossfuse.runtime.LoadedKernel`.
        """
        self._kernel(*arguments, *self._given[rank])

    def __call__(self, *arguments: Sequence[Any]) -> None:
        """Run all ranks of this process, each on the current stream of its GPU, without waiting.

        Parameters
        ----------
        *arguments : sequence of tensor
            For each buffer, a tensor of each rank of this process.

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
        for place, rank in enumerate(self._given):
            with ExitStack() as scopes:
                self._enter_stream(place, scopes)
                self.launch(rank, *(each[place] for each in arguments))

    def _enter_stream(self, place: int, scopes: ExitStack) -> None:
        """Ranks that share a GPU run in streams of their own, behind and before its current one."""
        import torch

        if not self._streams:
            return
        device = self.devices[place]
        current, own = torch.cuda.current_stream(device), self._streams[place]
        own.wait_stream(current)
        scopes.callback(lambda: self._join(place, current))
        scopes.enter_context(torch.cuda.stream(own))

    def _join(self, place: int, current: Any) -> None:
        """The current stream waits for the ranks of its GPU once the last of them is launched."""
        mine = [each for each, device in enumerate(self.devices) if device == self.devices[place]]
        if place == mine[-1]:
            for each in mine:
                current.wait_stream(self._streams[each])

    def check(self) -> None:
        """Wait for all GPUs, and refuse to go on if one of them waited for another in vain.

        Raises
        ------
        EnvironmentRefused
            If a rank was late: CUDA has stopped the kernels of this process.
        """
        self._memory.check(self._kernel.name)

    def close(self) -> None:
        """Wait for all GPUs and give the windows back, which others may share."""
        self._memory.close()
