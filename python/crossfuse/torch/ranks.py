"""GPUs of a process group that are connected: they use each other's memory in collectives.

Operators name the group alone, so that graphs and caches hold nothing that ends with a process.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from crossfuse.calls import Seconds, checked
from crossfuse.files import scratch
from crossfuse.hardware import Device
from crossfuse.markers import MOST_EXCHANGING
from crossfuse.planner.cost.collectives import shares
from crossfuse.planner.cost.rank_rates import RankRates, rank_rates
from crossfuse.runtime.peers import PeerGroup, PeerKernel, check_process_group
from crossfuse.torch.kernels import define, kernels_of
from crossfuse.workload.ranks import DTYPES

if TYPE_CHECKING:
    from crossfuse.torch.collectives import Collective

#: Bytes of a tensor at most: larger ones are left to NCCL. The activations of 8192 tokens of 4096
#: bfloat16 fit.
LARGEST = 64 << 20
#: Bytes of a slab, the memory of each GPU that all see, of kernels that fill two places in turns,
#: and of such a place, which a CTA has for its part of a tensor.
_SLAB, _OF_CTA = 2 * LARGEST, LARGEST // MOST_EXCHANGING


class Ranks(Protocol):
    """What runs collectives of a group."""

    target: Device

    def prepare(self, collective: Collective, elements: int, dtype: str) -> None:
        """Make a collective of tensors of as many elements ready to be called."""
        ...

    def run(self, collective: Collective, given: torch.Tensor) -> torch.Tensor:
        """What this rank gets, of a contiguous tensor."""
        ...

    def check(self) -> None:
        """Refuse to go on if a rank was late; see `Connection.check`."""
        ...

    def close(self) -> None:
        """Give back what it has."""
        ...


class PeerRanks:
    """Collectives by kernels over the GPUs of processes, which share counts and a slab."""

    def __init__(self, group: PeerGroup, target: Device) -> None:
        self.rank = group.rank
        self.size = group.size
        self.target = target
        self._memory = group.memory(_SLAB)
        #: Of products in parts, whose copies are to slabs of their own.
        self.memory = group.memory(LARGEST)
        self._kernels: dict[tuple[str, int, str], PeerKernel] = {}
        self._meeting: PeerKernel | None = None

    def prepare(self, collective: Collective, elements: int, dtype: str) -> None:
        """See `Ranks.prepare`; no other rank has to take part."""
        self._kernel(collective, elements, dtype)

    def _kernel(self, collective: Collective, elements: int, dtype: str) -> PeerKernel:
        key = collective.name, elements, dtype
        if key not in self._kernels:
            made = _kernel(collective, elements, self.size, dtype, self.target, cpu=False)
            self._kernels[key] = self._memory.join(made)
        return self._kernels[key]

    def run(self, collective: Collective, given: torch.Tensor) -> torch.Tensor:
        """See `Ranks.run`; it does not wait."""
        self._check_late()
        kernel = self._kernel(collective, given.numel(), dtype_of(given))
        made = given.new_empty(collective.shape(given.shape, self.size))
        spaces = zip((given, made), kernel.buffers, strict=True)
        kernel.launch(self.rank, *(each.view(buffer.shape) for each, buffer in spaces))
        return made

    def meet(self) -> None:
        """Wait, on the current stream, until all ranks have done what comes before their call."""
        if self._meeting is None:
            from crossfuse.lower.image import start_early
            from crossfuse.lower.rank_barriers import meeting
            from crossfuse.runtime import load
            from crossfuse.runtime.artefact import build_library

            image = start_early(meeting(self.size, LARGEST))
            with scratch() as folder:
                made = build_library(image, folder, device=self.target)
                self._meeting = self.memory.join(load(made.shared_object))
        self._meeting.launch(self.rank)

    def check(self) -> None:
        """See `Ranks.check`."""
        try:
            self.memory.synchronize()
        finally:
            self._check_late()

    def _check_late(self) -> None:
        """Name a rank that was late, by kernels of either memory: CUDA's error names none."""
        for memory in (self._memory, self.memory):
            memory.check_late("a collective")

    def close(self) -> None:
        """See `Ranks.close`."""
        self._kernels.clear()
        for memory in (self._memory, self.memory):
            memory.close()


class GatheredRanks:
    """The same functions on CPUs: slabs come from all ranks by the process group."""

    def __init__(self, group: Any, target: Device) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.target = target
        self._functions: dict[tuple[str, int, str], Any] = {}

    def prepare(self, collective: Collective, elements: int, dtype: str) -> None:
        """See `Ranks.prepare`."""
        key = collective.name, elements, dtype
        if key not in self._functions:
            self._functions[key] = _kernel(
                collective, elements, self.size, dtype, self.target, cpu=True
            )

    def run(self, collective: Collective, given: torch.Tensor) -> torch.Tensor:
        """See `Ranks.run`."""
        import torch.distributed as dist

        self.prepare(collective, given.numel(), dtype_of(given))
        slabs = [torch.empty_like(given).view(-1) for _ in range(self.size)]
        dist.all_gather(slabs, given.view(-1), group=self._group)
        function = self._functions[collective.name, given.numel(), dtype_of(given)]
        shape = collective.given(given.numel(), self.size)
        made: torch.Tensor = function.run(torch.stack(slabs).view(self.size, *shape))[self.rank]
        return made.reshape(collective.shape(given.shape, self.size))

    def check(self) -> None:
        """See `Ranks.check`: the process group waits, and says who was late."""

    def close(self) -> None:
        """See `Ranks.close`."""
        self._functions.clear()


def _kernel(
    collective: Collective, elements: int, ranks: int, dtype: str, target: Device, *, cpu: bool
) -> Any:
    """A collective as a loaded kernel, or as a sequential function of all ranks' tensors."""
    from crossfuse.lower.image import starting_early
    from crossfuse.lower.ranks import with_slabs

    scheduled = with_slabs(collective.scheduled(elements, ranks, dtype, target), _SLAB)
    function = starting_early(scheduled).with_attr("global_symbol", collective.name)
    return kernels_of({collective.name: function}, target, cpu)[collective.name]


def dtype_of(tensor: torch.Tensor) -> str:
    """The element type of a tensor, as kernels name it."""
    return str(tensor.dtype).removeprefix("torch.")


class Connection:
    """Ranks of a process group whose collectives are kernels of ours; made by `connect_ranks`.

    Collectives of a group are one sequence, the same in all ranks, as those of an NCCL communicator
    are: all run in one stream, or in streams that wait for each other, CUDA graphs included.

    Parameters
    ----------
    name : str
        Of the process group, as graphs have it.
    size : int
        Ranks.
    place : torch.device
        Where tensors have to be.
    ranks : Ranks
        What runs collectives.
    rates : RankRates
        How long these take.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> connection = connect_ranks()
    >>> connection.size, connection.takes(torch.ones(2))  # nothing to sum
    (1, False)
    >>> connection.close()
    >>> dist.destroy_process_group()
    """

    def __init__(
        self, name: str, size: int, place: torch.device, ranks: Ranks, rates: RankRates
    ) -> None:
        self.name = name
        self.size = size
        self.place = place
        self.ranks = ranks
        self.rates = rates

    def takes(self, tensor: torch.Tensor, collective: Collective | None = None) -> bool:
        """Whether kernels take a tensor of this process.

        Parameters
        ----------
        tensor : torch.Tensor
            What is summed or collected; of a graph, a fake one.
        collective : Collective | None
            What is done with it; None is a sum.

        Returns
        -------
        bool
            For contiguous ones of float16, bfloat16 and float32 of at most 64 MiB, if NCCL is not
            estimated to be faster.
        """
        if self.unfit(tensor, collective):
            return False
        ours, nccl = self.times(tensor, collective)
        return ours < nccl

    def times(
        self, tensor: torch.Tensor, collective: Collective | None = None
    ) -> tuple[float, float]:
        """Estimate how long kernels and NCCL take.

        Parameters
        ----------
        tensor, collective
            As `takes` has them.

        Returns
        -------
        tuple of float
            Microseconds of ours, and of NCCL's.
        """
        known = self.rates.times("all_reduce" if collective is None else collective.name)
        size = prod(tensor.shape) * tensor.element_size()
        return known.kernels(size, self.size), known.nccl(size)

    def unfit(self, tensor: torch.Tensor, collective: Collective | None = None) -> str:
        """Say why kernels do not take a tensor.

        Parameters
        ----------
        tensor, collective
            As `takes` has them.

        Returns
        -------
        str
            The reason in words, empty if they do.
        """
        what = "a sum" if collective is None else collective.noun
        if self.size < 2:
            return f"{what} over one GPU"
        if tensor.device != self.place:
            return f"a tensor on {tensor.device}; limit: {self.place}, which was connected"
        if dtype_of(tensor) not in DTYPES:
            return f"{what} of {dtype_of(tensor)}; limit: {', '.join(DTYPES)}"
        if not all(isinstance(each, int) for each in tensor.shape):
            return f"{what} of symbolic extents"
        size = prod(tensor.shape) * tensor.element_size()
        if not 0 < size <= LARGEST:
            return f"{what} of {size} bytes; limit: {LARGEST}"
        if not tensor.is_contiguous():
            return f"{what} of a tensor that is not contiguous"
        slices = 1 if collective is None else collective.slices(self.size)
        elements = prod(tensor.shape) // slices
        found = shares(max(1, elements), tensor.element_size(), self.ranks.target.sms)
        if not found.pay or size > found.ctas * _OF_CTA:
            return f"{what} of {elements} elements, which too few CTAs of whole warps divide"
        return ""

    def check(self) -> None:
        """Wait for the GPU, and say whether a rank was later than the deadline.

        The kernel that waited for it ends with an error of CUDA, which every call of torch gives
        from then on. This one says whom it was for.

        Raises
        ------
        EnvironmentRefused
            With the rank that was late.
        """
        self.ranks.check()

    def close(self) -> None:
        """End it, in all ranks: torch does collectives from now on, in compiled graphs too."""
        if _CONNECTED.get(self.name) is self:
            del _CONNECTED[self.name]
        self.ranks.close()


#: By the names that graphs have for process groups.
_CONNECTED: dict[str, Connection] = {}


def connection_of(name: str) -> Connection | None:
    """The connection of a process group, by the name that graphs have for it."""
    return _CONNECTED.get(name)


def group_name(group: Any) -> str:
    """The name that graphs have for a process group; None is that of all processes."""
    import torch.distributed as dist

    check_process_group(group)
    return str((group or dist.group.WORLD).group_name)


@checked
def connect_ranks(group: Any = None, *, deadline: Seconds = 600.0) -> Connection:
    """Let the GPUs of a process group use each other's memory in collectives.

    All processes of the group call it, behind ``init_process_group`` and ``torch.cuda.set_device``
    and before models are compiled. ``torch.compile(model, backend="crossfuse")`` then makes kernels
    of sums over GPUs, all-gathers and reduce-scatters of float16, bfloat16 and float32 that are
    estimated to be faster than NCCL's. Each GPU gives 64 MiB for it. Without GPUs the same
    functions run on the CPU where `Backend` has ``cpu="llvm"``.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup | None
        Processes of one host; None takes all.
    deadline : float
        Seconds after which a kernel gives up waiting for another rank, see `Connection.check`.

    Returns
    -------
    Connection
        That of before if the group is connected already.

    Raises
    ------
    EnvironmentRefused
        As `crossfuse.runtime.PeerGroup.from_process_group`.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> connection = connect_ranks()  # then torch.compile(model, backend="crossfuse")
    >>> connection.check()  # now and then: was a rank late?
    >>> connection.close()
    >>> dist.destroy_process_group()
    """
    import torch.distributed as dist

    from crossfuse.torch.backend import Backend

    name = group_name(group)
    if name not in _CONNECTED:
        place, size = torch.device("cpu"), dist.get_world_size(group)
        ranks: Ranks
        if torch.cuda.is_available():
            place = torch.device("cuda", torch.cuda.current_device())
            peers = PeerGroup.from_process_group(group, deadline=deadline)
            ranks = PeerRanks(peers, Backend().device_of(place))
        else:
            ranks = GatheredRanks(group, Backend().device_of(place))
        define()
        rates = rank_rates(Backend().device_of(place).name, size)
        _CONNECTED[name] = Connection(name, size, place, ranks, rates)
    return _CONNECTED[name]


def connected() -> tuple[str, ...]:
    """Process groups that are connected, in words for cache keys."""
    every = _CONNECTED.values()
    return tuple(f"{each.name} of {each.size} {each.rates.digest}" for each in every)
