"""The space that FlashFuser starts from (arXiv 2512.12949), and what each of its rules leaves.

A candidate is a loop schedule, a block extent for each dim and a cluster extent for each dim. No
kernel is made of it. Schedules, blocks and clusters are counted apart and multiplied. Only rules on
room look at candidates, and those ask of a cluster nothing but how many CTAs it has.

```
m n | l k      m and n are spatial: clusters stand along them, each with one tile of both
               l and k are temporal: a cluster walks them, l outside k
```

Spatial dims have no order, since their tiles exist side by side. Of d dims, s are spatial in
C(d, s) ways, and the others are walked in (d - s)! orders. One dim at least is spatial: with none,
the grid is one cluster and all other multiprocessors idle. So the d! orders of s = 0 are not
counted; everything in space is, with nothing left to order. For two products over m, n, k, l this
gives 4 * 3! + 6 * 2! + 4 * 1! + 1 * 0! = 41.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import prod

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import Chain, Tensor
from crossfuse.planner.kernels import shape as counts
from crossfuse.planner.kernels.shape import Step

#: Blocks are multiples of this: the columns of the smallest tile that tensor cores like.
STEP = 16
#: CTAs of a cluster along each dim, as published.
CLUSTER_EXTENTS = (1, 2, 4, 8, 16)
#: Bytes of a partial sum.
ACCUMULATOR = 4
_REGISTER = 4

Extents = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LoopSchedule:
    """A partition of the dims into spatial and temporal ones, and an order of the latter."""

    #: Dims along which clusters stand.
    spatial: tuple[str, ...]
    #: Temporal dims, outermost first. A *position* is an index into it; ``len(order)`` is inside
    #: all loops.
    order: tuple[str, ...]

    def position(self, dim: str) -> int:
        """Position of a dim; -1, outside all loops, of a spatial one."""
        return self.order.index(dim) if dim in self.order else -1

    def __str__(self) -> str:
        """Format as spatial dims, a bar, temporal dims."""
        return " ".join((*self.spatial, "|", *self.order))


def loop_schedules(dims: Sequence[str]) -> Iterator[LoopSchedule]:
    """List all schedules of some dims, those with few spatial ones first, each once.

    Examples
    --------
    >>> [str(each) for each in loop_schedules("mn")]
    ['m | n', 'n | m', 'm n |']
    """
    for count in range(1, len(dims) + 1):
        for spatial in combinations(dims, count):
            rest = [each for each in dims if each not in spatial]
            for order in permutations(rest):
                yield LoopSchedule(spatial, order)


def latest(chain: Chain, schedule: LoopSchedule, index: int) -> int:
    """Innermost position from which a product's result can be held: outside its reduction."""
    position = schedule.position(chain.products[index].reduction)
    return position if position >= 0 else len(schedule.order)


def held(chain: Chain, schedule: LoopSchedule) -> dict[str, int]:
    """Positions from which intermediates stay, so that each cluster makes them once."""
    found = {}
    for index, tensor in enumerate(chain.intermediates):
        # Loops of later products repeat the consumer no more, since its own result is kept.
        others = set(chain.loops(index + 1)) - set(tensor.dims)
        outside = [each for each in map(schedule.position, others) if each >= 0]
        found[tensor.name] = min([latest(chain, schedule, index), *outside])
    return found


@dataclass(frozen=True)
class Domain:
    """Three independent choices."""

    schedules: tuple[LoopSchedule, ...]
    #: Extents of a CTA's tile, by dim.
    blocks: Mapping[str, tuple[int, ...]]
    #: CTAs along each dim, an entry for each cluster.
    clusters: Extents

    @property
    def size(self) -> int:
        """Candidates, counted and not made."""
        tiles = prod(len(each) for each in self.blocks.values())
        return len(self.schedules) * len(next(iter(self.clusters.values()))) * tiles


def grid(choices: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """All combinations of some choices, the last one fastest: an array of float64 for each name.

    Counts are float64, see `crossfuse.planner.kernels.shape`.
    """
    values = counts.grid(*(tuple(map(float, each)) for each in choices.values()))
    return dict(zip(choices, values, strict=True))


def chosen(extents: Extents, keep: np.ndarray) -> dict[str, np.ndarray]:
    """Select the entries that a flag or an index picks."""
    return {name: each[keep] for name, each in extents.items()}


def published(chain: Chain) -> Domain:
    """Make the whole space: all schedules, times all clusters, times all blocks."""
    clusters = grid(dict.fromkeys(chain.extents, CLUSTER_EXTENTS))
    return Domain(tuple(loop_schedules(list(chain.extents))), blocks_of(chain), clusters)


def blocks_of(chain: Chain) -> dict[str, tuple[int, ...]]:
    """Multiples of `STEP` up to the extent, by dim, and one at least; any extent of a batch."""
    batch = chain.rows[:-1]
    steps = {dim: 1 if dim in batch else STEP for dim in chain.extents}
    return {
        dim: tuple(range(steps[dim], max(extent, steps[dim]) + 1, steps[dim]))
        for dim, extent in chain.extents.items()
    }


# The rules. The paper leaves open what each of them says exactly; these are the readings that give
# its counts, ``scripts/study/dataflow/readings.py`` has others.


def divides(chain: Chain, dim: str, blocks: np.ndarray) -> np.ndarray:
    """Flag multiples of 16 that divide the dim; any divisors of a batch."""
    step = 1 if dim in chain.rows[:-1] else STEP
    found: np.ndarray = (blocks % step == 0) & (chain.extents[dim] % blocks == 0)
    return found


def ctas_of(chain: Chain, clusters: Extents) -> np.ndarray:
    """CTAs of clusters: rows times columns times shares of the sum of the first product."""
    dims = (*chain.rows, chain.column(0), chain.products[0].reduction)
    return np.asarray(np.multiply.reduce([clusters[each] for each in dims]))


def several_ctas(chain: Chain, clusters: Extents) -> np.ndarray:
    """Flag clusters of 2 to 16 CTAs with whole shuffle groups: cls_l is a multiple of cls_k."""
    ctas = ctas_of(chain, clusters)
    found = (ctas > 1) & (ctas <= Device.max_cluster)
    share = clusters[chain.products[0].reduction]
    for index in range(1, len(chain.products)):
        found &= clusters[chain.column(index)] % share == 0
    return found


def sum_before_use(chain: Chain, schedule: LoopSchedule) -> bool:
    """Whether the first reduction is innermost or spatial: sums are whole when activated."""
    dim = chain.products[0].reduction
    return dim in schedule.spatial or schedule.order[-1] == dim


def tiles_walked(chain: Chain, schedule: LoopSchedule) -> bool:
    """Whether `sum_before_use` holds, and another loop is walked."""
    others = [each for each in schedule.order if each != chain.products[0].reduction]
    return bool(others) and sum_before_use(chain, schedule)


def columns_in_a_cluster(chain: Chain, schedule: LoopSchedule) -> bool:
    """Whether no columns of later products are spatial: other clusters have no intermediate."""
    later = (chain.column(index) for index in range(1, len(chain.products)))
    return not any(each in schedule.spatial for each in later)


@dataclass(frozen=True)
class Room:
    """Predicate that each tensor alone fits the lowest memory that it may spill to.

    Inputs: a tile in shared memory. Intermediates: all held elements, as float32 sums, in the
    shared memory of all CTAs together. The output: the sums that are partial at once, in registers.
    The fields make other readings of it.
    """

    #: Whether intermediates take the bytes of sums; else those of stored elements.
    sums: bool = True
    #: Whether all that is held at once counts; else one tile.
    held: bool = True
    #: Whether an intermediate has the shared memory of the cluster; else that of one CTA.
    cluster: bool = True
    #: Whether the output has a limit.
    output: bool = True

    def __call__(
        self,
        chain: Chain,
        device: Device,
        schedule: LoopSchedule,
        blocks: Extents,
        ctas: np.ndarray,
    ) -> np.ndarray:
        """Flag the candidates that fit: with blocks [n] and `ctas` [n], or [sizes, 1] for all."""
        inner, hold = len(schedule.order), held(chain, schedule)
        shared = device.max_shared_bytes
        found = np.ones(np.broadcast(ctas, next(iter(blocks.values()))).shape, dtype=bool)
        for tensor in chain.tensors:
            if tensor.role == "input":
                size = live(chain, schedule, tensor, blocks, inner) * tensor.item
                found &= size <= shared
            elif tensor.role == "intermediate":
                position = hold[tensor.name] if self.held else inner
                size = live(chain, schedule, tensor, blocks, position)
                size = size * (ACCUMULATOR if self.sums else tensor.item)
                found &= size <= (shared * ctas if self.cluster else shared)
            elif self.output:
                reduction = schedule.position(chain.products[-1].reduction)
                position = reduction if self.held and reduction >= 0 else inner
                size = live(chain, schedule, tensor, blocks, position) * ACCUMULATOR
                found &= size <= device.registers * _REGISTER
        return found


def live(
    chain: Chain, schedule: LoopSchedule, tensor: Tensor, blocks: Extents, hold: int
) -> np.ndarray:
    """Elements of a tensor at once: dims walked inside a position whole, a block of others."""
    count = np.ones(1)
    for dim in tensor.dims:
        inside = schedule.position(dim) >= hold
        count = count * (chain.extents[dim] if inside else blocks[dim])
    return count


#: Names of the rules, with what each of them asks for.
RULES = {
    "R1": "tiles are multiples of 16 that divide",
    "R2": "2 to 16 CTAs, cls_k divides cls_l",
    "R3": "k innermost or spatial, and another loop walked",
    "R4": "l not spatial",
    "R5": "each tensor fits where it may spill to",
}


def count(chain: Chain, device: Device) -> tuple[Step, ...]:
    """Count the candidates that are left after each rule in turn, and before the first.

    Examples
    --------
    >>> from crossfuse.hardware import device
    >>> from crossfuse.planner.chain.build import matrix_chain
    >>> chain = matrix_chain(256, [4096, 16384, 4096])
    >>> [f"{each.candidates:.2e}" for each in count(chain, device("nvidia-h100"))]
    ['2.75e+13', '1.14e+08', '2.47e+07', '1.44e+07', '9.62e+06', '1.15e+06']
    """
    left = published(chain)
    sizes = [left.size]
    left = replace(left, blocks={dim: _dividing(chain, dim, e) for dim, e in left.blocks.items()})
    sizes.append(left.size)
    left = replace(left, clusters=chosen(left.clusters, several_ctas(chain, left.clusters)))
    sizes.append(left.size)
    for keep in (tiles_walked, columns_in_a_cluster):
        left = replace(left, schedules=tuple(e for e in left.schedules if keep(chain, e)))
        sizes.append(left.size)
    sizes.append(_with_room(chain, device, left))
    rules = {"all": "", **RULES}
    return tuple(Step(*rule, size) for rule, size in zip(rules.items(), sizes, strict=True))


def _dividing(chain: Chain, dim: str, blocks: Sequence[int]) -> tuple[int, ...]:
    every = np.asarray(blocks)
    return tuple(every[divides(chain, dim, every)].tolist())


def _with_room(chain: Chain, device: Device, left: Domain) -> int:
    sizes, times = np.unique(ctas_of(chain, left.clusters), return_counts=True)
    tiles, total = grid(left.blocks), 0
    for schedule in left.schedules:
        # All sizes at once: what is held of a tensor is the same for all of them.
        keep = Room()(chain, device, schedule, tiles, sizes[:, None])
        total += int(times @ np.count_nonzero(keep, axis=1))
    return total
