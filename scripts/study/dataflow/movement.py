"""All that a fused chain moves, by memory level and tensor.

```
level       what is counted                                                 nests of
registers   operands that tensor cores read from shared memory              CTAs
shared      what arrives in shared memory, from L2 or from peers            CTAs
dsm         what CTAs send each other                                       clusters
l2          what clusters read from L2 and write to it                      clusters
hbm         what L2 reads from HBM and writes to it                         the grid
```

A cluster reads a tile once from L2, for all its CTAs that need it (multicast). The clusters walk in
step, so that they read a tile once from HBM. L2 keeps what the loops inside some position touch:
the outermost position is taken at which the tiles of all tensors fit.

Further inputs, such as biases, go from L2 to registers, which the levels between do not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from crossfuse.calls import checked
from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import TERMS, Chain, Tensor
from crossfuse.planner.kernels.shape import Count, Flag, Share, ceil_div, choose
from study.dataflow.cluster import cluster_lanes
from study.dataflow.published import ACCUMULATOR, LoopSchedule
from study.dataflow.schedules import Residency
from study.dataflow.tiling import LEVELS, Tiling
from study.dataflow.volume import (
    Nest,
    elements_made,
    elements_moved,
    nests,
    operand_reads,
    region_elements,
    sums_of,
)

# Tensors that loops read and write, each with its loops.


def operands(chain: Chain, made: tuple[Nest, ...]) -> list[tuple[Nest, Tensor]]:
    """Pair the operands of products, intermediates too, with the loops that read them."""
    return [
        (nest, chain.tensor(name))
        for nest, product in zip(made, chain.products, strict=True)
        for name in (product.left, *product.rights)
    ]


def further_loops(chain: Chain, index: int, name: str) -> tuple[str, ...]:
    """Dims that a product runs over each time that it reads one of its further inputs.

    The epilogue runs when a sum is whole, so that the loop over the reduction repeats nothing that
    it reads.
    """
    product = chain.products[index]
    with_operands = product.reduction in chain.tensor(name).dims
    return chain.loops(index) if with_operands else chain.tensor(product.output).dims


def further(chain: Chain, made: tuple[Nest, ...]) -> list[tuple[Nest, Tensor]]:
    """Pair further inputs with the loops that read them."""
    return [
        (replace(nest, own=further_loops(chain, index, name)), chain.tensor(name))
        for index, (nest, product) in enumerate(zip(made, chain.products, strict=True))
        for name in product.further
    ]


def inputs(chain: Chain, made: tuple[Nest, ...]) -> list[tuple[Nest, Tensor]]:
    """Pair all that no product of the chain makes with the loops that read it."""
    given = [each for each in operands(chain, made) if each[1].role == "input"]
    return [*given, *further(chain, made)]


def written_bytes(chain: Chain, nest: Nest, hold: int, adds: bool) -> Count:
    """Bytes of the output: whole sums as stored, partial ones in float32 and as often as they come.

    Unless L2 adds them, partial sums are read back too.
    """
    tensor = chain.output
    elements = elements_moved(nest, tensor.dims, hold)
    partial = elements * ACCUMULATOR
    if not adds:
        again = elements - elements_moved(nest, tensor.dims, hold, first=True)
        partial = partial + again * ACCUMULATOR
    return choose(elements > chain.elements(tensor.name), partial, elements * tensor.item)


# Traffic between HBM and L2, which keeps what the loops inside some position touch.


def through_hbm(
    chain: Chain, made: tuple[Nest, ...], residency: Residency, l2_bytes: int
) -> dict[str, Count]:
    """Count bytes by tensor: what L2 cannot keep comes again; what fits moves once, or not at all.

    `made` are the nests of the grid, `l2_bytes` the L2 for tiles that are read again. Only
    intermediates that fit do not move.
    """
    inner = len(made[0].schedule.order)
    given = inputs(chain, made)
    # What a CTA holds for longer than L2 does not come again for that.
    longest = {each.name: residency.position(each, made[0].schedule) for each in chain.tensors}
    result: Count = 0
    found: dict[str, Count] = {}
    for hold in reversed(range(inner + 1)):
        fits: Flag = hold == inner
        if hold < inner:
            fits = _working_set(chain, made, residency, hold) <= l2_bytes
        for nest, tensor in given:
            size = _from_hbm(nest, tensor, min(hold, longest[tensor.name]))
            found[tensor.name] = choose(fits, size, found.get(tensor.name, 0))
        stays = min(hold, longest[chain.output.name])
        result = choose(fits, written_bytes(chain, made[-1], stays, adds=False), result)
    for index, tensor in enumerate(chain.intermediates):
        if tensor.name in residency.grid_wide:
            consumer, hold = made[index + 1], residency.position(tensor, made[0].schedule)
            region = region_elements(consumer, tensor.dims, hold) * tensor.item
            moved = elements_made(made[index], tensor.dims) * tensor.item
            moved = moved + _from_hbm(consumer, tensor, inner)
            streams = _working_set(chain, made, replace(residency, grid_wide=frozenset()), inner)
            found[tensor.name] = choose(region + streams <= l2_bytes, 0, moved)
    return {**found, chain.output.name: result}


def _working_set(chain: Chain, made: tuple[Nest, ...], residency: Residency, hold: int) -> Count:
    """Bytes that the loops from a position on touch in L2."""
    needed: Count = 0
    moving = (*operands(chain, made), *further(chain, made), (made[-1], chain.output))
    for nest, tensor in moving:
        if tensor.role != "intermediate" or tensor.name in residency.grid_wide:
            needed = needed + _in_memory(region_elements(nest, tensor.dims, hold), tensor)
    return needed


def _from_hbm(nest: Nest, tensor: Tensor, hold: int) -> Count:
    return _in_memory(elements_moved(nest, tensor.dims, hold), tensor)


def _in_memory(elements: Count, tensor: Tensor) -> Count:
    """Bytes that elements take in memory, where repeated ones are stored once."""
    size = elements * tensor.item
    return ceil_div(size, tensor.repeats) if tensor.repeats > 1 else size


# Traffic between the CTAs of a cluster, and what clusters add through L2.
#
# With the letters of `study.dataflow.cluster`, e elements of a tile, b bytes of one as
# stored and a bytes of a partial sum:
#
# ```
# all-exchange      s = split CTAs have partial sums of one tile; all of them need it whole
#
#   partial   0: [....]  1: [....]       reduce-scatter: CTA i gets slice i from s - 1 peers,
#   reduced   0: [ab  ]  1: [  cd]         (s - 1) e a in all
#   whole     0: [abcd]  1: [abcd]       all-gather: slice i goes to s - 1 peers, (s - 1) e b in all
#                                        naive: each sends all it has to each peer, s (s - 1) e a
#
# shuffle           g CTAs of a shuffle group have a tile each and need all g
#
#   has       0: [A.]  1: [.B]           as a ring or all at once, each gets g - 1 tiles:
#   needs     0: [AB]  1: [AB]             X (g - 1) e b in all for the X CTAs of a row
#
# reduce-scatter    s = split CTAs have partial sums of one tile of the output; each keeps a slice
#
#   partial   0: [....]  1: [....]         (s - 1) e a in all
#   reduced   0: [ab  ]  1: [  cd]
#
# between clusters  c clusters have partial sums of the same output, which L2 adds: c e a
# ```
#
# Totals are exact for tiles of any size, clipped ones too. Every CTA of a group takes part, one too
# whose share of the sum or whose columns lie beyond the edge.

METHODS = ("scatter", "naive")


def combined_bytes(
    elements: Count, split: Count, item: int, accumulator: Count, method: str = "scatter"
) -> Count:
    """Bytes by which `split` CTAs combine partial tiles, of any size, and all have the result.

    `split` are shares of the sum, or two for gate and up; `item` and `accumulator` are bytes of an
    element of the result, and of a partial one. ``"scatter"`` is a reduce-scatter of partial sums,
    then an all-gather of results; with ``"naive"`` each sends its partial tile to each other and
    all combine, in one step.
    """
    if method not in METHODS:
        raise refuse(
            PlanRefused,
            "exchange",
            "method of all_exchange",
            found=repr(method),
            limit="one of " + ", ".join(METHODS),
            instead="write 'scatter', which moves the fewest bytes",
        )
    if method == "naive":
        return split * (split - 1) * elements * accumulator
    return (split - 1) * elements * (accumulator + item)


@dataclass(frozen=True)
class Exchanges:
    """Bytes that the CTAs of all clusters send each other over a whole run, by primitive."""

    #: By intermediate.
    all_exchange: Mapping[str, Count]
    shuffle: Mapping[str, Count]
    #: Of the output.
    reduce_scatter: Count

    @property
    def total(self) -> Count:
        """Sum over all primitives."""
        parts = (*self.all_exchange.values(), *self.shuffle.values(), self.reduce_scatter)
        total: Count = 0
        for each in parts:
            total = total + each
        return total


def exchanges(
    chain: Chain,
    cluster: Mapping[str, Count],
    made: tuple[Nest, ...],
    residency: Residency,
    *,
    method: str = "scatter",
) -> Exchanges:
    """Count what a whole run exchanges; `made` are the nests of clusters, see `nests` of `volume`.

    A grid-wide intermediate goes through L2: each CTA stores the slice that it reduced, so that
    there is neither an all-gather nor a shuffle.
    """
    lanes = cluster_lanes(chain, cluster)
    combined: dict[str, Count] = {}
    shuffled: dict[str, Count] = {}
    for index, tensor in enumerate(chain.intermediates):
        terms = sums_of(chain, cluster, index)
        elements = elements_made(made[index], tensor.dims)
        split, group = lanes[index].split, lanes[index + 1].shuffle
        size = ACCUMULATOR * terms
        if tensor.name in residency.grid_wide:
            combined[tensor.name] = (split - 1) * elements * size
            continue
        combined[tensor.name] = combined_bytes(elements, split, tensor.item, size, method)
        # Each share of the sum has the tiles whole and serves its own shuffle groups.
        shuffled[tensor.name] = split * (group - 1) * elements * tensor.item
    output = chain.output
    hold = residency.position(output, made[-1].schedule)
    elements = elements_moved(made[-1], output.dims, hold)
    size = ACCUMULATOR * sums_of(chain, cluster, len(chain.products) - 1)
    stored = (lanes[-1].split - 1) * elements * size
    return Exchanges(combined, shuffled, stored)


# All levels together.

MEMORIES = ("registers", "shared", "dsm", "l2", "hbm")


@dataclass(frozen=True)
class Machine:
    """Properties of a kernel and its device that the analysis needs beside tiles."""

    #: L2 for tiles that are read again.
    l2_bytes: int
    #: Of the output tile of one instruction: 64 by at most 256 for wgmma.
    rows: int = 64
    columns: int = 256
    #: How partial sums are combined, see `combined_bytes`.
    method: str = "scatter"
    #: Whether L2 adds partial sums of the output; else they are read back and written again.
    adds: bool = True
    #: Part of each intermediate, 0 to 1, that clusters keep in L2 for want of room.
    spilled: Mapping[str, Share] = field(default_factory=dict)


@dataclass(frozen=True)
class Movement:
    """Bytes of a run, by level and tensor."""

    #: Levels are those of `MEMORIES`. The output counts what is written and read back.
    bytes: Mapping[str, Mapping[str, Count]]
    #: Parts of ``bytes["dsm"]``.
    exchanged: Exchanges

    def total(self, level: str) -> Count:
        """Bytes of all tensors at a level."""
        total: Count = 0
        for each in self.bytes[level].values():
            total = total + each
        return total


@checked
def movement(
    chain: Chain,
    schedule: LoopSchedule,
    tiling: Tiling,
    residency: Residency,
    machine: Machine,
) -> Movement:
    """Analyse one candidate, or many of one schedule and residency at once.

    Parameters
    ----------
    chain, schedule, residency, machine
        What runs, how and where.
    tiling : Tiling
        Integers, or arrays of one shape with an entry for each candidate.

    Returns
    -------
    Movement
        Integers, or arrays.

    Examples
    --------
    >>> from crossfuse.planner.chain.build import chain_of
    >>> from study.dataflow.schedules import kept
    >>> from study.dataflow.schedules import read_schedule
    >>> from crossfuse.workload import parse
    >>> chain = chain_of(parse("gemm_chain:M=128,K=768,N=3072,L=768"))
    >>> schedule = read_schedule("m n | l k", chain)
    >>> tiling = Tiling({"m": 128, "n": 128, "k": 64, "l": 96}, {"n": 8, "l": 8})
    >>> machine = Machine(l2_bytes=50 * 2**20)
    >>> found = movement(chain, schedule, tiling, kept(chain, schedule), machine)
    >>> found.total("hbm") == 2 * (2 * 128 * 768 + 2 * 768 * 3072)  # bytes: all of 2, each once
    True
    """
    made = nests(chain, schedule, tiling, residency)
    cta, cluster, grid = (made[level] for level in LEVELS)
    exchanged = exchanges(chain, tiling.cluster, cluster, residency, method=machine.method)
    dsm = {
        name: exchanged.all_exchange[name] + exchanged.shuffle.get(name, 0)
        for name in exchanged.all_exchange
    }
    dsm[chain.output.name] = exchanged.reduce_scatter
    return Movement(
        {
            "registers": _registers(chain, cta, machine),
            "shared": arrivals(chain, cta, residency, tiling.cluster),
            "dsm": dsm,
            "l2": through_l2(chain, cluster, residency, machine),
            "hbm": through_hbm(chain, grid, residency, machine.l2_bytes),
        },
        exchanged,
    )


def _registers(chain: Chain, made: tuple[Nest, ...], machine: Machine) -> dict[str, Count]:
    found = {}
    for index, (nest, product) in enumerate(zip(made, chain.products, strict=True)):
        pieces = {chain.rows[-1]: machine.rows, chain.column(index): machine.columns}
        for name in (product.left, *product.rights):
            tensor = chain.tensor(name)
            times = len(product.rights) if name == product.left else 1
            found[name] = operand_reads(nest, tensor.dims, pieces) * tensor.item * times
    return found


def arrivals(
    chain: Chain, made: tuple[Nest, ...], residency: Residency, cluster: Mapping[str, Count]
) -> dict[str, Count]:
    """Count the bytes that arrive in shared memory, by operand; `made` are the nests of CTAs.

    Of an intermediate, each CTA gets what it multiplies: its own and its peers'.
    """
    found = {
        tensor.name: _moved(nest, tensor, residency) * tensor.item
        for nest, tensor in operands(chain, made)
    }
    left = chain.products[0].left
    return {**found, left: found[left] * cluster.get(TERMS, 1)}


def through_l2(
    chain: Chain, made: tuple[Nest, ...], residency: Residency, machine: Machine
) -> dict[str, Count]:
    """Count the bytes that clusters read from L2 and write to it, by tensor.

    `made` are the nests of clusters. No machine makes these less than one that adds and spills
    nothing.
    """
    found = {
        tensor.name: _moved(nest, tensor, residency) * tensor.item
        for nest, tensor in inputs(chain, made)
    }
    for index in range(len(chain.intermediates)):
        name = chain.products[index].output
        found[name] = _handed_on(chain, made, index, residency, machine)
    hold = residency.position(chain.output, made[-1].schedule)
    found[chain.output.name] = written_bytes(chain, made[-1], hold, machine.adds)
    return found


def _handed_on(
    chain: Chain, made: tuple[Nest, ...], index: int, residency: Residency, machine: Machine
) -> Count:
    """Bytes of an intermediate in L2: written once made, read by clusters tile by tile.

    Of a tensor that stays in its cluster, this is the part that spilled, unless several clusters
    have partial sums of it.
    """
    tensor, reduction = chain.intermediates[index], chain.products[index].reduction
    written = elements_made(made[index], tensor.dims)
    read = elements_moved(made[index + 1], tensor.dims, len(made[0].schedule.order)) * tensor.item
    whole = written * tensor.item + read
    if tensor.name not in residency.grid_wide:
        whole = _part(whole, machine.spilled.get(tensor.name, 0))
    if reduction not in made[0].schedule.spatial:
        return whole
    parts = written * ACCUMULATOR * len(chain.products[index].rights)
    return choose(made[index].grains[reduction].tiles > 1, parts + read, whole)


def _part(count: Count, share: Share) -> Count:
    """A share of a count, rounded to a whole number."""
    if isinstance(count, np.ndarray) or isinstance(share, np.ndarray):
        return np.rint(count * share)
    return round(count * share)


def _moved(nest: Nest, tensor: Tensor, residency: Residency) -> Count:
    return elements_moved(nest, tensor.dims, residency.position(tensor, nest.schedule))
