"""Products whose operand is collected from GPUs, or whose result is scattered over them, in parts.

A part is the rows of one rank. While one is multiplied, copy engines move another to or from peers'
memory: no multiprocessor waits for NVLink, and the products are torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import getitem
from typing import TYPE_CHECKING

import torch
from torch import fx

from crossfuse.calls import checked
from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cost.collectives import (
    gathered_in_parts,
    product,
    scattered_in_parts,
)
from crossfuse.planner.cost.rank_rates import RankRates
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.torch.collectives import (
    ALL_GATHER,
    REDUCE_SCATTER,
    check_shape,
    operator_of,
    ranks_of,
    run,
    waiting,
    why_left,
)
from crossfuse.torch.kernels import check_gradients, define
from crossfuse.torch.ranks import (
    LARGEST,
    Connection,
    PeerRanks,
    connection_of,
    dtype_of,
    group_name,
)
from crossfuse.torch.rewrite import RESHAPE, inserted

if TYPE_CHECKING:
    from crossfuse.torch.backend import Backend


@checked
def all_gather_matmul(
    tensor: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: torch.distributed.ProcessGroup | None = None,
) -> list[torch.Tensor]:
    """Multiply the rows of all GPUs of a process group by weights of this one.

    ``[all_gather(tensor) @ each for each in weights]``, as column-parallel layers need it behind
    tensors that are split by rows. Where it is estimated to be faster, the own rows are multiplied
    while those of others arrive.

    Parameters
    ----------
    tensor : torch.Tensor
        Rows of this process, [rows, depth], as many in all.
    weights : sequence of torch.Tensor
        Right operands, [depth, columns] each.
    group : torch.distributed.ProcessGroup | None
        None takes all processes.

    Returns
    -------
    list of torch.Tensor
        For each weight, [ranks * rows, columns].

    Raises
    ------
    WorkloadRefused
        If autograd would have to record it.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> all_gather_matmul(torch.ones(2, 3), [torch.ones(3, 1)])
    [tensor([[3.],
            [3.]])]
    >>> dist.destroy_process_group()
    """
    name = group_name(group)
    define()
    made: list[torch.Tensor] = torch.ops.crossfuse.all_gather_matmul(tensor, list(weights), name)
    return made


@checked
def matmul_reduce_scatter(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """Multiply on all GPUs of a process group, and keep this one's rows of the sum.

    ``reduce_scatter(tensor @ weight)``, as row-parallel layers need it in front of tensors that are
    split by rows. Where it is estimated to be faster, the rows of other GPUs are multiplied first
    and move while the own ones are.

    Parameters
    ----------
    tensor : torch.Tensor
        Left operand, [rows, depth].
    weight : torch.Tensor
        Right operand, [depth, columns].
    group : torch.distributed.ProcessGroup | None
        None takes all processes.

    Returns
    -------
    torch.Tensor
        The rows of this rank, [rows / ranks, columns].

    Raises
    ------
    WorkloadRefused
        If autograd would have to record it, or ranks do not divide the rows.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> matmul_reduce_scatter(torch.ones(2, 3), torch.ones(3, 1))
    tensor([[3.],
            [3.]])
    >>> dist.destroy_process_group()
    """
    name = group_name(group)
    define()
    made: torch.Tensor = torch.ops.crossfuse.matmul_reduce_scatter(tensor, weight, name)
    return made


# The operators ``crossfuse::all_gather_matmul`` and ``crossfuse::matmul_reduce_scatter``.


def run_gathered(
    given: torch.Tensor, weights: Sequence[torch.Tensor], group: str
) -> list[torch.Tensor]:
    """What ``crossfuse::all_gather_matmul`` does."""
    check_gradients((given, *weights), "all_gather_matmul")
    _check_matrices("all_gather_matmul", given, weights)
    connection, given = connection_of(group), given.contiguous()
    peers = _peers(connection, given, ranks_of(group) * given.numel())
    columns = sum(each.shape[1] for each in weights)
    known = connection and peers and gathered_times(given, columns, connection.rates)
    if peers is None or not known or not pays(known):
        full = run(ALL_GATHER, given, group)
        return [full @ each for each in weights]
    return _gathered(peers, given, weights)


def _check_matrices(name: str, given: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Refuse operands that are no matrices which can be multiplied."""
    shapes = [tuple(each.shape) for each in (given, *weights)]
    plain = all(len(each) == 2 for each in shapes)
    if weights and plain and all(each[0] == shapes[0][1] for each in shapes[1:]):
        return
    of = f"weights of {', '.join(map(str, shapes[1:]))}" if weights else "no weights"
    raise refuse(
        WorkloadRefused,
        "torch-operator",
        f"crossfuse::{name}",
        found=f"a tensor of {shapes[0]} and {of}",
        limit="[rows, depth], and [depth, columns] for each weight",
        instead="flatten leading axes with reshape, and pass weights as x @ w takes them",
    )


def fake_gathered(
    given: torch.Tensor, weights: Sequence[torch.Tensor], group: str
) -> list[torch.Tensor]:
    """Tensors as ``crossfuse::all_gather_matmul`` makes."""
    rows = ranks_of(group) * given.shape[0]
    return [given.new_empty((rows, each.shape[1])) for each in weights]


def run_scattered(given: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    """What ``crossfuse::matmul_reduce_scatter`` does."""
    check_gradients((given, weight), "matmul_reduce_scatter")
    _check_matrices("matmul_reduce_scatter", given, [weight])
    ranks, given = ranks_of(group), given.contiguous()
    check_shape(REDUCE_SCATTER, given, ranks)
    connection = connection_of(group)
    peers = _peers(connection, given, given.shape[0] * weight.shape[1])
    known = connection and peers and scattered_times(given, weight.shape[1], connection.rates)
    if peers is None or not known or not pays(known):
        return run(REDUCE_SCATTER, given @ weight, group)
    return _scattered(peers, given, weight)


def fake_scattered(given: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    """A tensor as ``crossfuse::matmul_reduce_scatter`` makes."""
    return given.new_empty((given.shape[0] // ranks_of(group), weight.shape[1]))


def _peers(connection: Connection | None, given: torch.Tensor, elements: int) -> PeerRanks | None:
    """GPUs that can move parts of so many elements in all; None if there are none."""
    if connection is None or given.device != connection.place:
        return None
    ranks = connection.ranks
    return ranks if isinstance(ranks, PeerRanks) and _fits(given, elements) else None


def _fits(given: torch.Tensor, elements: int) -> bool:
    """Whether a slab holds so many elements of a tensor's type, of which there are products."""
    return 0 < elements * given.element_size() <= LARGEST and dtype_of(given) in _MOVED


# In graphs.


def fuse_products(
    module: fx.GraphModule, options: Backend, place: torch.device
) -> tuple[ChainOutcome, ...]:
    """Let products of a graph be in parts beside their collectives, in place, where that pays."""
    outcomes = []
    for node in list(module.graph.nodes):
        if operator_of(node) == ALL_GATHER.functional:
            outcomes += _fuse_gathered(module.graph, node, options, place)
        elif operator_of(node) == REDUCE_SCATTER.functional:
            outcomes += _fuse_scattered(module.graph, node, options, place)
    if outcomes:
        module.graph.lint()
        module.recompile()
    return tuple(outcomes)


def _fuse_gathered(
    graph: fx.Graph, node: fx.Node, options: Backend, place: torch.device
) -> list[ChainOutcome]:
    wait = waiting(node)
    if wait is None or why_left(ALL_GATHER, node, options, place):
        return []
    given, _, group = node.args
    products = _behind(wait)
    value, ranks = given.meta["val"], ranks_of(str(group))
    weights = [each.args[1] for each in products if _is_weight(each.args[1])]
    known = products and len(weights) == len(products)
    if not known or not _fits(value, ranks * value.numel()):
        return []
    rows, depth = value.numel() // value.shape[-1], value.shape[-1]
    flat = value.new_empty((rows, depth))
    connection = connection_of(str(group))
    columns = sum(e.meta["val"].shape[1] for e in weights)
    times = connection and gathered_times(flat, columns, connection.rates)
    if not times or not pays(times):
        return []
    order = {each: number for number, each in enumerate(graph.nodes)}
    first = min(products, key=order.__getitem__)
    for each in dict.fromkeys(weights):
        if order[each] > order[first]:
            first.prepend(each)
    with graph.inserting_before(first):
        operand = inserted(graph, RESHAPE, given, [rows, depth])
        operator = torch.ops.crossfuse.all_gather_matmul.default
        made = inserted(graph, operator, operand, weights, group)
        parts = [inserted(graph, getitem, made, number) for number in range(len(products))]
    for each, part in zip(products, parts, strict=True):
        each.replace_all_uses_with(part)
    _erase(graph, [*products, *wait.users, wait, node])
    return [_told("all_gather_matmul", (node, *products), times)]


def _fuse_scattered(
    graph: fx.Graph, node: fx.Node, options: Backend, place: torch.device
) -> list[ChainOutcome]:
    wait = waiting(node)
    if wait is None or why_left(REDUCE_SCATTER, node, options, place):
        return []
    product, group = _without_view(node.args[0]), node.args[-1]
    if product.target is not _MM or len(product.users) > 1:
        return []
    value, ranks = product.meta["val"], ranks_of(str(group))
    operand, weight = product.args
    if value.shape[0] % ranks or not _fits(value, value.numel()):
        return []
    connection = connection_of(str(group))
    times = connection and scattered_times(operand.meta["val"], value.shape[1], connection.rates)
    if not times or not pays(times):
        return []
    with graph.inserting_before(wait):
        operator = torch.ops.crossfuse.matmul_reduce_scatter.default
        made = inserted(graph, operator, operand, weight, group)
        made = inserted(graph, RESHAPE, made, list(wait.meta["val"].shape))
    wait.replace_all_uses_with(made)
    _erase(graph, [wait, node, node.args[0], product])
    return [_told("matmul_reduce_scatter", (product, node), times)]


def _behind(wait: fx.Node) -> list[fx.Node]:
    """Products of collected rows by weights, if nobody else uses those."""
    views = [each for each in wait.users if each.target in _VIEWS]
    sources = [each for each in (wait, *views) if each is not wait or len(views) < len(wait.users)]
    users = [each for source in sources for each in source.users if each not in views]
    depth = wait.meta["val"].shape[-1]
    plain = all(
        len(each.meta["val"].shape) == 2 and each.meta["val"].shape[-1] == depth for each in sources
    )
    mine = all(each.target is _MM and each.args[0] in sources for each in users)
    return users if plain and mine else []


def _erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Take nodes out of a graph, users first: torch keeps collectives that nobody uses."""
    for each in dict.fromkeys(nodes):
        graph.erase_node(each)


def _is_weight(node: fx.Node) -> bool:
    """Whether a node is an input of the graph or a view of one, which may stand anywhere."""
    given = (node,) if node.op != "call_function" else node.all_input_nodes
    return all(each.op in ("placeholder", "get_attr") for each in given)


def _without_view(node: fx.Node) -> fx.Node:
    """What a view that keeps columns is of, if nobody else uses it."""
    if node.target not in _VIEWS or len(node.users) > 1:
        return node
    given = node.args[0]
    same = given.meta["val"].shape[-1] == node.meta["val"].shape[-1]
    return given if same else node


def _told(name: str, nodes: Sequence[fx.Node], times: Times) -> ChainOutcome:
    text = "products in parts, one of each rank, beside copies between GPUs"
    return ChainOutcome("main", tuple(e.name for e in nodes), name, "peers", *times, text)


_MM = torch.ops.aten.mm.default
_TWO = 2
#: Element types of products in parts: those whose estimates are known.
_MOVED = ("float16", "bfloat16")
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, RESHAPE)


# What is faster.

#: Products in parts have to be told faster by that: times of products are off by some per cent.
_SURE = 0.97


Times = tuple[float, float]


def pays(times: Times) -> bool:
    """Whether products in parts are to be taken, by their time and that of what they replace."""
    return times[0] < _SURE * times[1]


def gathered_times(given: torch.Tensor, columns: int, between: RankRates) -> Times:
    """Microseconds of products in parts, and of an all-gather in front of whole ones."""
    (rows, depth), ranks = given.shape, between.ranks
    size = given.numel() * given.element_size()
    of_part, of_whole = ((each, columns, depth) for each in (rows, ranks * rows))
    part, whole = _product(of_part, given), _product(of_whole, given)
    collective = between.times(ALL_GATHER.name)
    least = min(collective.kernels(size, ranks), collective.nccl(size))
    return gathered_in_parts(part, size, between), least + whole


def scattered_times(given: torch.Tensor, columns: int, between: RankRates) -> Times:
    """Microseconds of a product in parts, and of a whole one in front of a reduce-scatter."""
    (rows, depth), ranks = given.shape, between.ranks
    size = rows * columns * given.element_size()
    of_part, of_whole = ((each, columns, depth) for each in (rows // ranks, rows))
    part, whole = _product(of_part, given), _product(of_whole, given)
    collective = between.times(REDUCE_SCATTER.name)
    least = min(collective.kernels(size, ranks), collective.nccl(size))
    return scattered_in_parts(part, size, between, _rates(given.device)), least + whole


def _product(extents: tuple[int, int, int], given: torch.Tensor) -> float:
    """Microseconds of a product of rows, columns and depth by torch."""
    return _estimated(extents, given.element_size(), given.device)


@lru_cache(maxsize=1024)
def _estimated(extents: tuple[int, int, int], item: int, place: torch.device) -> float:
    # Each call of an operator asks.
    rows, columns, depth = extents
    return product(rows, columns, depth, item, _rates(place), _device(place).sms)


def _rates(place: torch.device) -> Rates:
    return rates_of(_device(place))


def _device(place: torch.device) -> Device:
    from crossfuse.torch.backend import Backend

    return Backend().device_of(place)


# Parts one behind the other.


@contextmanager
def _beside() -> Iterator[None]:
    """Launches of the context run in a stream beside the current one, behind what that has."""
    current = torch.cuda.current_stream()
    side = _side(current.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield


def _join() -> None:
    """Let the current stream wait for the one beside it."""
    current = torch.cuda.current_stream()
    current.wait_stream(_side(current.device))


_SIDES: dict[torch.device, torch.cuda.Stream] = {}


def _side(device: torch.device) -> torch.cuda.Stream:
    return _SIDES.setdefault(device, torch.cuda.Stream(device))


def _others(peers: PeerRanks) -> list[int]:
    """Other ranks, each at the same distance from its own, so that no two write to one GPU."""
    return [(peers.rank + distance) % peers.size for distance in range(1, peers.size)]


def _gathered(
    peers: PeerRanks, given: torch.Tensor, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Multiply the own rows while those of others arrive, then these."""
    rows, depth = given.shape
    slabs = peers.memory.slabs(dtype_of(given))
    size, others = given.numel(), _others(peers)
    place = slice(peers.rank * size, (peers.rank + 1) * size)
    made = [given.new_empty((peers.size * rows, each.shape[1])) for each in weights]
    with _beside():
        peers.meet()  # all have read what their slabs held
        for each in others:
            slabs[each, place].copy_(given.view(-1))
        peers.meet()
    _multiply(given, weights, made, peers.rank)
    _join()
    full = slabs[peers.rank, : peers.size * size].view(peers.size, rows, depth)
    for each in others:
        _multiply(full[each], weights, made, each)
    return made


def _multiply(
    left: torch.Tensor, weights: Sequence[torch.Tensor], made: Sequence[torch.Tensor], part: int
) -> None:
    rows = slice(part * left.shape[0], (part + 1) * left.shape[0])
    for weight, result in zip(weights, made, strict=True):
        torch.mm(left, weight, out=result[rows])


def _scattered(peers: PeerRanks, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of others, which move while the own ones are multiplied; add all parts."""
    rows, columns = given.shape[0] // peers.size, weight.shape[1]
    slabs = peers.memory.slabs(dtype_of(given))
    size, others = rows * columns, _others(peers)
    place = slice(peers.rank * size, (peers.rank + 1) * size)
    left = given.view(peers.size, rows, given.shape[1])
    parts = [given.new_empty((rows, columns)) for _ in others]
    for number, (each, part) in enumerate(zip(others, parts, strict=True)):
        torch.mm(left[each], weight, out=part)
        with _beside():
            if not number:
                peers.meet()  # all have read what their slabs held
            slabs[each, place].copy_(part.view(-1))
    with _beside():
        peers.meet()
    torch.mm(left[peers.rank], weight, out=slabs[peers.rank, place].view(rows, columns))
    _join()
    received = slabs[peers.rank, : peers.size * size].view(peers.size, rows, columns)
    # Of two, the same bits in half of the time.
    return torch.add(*received) if peers.size == _TWO else torch.sum(received, 0)
