"""Sums over the GPUs of a process group: kernels of ours for few elements, NCCL for all else.

``crossfuse::all_reduce`` names the group alone, so that graphs and caches hold nothing that ends
with a process. Where its group is not connected, or does not take a tensor, torch sums it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from crossfuse.calls import Seconds, checked
from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import nccl_sum, one_shot_sum
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.runtime.peers import PeerGroup, PeerKernel, check_process_group
from crossfuse.torch.kernels import check_gradients, define, kernels_of
from crossfuse.torch.rewrite import inserted
from crossfuse.workload.ranks import DTYPES

if TYPE_CHECKING:
    from crossfuse.torch.backend import Backend

#: Bytes of a slab, the unit of windows: more are left to NCCL.
SLAB = 2 << 20
#: The runtime refuses arguments that begin elsewhere.
_ALIGNED = 16


class Summer(Protocol):
    """What sums tensors over ranks."""

    def prepare(self, elements: int, dtype: str) -> None:
        """Make what sums as many elements ready to be called."""
        ...

    def run(self, given: torch.Tensor) -> torch.Tensor:
        """The sum of a contiguous tensor, in its shape."""
        ...

    def check(self) -> None:
        """Refuse to go on if a rank was late."""
        ...

    def close(self) -> None:
        """Give back what it has."""
        ...


class PeerSums:
    """Sums by kernels over the GPUs of processes, which share counts and a slab."""

    def __init__(self, group: PeerGroup, target: Device) -> None:
        self._rank = group.rank
        self._size = group.size
        self._target = target
        self._memory = group.memory(SLAB)
        self._kernels: dict[tuple[int, str], PeerKernel] = {}

    def prepare(self, elements: int, dtype: str) -> None:
        """See `Summer.prepare`; no other rank has to take part."""
        self._kernel(elements, dtype)

    def _kernel(self, elements: int, dtype: str) -> PeerKernel:
        key = elements, dtype
        if key not in self._kernels:
            made = _kernel(elements, self._size, dtype, self._target, cpu=False)
            self._kernels[key] = self._memory.join(made)
        return self._kernels[key]

    def run(self, given: torch.Tensor) -> torch.Tensor:
        """See `Summer.run`; it does not wait."""
        kernel = self._kernel(given.numel(), _dtype(given))
        made = torch.empty_like(given)
        kernel.launch(self._rank, given.view(-1), made.view(-1))
        return made

    def check(self) -> None:
        """See `Summer.check`."""
        self._memory.check("all_reduce")

    def close(self) -> None:
        """See `Summer.close`."""
        self._kernels.clear()
        self._memory.close()


class GatheredSums:
    """The same function on CPUs: slabs come from all ranks by the process group."""

    def __init__(self, group: Any, target: Device) -> None:
        import torch.distributed as dist

        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._target = target
        self._functions: dict[tuple[int, str], Any] = {}

    def prepare(self, elements: int, dtype: str) -> None:
        """See `Summer.prepare`."""
        key = elements, dtype
        if key not in self._functions:
            self._functions[key] = _kernel(elements, self._size, dtype, self._target, cpu=True)

    def run(self, given: torch.Tensor) -> torch.Tensor:
        """See `Summer.run`."""
        import torch.distributed as dist

        self.prepare(given.numel(), _dtype(given))
        slabs = [torch.empty_like(given).view(-1) for _ in range(self._size)]
        dist.all_gather(slabs, given.view(-1), group=self._group)
        function = self._functions[given.numel(), _dtype(given)]
        made: torch.Tensor = function.run(torch.stack(slabs))[self._rank]
        return made.reshape(given.shape)

    def check(self) -> None:
        """See `Summer.check`: the process group waits, and says who was late."""

    def close(self) -> None:
        """See `Summer.close`."""
        self._functions.clear()


def _kernel(elements: int, ranks: int, dtype: str, target: Device, *, cpu: bool) -> Any:
    """The sum over ranks as a loaded kernel, or as a sequential function of all ranks' tensors."""
    from crossfuse.schedule.rules.ranks import schedule_all_reduce
    from crossfuse.workload import all_reduce as workload

    sch = schedule_all_reduce(workload(elements=elements, ranks=ranks, dtype=dtype))
    name = "all_reduce"
    function = sch.mod["main"].with_attr("global_symbol", name)
    return kernels_of({name: function}, target, cpu)[name]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Connection:
    """Ranks of a process group whose small sums are kernels of ours; made by `connect_ranks`.

    Sums of a group are one sequence, the same in all ranks, as those of an NCCL communicator are:
    all run in one stream, or in streams that wait for each other, CUDA graphs included.

    Parameters
    ----------
    name : str
        Of the process group, as graphs have it.
    size : int
        Ranks.
    place : torch.device
        Where tensors have to be.
    sums : Summer
        What sums them.

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

    def __init__(self, name: str, size: int, place: torch.device, sums: Summer) -> None:
        self.name = name
        self.size = size
        self.place = place
        self.sums = sums

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether kernels sum a tensor of this process.

        Parameters
        ----------
        tensor : torch.Tensor
            What is summed; of a graph, a fake one.

        Returns
        -------
        bool
            For contiguous ones of float16, bfloat16 and float32 of at most 2 MiB.
        """
        return not self.unfit(tensor)

    def unfit(self, tensor: torch.Tensor) -> str:
        """Say why kernels do not sum a tensor.

        Parameters
        ----------
        tensor : torch.Tensor
            As `fits` takes it.

        Returns
        -------
        str
            The reason in words, empty if they do.
        """
        if self.size < 2:
            return "a sum over one GPU"
        if tensor.device != self.place:
            return f"a tensor on {tensor.device}; limit: {self.place}, which was connected"
        if _dtype(tensor) not in DTYPES:
            return f"a sum of {_dtype(tensor)}; limit: {', '.join(DTYPES)}"
        if not all(isinstance(each, int) for each in tensor.shape):
            return "a sum of symbolic extents"
        size = prod(tensor.shape) * tensor.element_size()
        if not 0 < size <= SLAB:
            return f"a sum of {size} bytes; limit: {SLAB}"
        return "" if tensor.is_contiguous() else "a sum of a tensor that is not contiguous"

    def check(self) -> None:
        """Wait for the GPU, and refuse to go on if a rank was later than the deadline.

        Raises
        ------
        EnvironmentRefused
            With the rank that was late: results are wrong since.
        """
        self.sums.check()

    def close(self) -> None:
        """End it, in all ranks: from now on torch sums, in graphs that were compiled too."""
        if _CONNECTED.get(self.name) is self:
            del _CONNECTED[self.name]
        self.sums.close()


#: By the names that graphs have for process groups.
_CONNECTED: dict[str, Connection] = {}


@checked
def connect_ranks(group: Any = None, *, deadline: Seconds = 600.0) -> Connection:
    """Let the GPUs of a process group use each other's memory for sums of few elements.

    All processes of the group call it, behind ``init_process_group`` and ``torch.cuda.set_device``
    and before models are compiled. ``torch.compile(model, backend="crossfuse")`` then makes kernels
    of all-reduces of float16, bfloat16 and float32 that are estimated to be faster than NCCL's.
    Without GPUs the same functions run on the CPU where `Backend` has ``cpu="llvm"``.

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

    check_process_group(group)
    name = str((group or dist.group.WORLD).group_name)
    if name not in _CONNECTED:
        place, sums = torch.device("cpu"), None
        if torch.cuda.is_available():
            place = torch.device("cuda", torch.cuda.current_device())
            peers = PeerGroup.from_process_group(group, deadline=deadline)
            sums = PeerSums(peers, Backend().device_of(place))
        define()
        made = sums or GatheredSums(group, Backend().device_of(place))
        _CONNECTED[name] = Connection(name, dist.get_world_size(group), place, made)
    return _CONNECTED[name]


def connected() -> tuple[str, ...]:
    """Process groups that are connected, in words for cache keys."""
    return tuple(f"{each.name} of {each.size}" for each in _CONNECTED.values())


@checked
def all_reduce(tensor: Any, group: Any = None) -> torch.Tensor:
    """Sum a tensor over a process group, by a kernel of ours if the group is connected.

    What kernels do not take (`Connection.takes`), and all of groups that are not connected, is
    summed by torch. It may be captured in a CUDA graph once it was called with the same shape.

    Parameters
    ----------
    tensor : torch.Tensor
        What this process adds; it stays as it is.
    group : torch.distributed.ProcessGroup | None
        None takes all processes.

    Returns
    -------
    torch.Tensor
        The sum, the same in all ranks, bit for bit.

    Raises
    ------
    WorkloadRefused
        If autograd would have to record it.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> all_reduce(torch.ones(2))  # of one rank; under torchrun behind `connect_ranks`
    tensor([1., 1.])
    >>> dist.destroy_process_group()
    """
    import torch.distributed as dist

    check_process_group(group)
    define()
    name = str((group or dist.group.WORLD).group_name)
    made: torch.Tensor = torch.ops.crossfuse.all_reduce(tensor, name)
    return made


def run_all_reduce(given: torch.Tensor, group: str) -> torch.Tensor:
    """What ``crossfuse::all_reduce`` does."""
    check_gradients((given,))
    connection = _CONNECTED.get(group)
    given = given.contiguous()
    if connection is None or not connection.takes(given):
        functional = torch.ops._c10d_functional
        made: torch.Tensor = functional.wait_tensor(functional.all_reduce(given, "sum", group))
        return made
    if given.data_ptr() % _ALIGNED:
        given = given.clone()
    return connection.sums.run(given)


def fake_all_reduce(given: torch.Tensor, _group: str) -> torch.Tensor:
    """A tensor as ``crossfuse::all_reduce`` makes."""
    return given.new_empty(given.shape)


# All-reduces in graphs.


def fuse_all_reduces(
    module: fx.GraphModule, options: Backend, place: torch.device
) -> tuple[ChainOutcome, ...]:
    """Let kernels of ours do the small sums over GPUs of a graph, in place; what became of all."""
    found = [(each, _wait(each)) for each in module.graph.nodes if _name(each) == _ALL_REDUCE]
    if not found:
        return ()
    outcomes = []
    for node, wait in found:
        outcome, elements = _outcome(node, wait, options, place)
        outcomes.append(outcome)
        if outcome.name:
            given, _, group = node.args
            _CONNECTED[str(group)].sums.prepare(elements, _dtype(given.meta["val"]))
            _replace(module.graph, node, wait, given, str(group))
    module.graph.lint()
    module.recompile()
    return tuple(outcomes)


_ALL_REDUCE, _WAIT = "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))


def _wait(node: fx.Node) -> fx.Node | None:
    """The node that waits for a collective, if nobody else uses it."""
    users = [*node.users]
    return users[0] if len(users) == 1 and _name(users[0]) == _WAIT else None


def _replace(graph: fx.Graph, node: fx.Node, wait: Any, given: fx.Node, group: str) -> None:
    with graph.inserting_before(wait):
        made = inserted(graph, torch.ops.crossfuse.all_reduce.default, given, group)
    wait.replace_all_uses_with(made)
    for each in (wait, node):
        graph.erase_node(each)


def _outcome(
    node: fx.Node, wait: fx.Node | None, options: Backend, place: torch.device
) -> tuple[ChainOutcome, int]:
    """What is to become of a sum, and how many elements it has."""
    given, operation, group = node.args
    value, connection = given.meta["val"], _CONNECTED.get(str(group))
    if connection is None:
        why = f"a sum over group '{group}', which crossfuse.torch.connect_ranks did not connect"
    elif str(operation).lower() != "sum":
        why = f"the {operation} over GPUs; limit: sums"
    elif wait is None:
        why = "a sum over GPUs that others than one wait_tensor use"
    elif place.type == "cpu" and not options.sequential(place):
        why = "a sum over CPUs"
    else:
        why = connection.unfit(value)
    if why or connection is None:
        return ChainOutcome("main", (node.name,), "", "", None, None, why), 0
    elements = prod(value.shape)
    size = elements * value.element_size()
    times = one_shot_sum(size, connection.size), nccl_sum(size)
    text = f"a sum of {size} bytes over {connection.size} GPUs"
    if times[0] >= times[1] and not options.always:
        why = f"NCCL is estimated to be faster for {text}"
        return ChainOutcome("main", (node.name,), "", "eager", *times, why), 0
    return ChainOutcome("main", (node.name,), "all_reduce", "peers", *times, text), elements


def without_sums(untranslated: Sequence[str]) -> tuple[str, ...]:
    """Names of operators that were left to torch, less the one of this file."""
    return tuple(each for each in untranslated if each != "crossfuse.all_reduce.default")
