"""Families ``dsm`` and ``registers``: kernels whose intermediate stays on the chip, maybe in parts.

Tiles are those of `crossfuse.schedule.rules.parted_ffn`. Of ``dsm`` a cluster makes a part of the
intermediate's columns, each CTA a slice of it; all gather all slices through DSM, and multiply a
slice of the output each. Several parts are summed through L2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import ClassVar

import numpy as np

from crossfuse.hardware import WARPGROUP_ROWS, Device
from crossfuse.planner.cost.estimate import Clock, Work, turns_of
from crossfuse.planner.cost.rates import at
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.kernels.kernel import PartedKernel
from crossfuse.planner.kernels.phase import (
    Phase,
    by_warpgroups,
    hold_both,
    sums_received,
    widest_of,
)
from crossfuse.planner.kernels.shape import (
    CLUSTERS,
    NOTHING,
    PARTS,
    ROWS,
    Count,
    Flag,
    Shape,
    TileRule,
    ceil_div,
    choose,
    column_options,
    given_or,
    grid,
    least,
    row_options,
    rows_in_parts,
    select,
)

#: Columns that slices are multiples of, and all slices of a cluster or a part: what wgmma
#: multiplies at once, and a row of a tile of D.
SLICE, STEP = 16, 64
#: Columns that tiles of the output are multiples of.
BOX = 8
#: Float32 sums of a thread from which on ptxas may spill some, and where it spills most.
SPILLS = (212, 240)
#: Most bytes of the intermediate in a CTA: tiles have to fit beside it.
MAX_GATHERED = 128 << 10


@dataclass(frozen=True)
class ClusteredKernel(PartedKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "dsm"
    of_rule: ClassVar[tuple[str, ...]] = ("rows", "cluster", "parts")
    #: Rows of a cluster's tile: 64 for each warpgroup.
    rows: Count
    #: CTAs of a cluster.
    size: Count
    #: Parts of the intermediate's columns.
    parts: Count

    @classmethod
    def possible(cls, shape: Shape, given: Mapping[str, int] = NOTHING) -> ClusteredKernel:
        """List all tiles."""
        rows, sizes, parts = grid(
            given_or(given, "rows", row_options(shape, ROWS[:2])),
            given_or(given, "cluster", CLUSTERS),
            given_or(given, "parts", PARTS),
        )
        return cls(rows, sizes, parts)

    @property
    def added_parts(self) -> Count:
        """All parts."""
        return self.parts

    def tile_count(self, shape: Shape) -> Count:
        """Tiles of rows, each once for every part."""
        return ceil_div(shape.m, self.rows) * self.parts

    def width(self, shape: Shape) -> Count:
        """Columns of a slice; the slices of a cluster together are whole steps."""
        multiple = _multiple(self.size)
        return ceil_div(shape.n, self.parts * self.size * multiple) * multiple

    def share(self, shape: Shape) -> Count:
        """Columns of the intermediate that a cluster makes."""
        return self.size * self.width(shape)

    def columns(self, shape: Shape) -> Count:
        """Columns of a CTA's tile of the output; the last one may reach beyond it."""
        return ceil_div(shape.l, self.size * BOX) * BOX

    def rows_of_sum(self, shape: Shape) -> Count:
        """Rows of a tile, padded so that each part adds equally many elements."""
        inside = least(self.rows, shape.m)
        return rows_in_parts(inside, self.columns(shape), self.parts)

    def divides(self, shape: Shape) -> Flag:
        """Whether no slice and no tile that is added reaches beyond its tensor."""
        inside = least(self.rows, shape.m)
        whole = (self.parts == 1) | (self.rows_of_sum(shape) == inside)
        exact = self.parts * self.share(shape) == shape.n
        return whole & exact & (self.size * self.columns(shape) == shape.l)

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """Phases of a CTA, one after another."""
        share = self.share(shape)
        readers = ceil_div(shape.m, self.rows)
        first = self.first_phase(shape, self.width(shape), readers)
        second = self.second_phase(shape, self.columns(shape), share)
        gathered = self.rows * share * shape.item
        return replace(first, gathers=True), replace(second, gathered=gathered)

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule and of the lowering on tiles, other than shared memory."""
        width, columns, share = self.width(shape), self.columns(shape), self.share(shape)
        single = self.parts == 1
        most = 256 // shape.products
        gathered = self.rows * share * shape.item
        within = self.rows_of_sum(shape) <= self.rows
        return (
            # Slices are gathered as left tiles of operands of 16 bits.
            TileRule("operands", "the intermediate has elements of 16 bits", shape.item == 2),
            TileRule(
                "cluster", f"at most {device.max_cluster} CTAs", self.size <= device.max_cluster
            ),
            TileRule("slice", f"slices of at most {most} columns", width <= most),
            TileRule("output", "tiles of the output of at most 256 columns", columns <= 256),
            hold_both(*self.phases(shape)),
            TileRule(
                "gathered",
                f"the intermediate takes at most {MAX_GATHERED >> 10} KiB of a CTA",
                gathered <= MAX_GATHERED,
            ),
            self.has_equal_parts(shape, share),
            TileRule("sums", "each part has rows of a tile to add", single | within),
            TileRule(
                "resident",
                "clusters that wait for each other run at once",
                single | self.has_room(shape, device),
            ),
        )

    def spend(self, work: Work, clock: Clock) -> None:
        """Add both loops, the gather between them, and the sums of parts."""
        shape, fitted, size = work.shape, work.rates.fitted, self.size
        first, second = self.phases(shape)
        weights = shape.weight_bytes
        work.begin_anew(clock, first)
        work.run(clock, first, work.load(weights[0]))
        turns = turns_of(first, work.active)
        slices = (size - 1) * first.rows * first.columns * shape.item
        sent = slices / at(work.rates.measured.dsm_push, size)
        gather = choose(size > 1, turns * (fitted.gather + sent), 0.0)
        clock.add("gather", gather)
        ahead = work.ahead(second, gather + work.epilogue(first))
        work.run(clock, second, work.load(weights[1], ahead))
        work.sums(clock, second, self.added_parts)
        work.spills(clock, first, second, SPILLS)

    def tile_of(self, phase: int, cta: int) -> tuple[int, int, int]:
        """Slices of the columns, of the intermediate and of the output."""
        return 0, cta, 0

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """Every CTA of a cluster holds a whole part of it."""
        held = int(self.rows * self.share(shape)) * shape.item
        ctas = int(self.size)
        if ctas == 1:
            return "shared", f"{held} bytes of the CTA that made them"
        return "dsm", f"{held} bytes of each of {ctas} CTAs, which push their slices to the others"


def _multiple(size: Count) -> Count:
    """Columns that a slice is a multiple of, so that all slices together are whole steps."""
    if not isinstance(size, np.ndarray):
        return lcm(SLICE, STEP // gcd(STEP, int(size)))
    table = [lcm(SLICE, STEP // gcd(STEP, each)) for each in range(1, 17)]
    # Of more CTAs than a cluster has, any: a rule leaves them out.
    return np.array([1, *table], np.float64)[np.minimum(size, len(table)).astype(np.int64)]


DSM = ChainFamily(
    ClusteredKernel,
    "in the shared memory of a cluster",
    products=2,
    rule="parted_ffn.schedule_clustered_ffn",
    tiles={"tiles": "parted_ffn.ClusterTiles"},
    placements={
        "dsm": "the fused kernel with the intermediate in the shared memory of a cluster; of "
        "cascades the states that its CTAs merge"
    },
    second=("parts",),
)


# Family ``registers``: kernels whose intermediate stays in the registers of its CTA.
#
# The tiles of `crossfuse.schedule.rules.parted_ffn`: a CTA makes the columns of the intermediate
# that it multiplies; parts are summed by a cluster through DSM, or through L2.


#: Registers of a thread for what is kept, a quarter of one for each column, and for the sums of the
#: output beside it, a half for each, by how many warpgroups multiply; the others hold addresses.
REGISTERS = {1: 192, 2: 192, 3: 112}


@dataclass(frozen=True)
class RegisterKernel(PartedKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "registers"
    of_rule: ClassVar[tuple[str, ...]] = ("rows", "columns", "parts", "cluster")
    #: Rows of a CTA's tiles: 64 for each warpgroup.
    rows: Count
    #: Columns of a tile of the output.
    columns: Count
    #: Parts of the intermediate's columns.
    parts: Count
    #: CTAs of a cluster: 1, or as many as parts.
    size: Count

    @classmethod
    def possible(cls, shape: Shape, given: Mapping[str, int] = NOTHING) -> RegisterKernel:
        """List all tiles: parts are summed through L2, or by a cluster of as many CTAs."""
        rows, columns, parts, clustered = grid(
            given_or(given, "rows", row_options(shape, ROWS[:3])),
            given_or(given, "columns", column_options(shape.l)),
            given_or(given, "parts", PARTS),
            (0.0, 1.0),
        )
        found = cls(rows, columns, parts, np.where(clustered > 0, parts, 1.0))
        found = select(found, ~((clustered > 0) & (parts == 1)))
        return select(found, found.size == given["cluster"]) if "cluster" in given else found

    @property
    def added_parts(self) -> Count:
        """Parts that are summed through L2; those of a cluster are through DSM."""
        return choose(self.size > 1, 1, self.parts)

    def tile_count(self, shape: Shape) -> Count:
        """Tiles of the output, each once for every part; a cluster makes one, or all its parts."""
        tiles = ceil_div(shape.m, self.rows) * ceil_div(shape.l, self.columns) * self.parts
        return tiles / self.size if isinstance(tiles, np.ndarray) else tiles // self.size

    def width(self, shape: Shape) -> Count:
        """Columns of the intermediate that a CTA makes; the last part may reach beyond it."""
        return ceil_div(shape.n, self.parts * STEP) * STEP

    def rows_of_sum(self, shape: Shape) -> Count:
        """Rows of a tile, padded so that each part adds equally many elements through L2."""
        return rows_in_parts(least(self.rows, shape.m), self.columns, self.parts)

    def divides(self, shape: Shape) -> Flag:
        """Whether no part and no tile that is added reaches beyond its tensor."""
        exact = self.parts * self.width(shape) == shape.n
        inside = least(self.rows, shape.m)
        whole = (self.parts <= self.size) | (self.rows_of_sum(shape) == inside)
        return exact & ((self.parts == 1) | (whole & (shape.l % self.columns == 0)))

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """Phases of a CTA, one after another."""
        width = self.width(shape)
        readers = ceil_div(shape.m, self.rows) * ceil_div(shape.l, self.columns)
        first = self.first_phase(shape, width, readers)
        second = self.second_phase(shape, self.columns, width)
        received = sums_received(shape, self.rows, self.columns, shape.l, self.size)
        return replace(first, keeps=True), replace(second, split=self.size, received=received)

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule and of the lowering on tiles, other than shared memory."""
        width, single = self.width(shape), self.parts == 1
        most = by_warpgroups(REGISTERS, ceil_div(self.rows, WARPGROUP_ROWS))
        narrow = (self.columns % 8 == 0) & (self.columns <= widest_of(self.rows))
        alone = choose(single, (self.size == 1) & self.divides(shape), True)
        parts = choose(self.size > 1, self._in_cluster(shape, device), self._in_l2(shape, device))
        return (
            # Sums lie in registers as operands of 16 bits do, and of no other width.
            TileRule("operands", "the intermediate has elements of 16 bits", shape.item == 2),
            TileRule(
                "width",
                "registers hold the sums of the intermediate",
                width <= widest_of(self.rows, shape.products),
            ),
            TileRule(
                "registers",
                "registers hold the intermediate beside the sums of the output",
                width // 4 + self.columns // 2 <= most,
            ),
            TileRule("output", "tiles of the output of as many columns as registers hold", narrow),
            TileRule("divides", "without parts, tiles divide the chain", alone),
            self.has_equal_parts(shape, width),
            TileRule("sums", "parts divide a sum, in a cluster or all at once", single | parts),
        )

    def _in_l2(self, shape: Shape, device: Device) -> Flag:
        """Whether all parts run at once, and divide the rows of a sum."""
        return (self.rows_of_sum(shape) <= self.rows) & self.has_room(shape, device)

    def _in_cluster(self, shape: Shape, device: Device) -> Flag:
        """Whether the CTAs of a cluster make all parts, and sum slices of a tile.

        Slices are whole rows of a tile, or equal parts of the only one. They lie within the tile
        that is multiplied, and the last ones may end before. Registers hold pairs of a row's
        columns, those that the output has.
        """
        inside, columns = least(self.rows, shape.m), least(self.columns, shape.l)
        whole = ceil_div(shape.m, self.size) * self.size <= self.rows
        within = (columns % 2 == 0) & ((inside % self.size == 0) | whole)
        equal = choose(inside == 1, columns % (2 * self.size) == 0, within)
        return (self.size == self.parts) & (self.size <= device.max_cluster) & equal

    def spend(self, work: Work, clock: Clock) -> None:
        """Add both loops, without anything between them, and the sums of parts."""
        first, second = self.phases(work.shape)
        weights = work.shape.weight_bytes
        work.begin_anew(clock, first)
        work.run(clock, first, work.load(weights[0]))
        ahead = work.ahead(second, work.epilogue(first))
        work.run(clock, second, work.load(weights[1], ahead))
        work.exchange(clock, second)
        work.sums(clock, second, self.added_parts)

    def tile_of(self, phase: int, cta: int) -> tuple[int, int, int]:
        """Parts of the columns, which are then parts of the reduction."""
        return (0, 0, cta) if phase else (0, cta, 0)

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """It stays where it is made."""
        width = int(self.width(shape))
        return "registers", f"{width} columns in the CTA that made them and multiplies them"


IN_REGISTERS = ChainFamily(
    RegisterKernel,
    "intermediate in the registers of its CTA",
    products=2,
    rule="parted_ffn.schedule_register_ffn",
    tiles={"tiles": "parted_ffn.RegisterTiles"},
    placements={
        "registers": "the fused kernel with the intermediate, or state, in the registers of its CTA"
    },
    second=("columns",),
)
