"""Kernels of tiles in global memory: one product, and several whose intermediates pass through it.

The tiles of `crossfuse.schedule.rules.tensor_tiles`. Families say how phases follow each other::

    gemm      one kernel, one phase
    l2        one persistent kernel; the second phase waits for flags of the first
    global    two kernels; the second begins early, and waits for all of the first
    phases    as l2, of three layers or more
    launches  as global, of three layers or more
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, TypeVar

import numpy as np

from crossfuse.hardware import Device, device
from crossfuse.planner.cost.estimate import Clock, Work, fastest, overlapped
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.families.skinny import together
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.memory import cached_level, resident
from crossfuse.planner.kernels.phase import (
    Phase,
    copies_of,
    divides_sums,
    hold_both,
    left_tile,
    right_tile,
    stored,
    sums_received,
    widest_of,
)
from crossfuse.planner.kernels.shape import (
    CLUSTERS,
    NOTHING,
    ROWS,
    Count,
    Flag,
    Shape,
    Share,
    TileRule,
    ceil_div,
    choose,
    column_options,
    count,
    given_or,
    grid,
    has_equal_shares,
    least,
    most,
    read_extents,
    row_options,
    select,
)
from crossfuse.schema import typed

_T = TypeVar("_T", bound="TiledKernel")
_C = TypeVar("_C", bound="ChainedKernel")

#: Float32 sums of a thread from which on ptxas may spill some, and where it spills most.
SPILLS = (230, 240)


#: Texts of rules.
WIDE = "columns that registers hold sums of"
SHARES = "each CTA of a split has a share, and sums to add"
WHOLE = "tiles of a split divide the product"


class PhasedKernel(TileKernel):
    """Phases of one kind of tile, each of which stores what the next one reads."""

    #: Whether phases are those of one kernel, and wait for flags of the ones before them; else each
    #: is a kernel of its own.
    staged: ClassVar[bool] = False
    #: What `intermediate` says of how the intermediate gets to the phase that reads it.
    way: ClassVar[str]
    #: Rows of a tile, in all phases.
    rows: Count
    #: CTAs of a cluster along its first axis, in all phases.
    size: Count

    def _phase(
        self,
        shape: Shape,
        made: tuple[Count, int, int],
        summed: int,
        split: Flag,
        cluster: tuple[Count, Count],
        products: int = 1,
        *,
        staged: bool = False,
    ) -> Phase:
        """Make a phase over a reduction of `summed` elements, which a cluster may split.

        `made` are columns of a tile and of the whole, and bytes of an element; of `cluster` tiles
        lie down along the rows, and beside each other.
        """
        (columns, width, item), (down, beside) = made, cluster
        share = choose(split, self.size, 1)
        steps = ceil_div(summed, share * shape.depth)
        blocks = ceil_div(shape.m, self.rows * down)
        left, sharing = left_tile(self.rows, beside)
        right, common = right_tile(shape, columns, shape.depth, down)
        boxes, held = stored(self.rows, columns, steps, item, staged=staged)
        return Phase(
            self.rows,
            columns,
            products,
            shape.depth,
            steps,
            blocks * ceil_div(width, columns * beside),
            left,
            products * right,
            sharing,
            common,
            1 + products * copies_of(shape, columns, common),
            blocks,
            share,
            choose(split, 0, boxes),
            choose(split, 0, held),
            sums_received(shape, self.rows, columns, width, share),
        )

    def kernels(self, shape: Shape) -> tuple[tuple[Phase, ...], ...]:
        """One kernel if phases wait for flags, else one for each."""
        phases = self.phases(shape)
        return (phases,) if self.staged else tuple((each,) for each in phases)

    def clusters(self, shape: Shape, device: Device) -> tuple[Count, ...]:
        """Clusters that each kernel is launched with."""
        room = resident(device, self.cluster)
        found = []
        for kernel in self.kernels(shape):
            launched: Count = 0
            for phase in kernel:
                # What peers send has one place: each cluster computes one tile.
                capped = choose((phase.split > 1) | (phase.tiles < room), phase.tiles, room)
                launched = most(launched, capped)
            found.append(launched)
        return tuple(found)

    def spend(self, work: Work, clock: Clock) -> None:
        """Add all phases, and how tiles of the intermediates pass between them."""
        fitted = work.rates.fitted
        whole: Share = 0.0
        before: Phase | None = None
        for phase, fresh in zip(self.phases(work.shape), work.shape.weight_bytes, strict=True):
            ahead: Share = 0.0
            if before is not None:
                late = fitted.imbalance * whole
                clock.add("imbalance", late)
                # Tiles of an intermediate come behind the weights that were asked for before them.
                queue = fitted.queue * work.filled(phase) / work.arrival
                name, time = self.passing(work.rates)
                passing = overlapped(time, queue)
                clock.add(name, passing)
                ahead = work.ahead(phase, late + passing + work.epilogue(before))
            whole, before = work.run(clock, phase, work.load(fresh, ahead)), phase
            work.exchange(clock, phase)
            work.again(clock, phase)

    def passing(self, rates: Rates) -> tuple[str, Share]:
        """The term of the way from a stored tile to the phase that reads it, and microseconds."""
        if self.staged:
            return "flag", rates.fitted.flag + rates.measured.flag
        return "relaunch", rates.fitted.relaunch

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """It passes tile by tile where phases wait for flags; else all of it is stored first."""
        return "l2" if self.staged else cached_level(size, device), self.way

    def stored_bytes(self, shape: Shape) -> int:
        """Bytes of the intermediates."""
        return shape.m * shape.item * sum(each.columns for each in shape.layers[:-1])


@dataclass(frozen=True)
class TiledKernel(PhasedKernel):
    """Tiles of one candidate, or of many."""

    #: Of a tile of the first products, of each of them.
    rows: Count
    columns: Count
    #: Columns of a tile of the second product; it has as many rows. 0 without one.
    columns2: Count = 0
    #: CTAs of a cluster along its first axis.
    size: Count = 1
    #: Tiles side by side in a cluster, each by `size` CTAs.
    across: Count = 1
    #: Whether clusters of the first phase stand along the rows, and share weights; else they lie
    #: along the columns, and share rows of A.
    stacked: Flag = False
    #: Whether the CTAs of a cluster sum a part of the reduction each, in either phase.
    split: Flag = False
    split2: Flag = False

    @classmethod
    def possible(cls: type[_T], shape: Shape, given: Mapping[str, int] = NOTHING) -> _T:
        """List all tiles; a cluster of one CTA is the same however it lies."""
        flags = (0.0, 1.0)
        options = {
            "rows": row_options(shape, ROWS),
            "columns": column_options(shape.n),
            "columns2": column_options(shape.l) if shape.l else (0.0,),
            "size": CLUSTERS,
            "across": (1.0, 2.0, 4.0),
            "stacked": flags,
            "split": flags if cls.may_split(shape) else flags[:1],
            "split2": flags if shape.l else flags[:1],
        }
        kernel = cls(*grid(*(given_or(given, name, each) for name, each in options.items())))
        named: Any = {each: getattr(kernel, each) > 0 for each in ("stacked", "split", "split2")}
        kernel = replace(kernel, **named)
        single = (kernel.size == 1) & (kernel.stacked | kernel.split | kernel.split2)
        return select(kernel, ~single)

    @classmethod
    def may_split(cls, shape: Shape) -> bool:
        """Whether the reduction of the first products may be split over a cluster."""
        return shape.products == 1 and not cls.staged

    @classmethod
    def read_first(cls: type[_T], first: Mapping[str, Any]) -> _T:
        """Make a kernel of `TensorTiles` of the first products."""
        rows, columns, split, cluster, across = read_extents(
            first, "rows", "columns", "split", "cluster", "across"
        )
        size = max(split, cluster)
        return cls(rows, columns, size=size, across=across, split=split > 1)

    @property
    def cluster(self) -> Count:
        """CTAs of a cluster."""
        return self.size * self.across

    def first_phase(self, shape: Shape, item: int) -> Phase:
        """Make the phase of the first products, whose elements take `item` bytes."""
        down = choose(self.stacked, self.size, 1)
        beside = self.across * choose(self.stacked | self.split, 1, self.size)
        made = (self.columns, shape.n, item)
        found = self._phase(
            shape, made, shape.k, self.split, (down, beside), shape.products, staged=self.staged
        )
        return replace(found, functions=shape.functions)

    def rules_of_first(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions on the tiles of the first products."""
        split = _flag(self.split)
        most = f"at most {device.max_cluster} CTAs"
        wide = (self.columns % 8 == 0) & (self.columns <= widest_of(self.rows, shape.products))
        # Slices of sums of several tiles of rows are read as whole ones only.
        whole = (shape.n % (self.columns * self.across) == 0) & (shape.m % self.rows == 0)
        extents = (shape.k, shape.n)
        shares = splits(self.split, shape, extents, self.rows, self.columns, self.size)
        return (
            TileRule("cluster", most, self.cluster <= device.max_cluster),
            TileRule("columns", WIDE, wide),
            TileRule(
                "split",
                "a reduction is split of one product, in clusters beside each other",
                ~(split & _flag(self.stacked)) & (self.may_split(shape) | ~split),
            ),
            TileRule("shares", SHARES, shares),
            TileRule("whole", WHOLE, ~split | _flag(whole) | _flag(self.rows >= shape.m)),
        )

    def first_tiles(self) -> dict[str, Any]:
        """Fields of `TensorTiles` of the first products, of one candidate."""
        return {
            "rows": int(self.rows),
            "columns": int(self.columns),
            "cluster": 1 if self.split else int(self.size),
            "split": int(self.size) if self.split else 1,
            "across": int(self.across),
        }

    def tile_of(self, phase: int, cta: int) -> tuple[int, int, int]:
        """Along the first axis shares of a reduction, or rows; along the second columns."""
        size = int(self.size)
        first, second = cta % size, cta // size
        if self.split2 if phase else self.split:
            return 0, second, first
        if phase or self.stacked:
            return first, second, 0
        return 0, cta, 0


class GemmKernel(TiledKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "gemm"

    @classmethod
    def read(cls, tiles: Mapping[str, Any]) -> GemmKernel:
        """Make a kernel of `TensorTiles`; clusters stand along the rows, or split."""
        found = cls.read_first(tiles)
        return replace(found, stacked=bool(found.size > 1 and not found.split))

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """The only phase."""
        return (self.first_phase(shape, shape.out),)

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule and of the lowering on tiles, other than shared memory."""
        fine = (self.stacked != 0) | (self.size == 1) | (self.split != 0)
        stacked = TileRule("stacked", "clusters stand along the rows, or split", fine)
        return (*self.rules_of_first(shape, device), stacked)

    def tiles(self) -> dict[str, Any]:
        """Fields of `TensorTiles`, of one candidate."""
        return self.first_tiles()


class ChainedKernel(TiledKernel):
    """Two phases, the second of which reads the intermediate where the first has stored it."""

    @classmethod
    def read(cls: type[_C], tiles: Mapping[str, Any]) -> _C:
        """Make a kernel of `TensorTiles` of both phases, as ``first`` and ``second``."""
        phases = typed(Mapping[str, Mapping[str, Any]], tiles)
        found = cls.read_first(phases.get("first", {}))
        columns, split = read_extents(phases.get("second", {}), "columns", "split")
        stacked = bool(phases["first"].get("stacked"))
        return replace(found, columns2=columns, stacked=stacked, split2=split > 1)

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """Phases of a CTA, one after another."""
        return self.first_phase(shape, shape.item), self.second_phase(shape)

    def second_phase(self, shape: Shape) -> Phase:
        """Make the phase of the second product; CTAs that do not split it lie along the rows."""
        cluster = (choose(self.split2, 1, self.size), self.across)
        made = (self.columns2, shape.l, shape.out)
        found = self._phase(shape, made, shape.n, self.split2, cluster)
        return replace(found, functions=shape.output_functions)

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule and of the lowering on tiles, other than shared memory."""
        wide = (self.columns2 <= widest_of(self.rows)) & (self.columns2 % 8 == 0)
        extents = (shape.n, shape.l)
        shares = splits(self.split2, shape, extents, self.rows, self.columns2, self.size)
        return (
            *self.rules_of_first(shape, device),
            TileRule(
                "columns 2", "columns of the second product that registers hold sums of", wide
            ),
            TileRule(
                "shares 2",
                "each CTA of the second product's split has a share, and sums to add",
                shares,
            ),
        )

    def tiles(self) -> dict[str, Any]:
        """Fields of `TensorTiles` of both phases, of one candidate."""
        second = {
            "rows": int(self.rows),
            "columns": int(self.columns2),
            "cluster": 1 if self.split2 else int(self.size),
            "split": int(self.size) if self.split2 else 1,
        }
        first = self.first_tiles() | {"stacked": bool(self.stacked)}
        return {"first": first, "second": second}


class StagedKernel(ChainedKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "l2"
    staged: ClassVar[bool] = True
    way: ClassVar[str] = "stored by the first phase, read by the second when a flag says so"

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule and of the lowering on tiles, other than shared memory."""
        # A cluster computes one tile of a split reduction, and waits for tiles of others.
        first, second = self.phases(shape)
        fits = second.tiles <= resident(device, self.cluster)
        text = "clusters of a split second product all run at once"
        return (
            *super().rules(shape, device),
            hold_both(first, second),
            TileRule("resident", text, fits | ~np.asarray(self.split2, bool)),
        )

    def spend(self, work: Work, clock: Clock) -> None:
        """Add both phases; registers hold the sums of either."""
        super().spend(work, clock)
        first, second = self.phases(work.shape)
        work.spills(clock, first, second, SPILLS)


class SeparateKernels(ChainedKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "global"
    way: ClassVar[str] = "stored by the first kernel, read by the next"


def _flag(value: Flag) -> Any:
    return np.asarray(value, bool)


def splits(
    split: Flag,
    shape: Shape,
    extents: tuple[int, int],
    rows: Count,
    columns: Count,
    size: Count,
) -> Any:
    """Whether a reduction that is split has a share for each CTA, and sums that divide.

    `extents` are those of the reduction and of the columns; a tile has no more of these.
    """
    reduced, width = extents
    shares = has_equal_shares(reduced, size, shape.depth)
    sums = divides_sums(shape, rows, least(columns, width), size)
    fine = _flag(shares) & _flag(sums) & (_flag(size > 1))
    return fine | ~_flag(split)


GEMM = ChainFamily(
    GemmKernel,
    "one product",
    products=1,
    rule="tiled_gemm.schedule_tiled_gemm",
    tiles={"tiles": "tensor_tiles.TensorTiles"},
    counts=False,
    second=("columns",),
)
#: Rule arguments of both phases.
PHASE_TILES = {"first": "tensor_tiles.TensorTiles", "second": "tensor_tiles.TensorTiles"}
#: Fields that divide the second phase.
SECOND = ("columns2", "split2")
STAGED = ChainFamily(
    StagedKernel,
    "in the L2 cache, one persistent kernel",
    products=2,
    rule="tiled_ffn.schedule_tiled_ffn",
    tiles=PHASE_TILES,
    fixed={"staged": True},
    placements={"l2": "the fused kernel in one persistent launch, intermediate in the L2 cache"},
    second=SECOND,
    fits_all=True,
)
SEPARATE = ChainFamily(
    SeparateKernels,
    "in global memory, one kernel for each product",
    products=2,
    rule="tiled_ffn.schedule_tiled_ffn",
    tiles=PHASE_TILES,
    fixed={"staged": False},
    placements={
        "global": "the fused kernel in two launches, intermediate in global memory; of cascades "
        "the states of CTAs that share an axis, which the second launch merges"
    },
    second=SECOND,
    fits_all=True,
)


def together_kernels(
    shapes: Sequence[Shape], target: Device | None = None
) -> list[tuple[GemmKernel, Shape]]:
    """Tiles of several products of the same rows in one kernel, with what they compute.

    The fastest of each number of columns, the fastest first: those of a product with the columns of
    all, each rounded up to whole tiles.
    """
    spec = target or device()
    wide, rates = together(shapes), rates_of(spec)
    every: Any = GEMM.every(wide, spec)
    every = select(every, (every.split == 0) & (every.columns <= min(each.n for each in shapes)))
    found = []
    for columns in np.unique(every.columns) if count(every) else ():
        of = replace(wide, n=sum(int(columns) * ceil(each.n / columns) for each in shapes))
        few = select(every, every.columns == columns)
        order, times = fastest(few, of, spec, rates, 1)
        found.append((float(times[0]), select(few, int(order[0])), of))
    return [(kernel, of) for _, kernel, of in sorted(found, key=lambda each: each[0])]
