"""Kernels whose intermediate stays in the registers of its CTA.

The tiles of `crossfuse.schedule.rules.register_tiles`: a CTA makes the columns of the intermediate
that it multiplies; parts are summed by a cluster through DSM, or through L2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.counts import Count, Flag, ceil_div, choose, least
from crossfuse.planner.kernels.kernel import PartedKernel
from crossfuse.planner.kernels.phase import Phase, sums_received, widest_of
from crossfuse.planner.kernels.shape import Shape, TileRule, rows_in_parts

#: Columns that parts of the intermediate are multiples of: a row of a tile of D.
STEP = 64
#: Registers of a thread for what is kept, a quarter of one for each column, and for the sums of the
#: output beside it, a half for each.
REGISTERS = 192
#: The same where three warpgroups multiply.
REGISTERS_OF_THREE = 112


@dataclass(frozen=True)
class RegisterKernel(PartedKernel):
    """Tiles of one candidate, or of many."""

    #: Rows of a CTA's tiles: 64 for each warpgroup.
    rows: Count
    #: Columns of a tile of the output.
    columns: Count
    #: Parts of the intermediate's columns.
    parts: Count
    #: CTAs of a cluster: 1, or as many as parts.
    size: Count

    @property
    def family(self) -> str:
        """Name of the family."""
        return "registers"

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
        most = choose(self.rows > 128, REGISTERS_OF_THREE, REGISTERS)
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
        that is multiplied, and the last ones may end before.
        """
        inside = least(self.rows, shape.m)
        whole = ceil_div(shape.m, self.size) * self.size <= self.rows
        within = (inside % self.size == 0) | whole
        equal = choose(inside == 1, self.columns % (2 * self.size) == 0, within)
        return (self.size == self.parts) & (self.size <= device.max_cluster) & equal

    def tiles(self) -> dict[str, Any]:
        """Fields of `RegisterTiles`, of one candidate."""
        names = {
            "rows": self.rows,
            "columns": self.columns,
            "parts": self.parts,
            "cluster": self.size,
        }
        return {name: int(each) for name, each in names.items()}
