"""Collectives over the GPUs of a process group: kernels of ours where they are faster than NCCL.

Where a group is not connected, or kernels do not take a tensor, torch does the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from crossfuse.calls import checked
from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.hardware import Device
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.torch.kernels import check_gradients, define
from crossfuse.torch.ranks import Connection, connection_of, dtype_of, group_name
from crossfuse.torch.rewrite import inserted

if TYPE_CHECKING:
    from crossfuse.torch.backend import Backend

#: The runtime refuses arguments that begin elsewhere.
_ALIGNED = 16


@dataclass(frozen=True)
class Collective(ABC):
    """What ranks do with a tensor that each of them has."""

    #: Of its operator, function, workload and schedule rule.
    name: str
    #: In words for reports.
    noun: str
    #: torch's functional operator.
    functional: str

    @abstractmethod
    def given(self, elements: int, ranks: int) -> tuple[int, ...]:
        """Extents with which its function takes a rank's tensor."""

    @abstractmethod
    def shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Extents of what a rank gets."""

    @abstractmethod
    def by_torch(self, given: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        """What torch's functional operator starts."""

    def slices(self, ranks: int) -> int:
        """Slices of a rank's tensor, each of which is another rank's."""
        return prod(self.given(ranks, ranks)[:-1])

    def unfit(self, shape: Sequence[int], ranks: int) -> str:
        """Why it cannot be done with a tensor, in words; empty if it can."""
        del shape, ranks
        return ""

    def left(self, arguments: Sequence[Any]) -> str:
        """Why kernels do not do what torch's operator is asked for; empty if they do.

        `arguments` are those between the tensor and the group.
        """
        del arguments
        return ""

    def scheduled(self, elements: int, ranks: int, dtype: str, target: Device) -> Any:
        """The scheduled function for tensors of as many elements."""
        from crossfuse import workload
        from crossfuse.schedule.rules.ranks import schedule_collective

        *_, each = self.given(elements, ranks)
        func = getattr(workload, self.name)(elements=each, ranks=ranks, dtype=dtype)
        return schedule_collective(func, target=target).mod["main"]


class _Sum(Collective):
    def left(self, arguments: Sequence[Any]) -> str:
        operation, *_ = arguments
        return "" if str(operation).lower() == "sum" else f"the {operation} over GPUs; limit: sums"


class _AllReduce(_Sum):
    def given(self, elements: int, ranks: int) -> tuple[int, ...]:
        return (elements,)

    def shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        return tuple(shape)

    def by_torch(self, given: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        made: torch.Tensor = torch.ops._c10d_functional.all_reduce(given, "sum", group)
        return made


class _AllGather(Collective):
    def given(self, elements: int, ranks: int) -> tuple[int, ...]:
        return (elements,)

    def shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        return (ranks * shape[0], *shape[1:])

    def unfit(self, shape: Sequence[int], ranks: int) -> str:
        return "" if shape else f"{self.noun} of a scalar"

    def by_torch(self, given: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        functional = torch.ops._c10d_functional
        made: torch.Tensor = functional.all_gather_into_tensor(given, ranks, group)
        return made


class _OfSlices(Collective):
    """A rank's tensor has a slice of rows for each rank."""

    def given(self, elements: int, ranks: int) -> tuple[int, ...]:
        return (ranks, elements // ranks)

    def unfit(self, shape: Sequence[int], ranks: int) -> str:
        if shape and shape[0] % ranks == 0:
            return ""
        rows = shape[0] if shape else "no"
        return f"{self.noun} of {rows} rows; limit: a multiple of {ranks}, a slice for each rank"


class _ReduceScatter(_OfSlices, _Sum):
    def shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        return (shape[0] // ranks, *shape[1:])

    def by_torch(self, given: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        functional = torch.ops._c10d_functional
        made: torch.Tensor = functional.reduce_scatter_tensor(given, "sum", ranks, group)
        return made


class _AllToAll(_OfSlices):
    def shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        return tuple(shape)

    def left(self, arguments: Sequence[Any]) -> str:
        sizes = {each for splits in arguments for each in splits}
        return f"{self.noun} of slices of several sizes" if len(sizes) > 1 else ""

    def by_torch(self, given: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        slices = [given.shape[0] // ranks] * ranks
        functional = torch.ops._c10d_functional
        made: torch.Tensor = functional.all_to_all_single(given, slices, slices, group)
        return made


_OPERATORS = "_c10d_functional"
ALL_REDUCE = _AllReduce("all_reduce", "a sum", f"{_OPERATORS}::all_reduce")
ALL_GATHER = _AllGather("all_gather", "an all-gather", f"{_OPERATORS}::all_gather_into_tensor")
REDUCE_SCATTER = _ReduceScatter(
    "reduce_scatter",
    "a reduce-scatter",
    f"{_OPERATORS}::reduce_scatter_tensor",
)
ALL_TO_ALL = _AllToAll("all_to_all", "an all-to-all", f"{_OPERATORS}::all_to_all_single")
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)


# Called by hand.


@checked
def all_reduce(
    tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None
) -> torch.Tensor:
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
    return _called(ALL_REDUCE, tensor, group)


@checked
def all_gather(
    tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None
) -> torch.Tensor:
    """Collect the tensors of a process group, one behind the other; see `all_reduce`.

    Parameters
    ----------
    tensor : torch.Tensor
        Of this process, [rows, ...], of the same shape in all.
    group : torch.distributed.ProcessGroup | None
        None takes all processes.

    Returns
    -------
    torch.Tensor
        Those of all ranks in their order, [ranks * rows, ...].

    Raises
    ------
    WorkloadRefused
        If autograd would have to record it, or the tensor has no rows.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> all_gather(torch.ones(2)).shape
    torch.Size([2])
    >>> dist.destroy_process_group()
    """
    return _called(ALL_GATHER, tensor, group)


@checked
def reduce_scatter(
    tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum a tensor over a process group and keep the slice of this process; see `all_reduce`.

    Parameters
    ----------
    tensor : torch.Tensor
        What this process adds, [rows, ...].
    group : torch.distributed.ProcessGroup | None
        None takes all processes.

    Returns
    -------
    torch.Tensor
        The rows of this rank, [rows / ranks, ...], of the sum.

    Raises
    ------
    WorkloadRefused
        If autograd would have to record it, or ranks do not divide the rows.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> reduce_scatter(torch.ones(2))
    tensor([1., 1.])
    >>> dist.destroy_process_group()
    """
    return _called(REDUCE_SCATTER, tensor, group)


@checked
def all_to_all(
    tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None
) -> torch.Tensor:
    """Send each rank of a process group a slice, and get one of each; see `all_reduce`.

    Parameters
    ----------
    tensor : torch.Tensor
        Slices for all ranks in their order, [rows, ...].
    group : torch.distributed.ProcessGroup | None
        None takes all processes.

    Returns
    -------
    torch.Tensor
        Those of all ranks for this one, [rows, ...].

    Raises
    ------
    WorkloadRefused
        If autograd would have to record it, or ranks do not divide the rows.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> all_to_all(torch.ones(2))
    tensor([1., 1.])
    >>> dist.destroy_process_group()
    """
    return _called(ALL_TO_ALL, tensor, group)


def _called(collective: Collective, tensor: torch.Tensor, group: Any) -> torch.Tensor:
    name = group_name(group)
    define()
    made: torch.Tensor = getattr(torch.ops.crossfuse, collective.name)(tensor, name)
    return made


# The operators ``crossfuse::all_reduce`` and its like.


def run(collective: Collective, given: torch.Tensor, group: str) -> torch.Tensor:
    """What an operator does."""
    check_gradients((given,), collective.name)
    ranks = ranks_of(group)
    check_shape(collective, given, ranks)
    connection = connection_of(group)
    given = given.contiguous()
    if connection is None or not connection.takes(given, collective):
        made = collective.by_torch(given, ranks, group)
        waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(made)
        return waited
    return connection.ranks.run(collective, aligned(given))


def fake(collective: Collective, given: torch.Tensor, group: str) -> torch.Tensor:
    """A tensor as an operator makes."""
    return given.new_empty(collective.shape(given.shape, ranks_of(group)))


def ranks_of(group: str) -> int:
    """Ranks of a process group, by its name in graphs."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return int(_resolve_process_group(group).size())


def check_shape(collective: Collective, given: torch.Tensor, ranks: int) -> None:
    """Refuse a tensor with which a collective cannot be done."""
    why = collective.unfit(given.shape, ranks)
    if why:
        found, _, limit = why.partition("; limit: ")
        raise refuse(
            WorkloadRefused,
            "torch-operator",
            f"crossfuse::{collective.name}",
            found=found,
            limit=limit or "tensors of rows",
            instead="give the tensor other extents, or pad it with rows",
        )


def aligned(given: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that begins where the runtime takes it."""
    return given.clone() if given.data_ptr() % _ALIGNED else given


# Collectives in graphs.


def fuse_collectives(
    module: fx.GraphModule, options: Backend, place: torch.device
) -> tuple[ChainOutcome, ...]:
    """Let kernels of ours do collectives of a graph, in place; what became of all."""
    outcomes = []
    for node in list(module.graph.nodes):
        collective = next((e for e in COLLECTIVES if e.functional == operator_of(node)), None)
        if collective is None:
            continue
        outcome = _outcome(collective, node, options, place)
        outcomes.append(outcome)
        connection, wait = connection_of(str(node.args[-1])), waiting(node)
        if outcome.name and connection is not None and wait is not None:
            value = node.args[0].meta["val"]
            connection.ranks.prepare(collective, prod(value.shape), dtype_of(value))
            _replace(module.graph, collective, node, wait)
    if outcomes:
        module.graph.lint()
        module.recompile()
    return tuple(outcomes)


def has_collectives(graph: fx.Graph) -> bool:
    """Whether a graph has collectives of the kinds that kernels do."""
    return any(operator_of(node) == e.functional for node in graph.nodes for e in COLLECTIVES)


def operator_of(node: fx.Node) -> str:
    """The name of a node's operator; empty if it is no call of one."""
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))


def waiting(node: fx.Node) -> fx.Node | None:
    """The node that waits for a collective, if nobody else uses it."""
    users = [*node.users]
    wait = f"{_OPERATORS}::wait_tensor"
    return users[0] if len(users) == 1 and operator_of(users[0]) == wait else None


def _replace(graph: fx.Graph, collective: Collective, node: fx.Node, wait: fx.Node) -> None:
    given, *_, group = node.args
    with graph.inserting_before(wait):
        operator = getattr(torch.ops.crossfuse, collective.name).default
        made = inserted(graph, operator, given, group)
    wait.replace_all_uses_with(made)
    for each in (wait, node):
        graph.erase_node(each)


def _outcome(
    collective: Collective, node: fx.Node, options: Backend, place: torch.device
) -> ChainOutcome:
    """What is to become of a collective of a graph."""
    why = why_left(collective, node, options, place)
    connection = connection_of(str(node.args[-1]))
    if why or connection is None:
        return ChainOutcome("main", (node.name,), "", "", None, None, why)
    value = node.args[0].meta["val"]
    size = prod(value.shape) * value.element_size()
    times = connection.times(value, collective)
    text = f"{collective.noun} of {size} bytes over {connection.size} GPUs"
    if not connection.takes(value, collective):
        why = f"NCCL is estimated to be faster for {text}"
        return ChainOutcome("main", (node.name,), "", "eager", *times, why)
    return ChainOutcome("main", (node.name,), collective.name, "peers", *times, text)


def why_left(collective: Collective, node: fx.Node, options: Backend, place: torch.device) -> str:
    """Why a collective of a graph is left to torch; empty if kernels take it."""
    group = str(node.args[-1])
    connection: Connection | None = connection_of(group)
    if connection is None:
        return (
            f"{collective.noun} over group '{group}', which crossfuse.torch.connect_ranks did "
            "not connect"
        )
    if waiting(node) is None:
        return f"{collective.noun} over GPUs that others than one wait_tensor use"
    if place.type == "cpu" and not options.sequential(place):
        return f"{collective.noun} over CPUs"
    value, arguments = node.args[0].meta["val"], node.args[1:-1]
    return (
        connection.unfit(value, collective)
        or collective.unfit(value.shape, connection.size)
        or collective.left(arguments)
    )


def without_collectives(untranslated: Sequence[str]) -> tuple[str, ...]:
    """Names of operators that were left to torch, less those over GPUs that are ours."""
    names = (*(each.name for each in COLLECTIVES), "all_gather_matmul", "matmul_reduce_scatter")
    ours = {f"crossfuse.{each}.default" for each in names}
    return tuple(each for each in untranslated if each not in ours)
