"""Our own candidates: relaxations of the published rules, no two of which share a candidate.

Each gives one published restriction up and keeps the others, so that it says what that
restriction costs:

```
relaxation    gives up                                              R1   R2   R4   C
published     nothing; clusters that can run                        yes  yes  yes  kept
one CTA       R2: no cluster, no DSM                                yes  1    yes  kept
uneven        R1: tiles that do not divide                          no   yes  yes  kept
odd clusters  powers of two: 3, 5, 6, 7 and so on CTAs              yes  yes  yes  kept
again         R4: l spatial, each cluster makes the C it needs      yes  yes  no   kept
recomputed    C is made again for each tile of l                    yes  yes  yes  recomputed
through L2    C is made once for all clusters, which read it in L2  yes  yes  -    grid-wide
apart         gate and up on two CTAs                               yes  yes  yes  kept
```

Products with clusters of different shapes are chains of their own, see
``scripts/study/dataflow/cut.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import TERMS, Chain
from crossfuse.planner.kernels.shape import ceil_div
from study.dataflow.cluster import MAX_CLUSTER, legal_cluster
from study.dataflow.published import (
    CLUSTER_EXTENTS,
    Extents,
    LoopSchedule,
    Room,
    blocks_of,
    chosen,
    columns_in_a_cluster,
    ctas_of,
    grid,
    loop_schedules,
    sum_before_use,
)
from study.dataflow.rules import Rule, with_room
from study.dataflow.schedules import Residency, kept, recomputed
from study.dataflow.tiling import PIECE, Tiling

# Candidates as arrays: all of one schedule and residency together, in pieces.
#
# A piece is what `study.dataflow.movement` analyses at once. Tiles and clusters that
# are left are combined only here, and a piece at a time: a million candidates of four dims would
# take 64 MB, of which a piece has one.


def candidates_of(tiling: Tiling) -> int:
    """Number of candidates of a tiling whose blocks are arrays."""
    return len(np.atleast_1d(next(iter(tiling.block.values()))))


@dataclass(frozen=True)
class Batch:
    """All combinations of tiles with clusters."""

    #: An entry for each tile, and for each cluster.
    tiles: Extents
    clusters: Extents

    @property
    def size(self) -> int:
        """Number of candidates."""
        return len(next(iter(self.tiles.values()))) * len(next(iter(self.clusters.values())))

    def piece(self, start: int, size: int = PIECE) -> Tiling:
        """Make at most `size` candidates from `start` on; clusters of a tile follow each other."""
        index = np.arange(start, min(start + size, self.size))
        tile, cluster = np.divmod(index, len(next(iter(self.clusters.values()))))
        return Tiling(chosen(self.tiles, tile), chosen(self.clusters, cluster))


@dataclass(frozen=True)
class Group:
    """Candidates that differ in tiles and clusters only."""

    #: Where they come from, such as ``"published"``.
    relaxation: str
    schedule: LoopSchedule
    residency: Residency
    batches: tuple[Batch, ...]

    @property
    def size(self) -> int:
        """Number of candidates."""
        return sum(each.size for each in self.batches)


def combined(
    chain: Chain,
    device: Device,
    relaxation: str,
    residencies: Mapping[LoopSchedule, Residency],
    room: Sequence[Rule],
    tiles: Extents,
    clusters: Extents,
) -> tuple[Group, ...]:
    """Combine tiles and clusters that have room, a group for each schedule that has candidates.

    The clusters must all be able to run; `room` are the rules on room.
    """
    ctas = ctas_of(chain, clusters) * clusters.get(TERMS, 1)
    sizes, found = np.unique(ctas), []
    for schedule, residency in residencies.items():
        flags = with_room(chain, device, schedule, room, tiles, sizes)
        batches = tuple(
            Batch(chosen(tiles, keep), chosen(clusters, ctas == size))
            for size, keep in flags.items()
            if keep.any()
        )
        if batches:
            found.append(Group(relaxation, schedule, residency, batches))
    return tuple(found)


# Block extents along one dim, without those that another extent makes redundant.
#
# Of two extents with as many tiles, the smaller one moves no more on any level: cluster tiles,
# lanes and steps follow from the number of tiles, `ceil(ceil(x / b) / c) = ceil(x / (b c))`, and
# tiles are clipped at the edge. Tensor cores read an operand once for each instruction along the
# dim that only the other operand has, so that extents with more instructions stand apart:
#
# ```
# extent 192   block 96    2 tiles of 96, 2 + 2 instructions of 64 rows       both stay
#              block 128   tiles of 128 and 64, 2 + 1
#              block 112   tiles of 112 and 80, 2 + 2                         as 96: left out
# ```

#: Rows and columns that one wgmma instruction makes.
ROWS, COLUMNS = 64, 256


def dividing(chain: Chain) -> dict[str, tuple[int, ...]]:
    """Extents that divide, by dim; one step for dims that are smaller."""
    return {
        dim: tuple(each for each in blocks if chain.extents[dim] % each == 0) or blocks[:1]
        for dim, blocks in blocks_of(chain).items()
    }


def even(chain: Chain) -> dict[str, tuple[int, ...]]:
    """Extents that no other one makes redundant, by dim, ascending, including those that divide.

    There are about 2 sqrt(extent / 16) of them, where there are extent / 16 in all.
    """
    sizes = _instructions(chain)
    return {
        dim: _smallest(chain.extents[dim], blocks, sizes.get(dim, 0))
        for dim, blocks in blocks_of(chain).items()
    }


def _smallest(extent: int, blocks: tuple[int, ...], size: int) -> tuple[int, ...]:
    found: dict[tuple[int, int], int] = {}
    for block in blocks:
        found.setdefault((-(-extent // block), _reads(extent, block, size)), block)
    return tuple(sorted(found.values()))


def _reads(extent: int, block: int, size: int) -> int:
    """Instructions along a dim; none where the instruction has no extent of its own."""
    if not size:
        return 0
    whole, rest = divmod(extent, block)
    return int(whole * ceil_div(block, size) + ceil_div(rest, size))


def _instructions(chain: Chain) -> Mapping[str, int]:
    columns = {chain.column(index): COLUMNS for index in range(len(chain.products))}
    return {**columns, chain.rows[-1]: ROWS}


ResidencyRule = Callable[[Chain, LoopSchedule], "Residency | None"]


@dataclass(frozen=True)
class Relaxation:
    """Candidates that give one restriction up; see the module."""

    name: str
    text: str
    #: Tiles of which one at least does not divide its dim; else all divide.
    uneven: bool = False
    #: ``"one"``; ``"powers"`` of two, 2 to 16; or ``"odd"``: 2 to 16 with another extent.
    ctas: str = "powers"
    #: Whether columns of later products are spatial; None for either.
    columns: bool | None = False
    #: None of a schedule for which the relaxation has no candidates.
    residency: ResidencyRule = kept
    #: Whether gate and up are on two CTAs.
    terms: bool = False


def through_l2(chain: Chain, schedule: LoopSchedule) -> Residency | None:
    """Residency with all intermediates grid-wide; None without intermediates."""
    names = frozenset(each.name for each in chain.intermediates)
    return replace(kept(chain, schedule), grid_wide=names) if names else None


def only_recomputed(chain: Chain, schedule: LoopSchedule) -> Residency | None:
    """Residency of intermediates held for less than `kept` holds them; None if that is the same."""
    found = recomputed(chain, schedule)
    return None if found == kept(chain, schedule) else found


RELAXATIONS = (
    Relaxation("published", "R1 to R5, clusters that can run"),
    Relaxation("one CTA", "no cluster", ctas="one"),
    Relaxation("uneven", "tiles that do not divide", uneven=True),
    Relaxation("odd clusters", "extents other than powers of two", ctas="odd"),
    Relaxation("again", "l spatial, C made by each cluster that needs it", columns=True),
    Relaxation("recomputed", "C made again for each tile of l", residency=only_recomputed),
    Relaxation("through L2", "C made once, read in L2", columns=None, residency=through_l2),
    Relaxation("apart", "gate and up on two CTAs", terms=True),
)


def relaxation(name: str) -> Relaxation:
    """Look up one of `RELAXATIONS`, such as ``"uneven"``."""
    known = {each.name: each for each in RELAXATIONS}
    if name not in known:
        raise refuse(
            PlanRefused,
            "search-space",
            "relaxation",
            found=repr(name),
            limit="one of " + ", ".join(known),
            instead="write 'published', say",
        )
    return known[name]


def groups_of(chain: Chain, device: Device, member: Relaxation) -> tuple[Group, ...]:
    """Make the candidates of a relaxation, a group for each schedule that has any.

    Gate and up apart have none without a gate.
    """
    clusters = _clusters(chain, member)
    if not len(next(iter(clusters.values()))):
        return ()
    residencies = {each: member.residency(chain, each) for each in _schedules(chain, member)}
    # What is grid-wide is in L2, and what is made again is gone: a tile of it has to have room.
    room = Rule("R5", "each tensor fits", "room", Room(held=member.residency is kept))
    present = {key: each for key, each in residencies.items() if each is not None}
    tiles = _tiles(chain, member)
    return combined(chain, device, member.name, present, (room,), tiles, clusters)


def _schedules(chain: Chain, member: Relaxation) -> list[LoopSchedule]:
    found = [each for each in loop_schedules(list(chain.extents)) if sum_before_use(chain, each)]
    if member.columns is None:
        return found
    return [each for each in found if columns_in_a_cluster(chain, each) != member.columns]


def _tiles(chain: Chain, member: Relaxation) -> dict[str, np.ndarray]:
    if not member.uneven:
        return grid(dividing(chain))
    tiles, whole = grid(even(chain)), dividing(chain)
    divided = [np.isin(tiles[dim], whole[dim]) for dim in tiles]
    return chosen(tiles, ~np.logical_and.reduce(divided))


def _clusters(chain: Chain, member: Relaxation) -> dict[str, np.ndarray]:
    """Clusters of a relaxation that can run."""
    sizes = {"one": (1,), "powers": CLUSTER_EXTENTS, "odd": tuple(range(1, MAX_CLUSTER + 1))}
    terms = len(chain.products[0].rights)
    clusters = _small(chain, sizes[member.ctas])
    if member.terms:
        clusters[TERMS] = np.full(len(next(iter(clusters.values()))), float(max(terms, 2)))
    keep = np.asarray(legal_cluster(chain, clusters))
    ctas = ctas_of(chain, clusters)
    if member.ctas != "one" and not member.terms:
        keep = keep & (ctas > 1)
    if member.ctas == "odd":
        powers = [np.isin(clusters[dim], CLUSTER_EXTENTS) for dim in chain.extents]
        keep = keep & ~np.logical_and.reduce(powers)
    return chosen(clusters, keep)


def _small(chain: Chain, sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """All clusters of at most 16 CTAs, whether they can run or not."""
    found = {dim: np.ones(1) for dim in chain.extents}
    first = (*chain.rows, chain.column(0), chain.products[0].reduction)
    for dim in chain.extents:
        count = len(found[dim])
        found = {name: np.repeat(each, len(sizes)) for name, each in found.items()}
        found[dim] = np.tile(np.asarray(sizes, dtype=np.float64), count)
        ctas = np.multiply.reduce([found[each] for each in first])
        keep = (ctas <= MAX_CLUSTER) & (found[dim] <= MAX_CLUSTER)
        found = chosen(found, keep)
    return found
