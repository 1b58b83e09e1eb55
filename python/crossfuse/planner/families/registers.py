"""Family ``registers``: kernels whose intermediate stays in the registers of its CTA.

The tiles of `crossfuse.schedule.rules.parted_ffn`: a CTA makes the columns of the intermediate
that it multiplies; parts are summed by a cluster through DSM, or through L2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from crossfuse.hardware import WARPGROUP_ROWS, Device
from crossfuse.planner.cost.estimate import Clock, Work
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.kernels.kernel import PartedKernel
from crossfuse.planner.kernels.phase import Phase, by_warpgroups, sums_received, widest_of
from crossfuse.planner.kernels.shape import (
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

#: Columns that parts of the intermediate are multiples of: a row of a tile of D.
STEP = 64
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


FAMILY = ChainFamily(
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
