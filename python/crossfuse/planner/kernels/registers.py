"""Kernels whose intermediate stays in the registers of its CTA.

The tiles of `crossfuse.schedule.rules.register_tiles`: a CTA makes the columns of the intermediate
that it multiplies; parts are summed by a cluster through DSM, or through L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.dataflow.counts import Count, Flag, ceil_div, choose, least, whether
from crossfuse.planner.kernels.phase import (
    Phase,
    copies_of,
    left_tile,
    right_tile,
    stored,
    sums_received,
    widest_of,
)
from crossfuse.planner.kernels.resident import resident
from crossfuse.planner.kernels.shape import Shape
from crossfuse.planner.kernels.shares import has_equal_shares, rows_in_parts

#: Columns that parts of the intermediate are multiples of: a row of a tile of D.
STEP = 64
#: Registers of a thread for what is kept, a quarter of one for each column, and for the sums of the
#: output beside it, a half for each.
REGISTERS = 192
#: The same where three warpgroups multiply.
REGISTERS_OF_THREE = 112


@dataclass(frozen=True)
class RegisterKernel:
    """Tiles of one candidate, or of many.

    Attributes
    ----------
    rows : Count
        Rows of a CTA's tiles: 64 for each warpgroup.
    columns : Count
        Columns of a tile of the output.
    parts : Count
        Parts of the intermediate's columns.
    size : Count
        CTAs of a cluster: 1, or as many as parts.
    """

    rows: Count
    columns: Count
    parts: Count
    size: Count

    @property
    def family(self) -> str:
        """Name of the family."""
        return "registers"

    @property
    def cluster(self) -> Count:
        """CTAs of a cluster."""
        return self.size

    def width(self, shape: Shape) -> Count:
        """Columns of the intermediate that a CTA makes; the last part may reach beyond it."""
        return ceil_div(shape.n, self.parts * STEP) * STEP

    def rows_of_sum(self, shape: Shape) -> Count:
        """Rows of a tile of which each part adds as many elements, through L2."""
        return rows_in_parts(least(self.rows, shape.m), self.columns, self.parts)

    def divides(self, shape: Shape) -> Flag:
        """Whether no part and no tile that is added reaches beyond its tensor."""
        exact = self.parts * self.width(shape) == shape.n
        inside = least(self.rows, shape.m)
        whole = (self.parts <= self.size) | (self.rows_of_sum(shape) == inside)
        return exact & ((self.parts == 1) | (whole & (shape.l % self.columns == 0)))

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """What CTAs do, one after another."""
        width = self.width(shape)
        depth = shape.depth if shape.k_major else shape.depth // 2
        (tiles,) = self.clusters(shape, None)
        left, sharing = left_tile(self.rows, self.size)
        first = Phase(
            self.rows,
            width,
            shape.products,
            shape.depth,
            ceil_div(shape.k, shape.depth),
            tiles,
            left,
            shape.products * right_tile(shape, width, shape.depth, 1)[0],
            sharing,
            1,
            1 + shape.products * copies_of(shape, width, 1),
            ceil_div(shape.m, self.rows) * ceil_div(shape.l, self.columns),
            keeps=True,
        )
        steps = ceil_div(width, depth)
        boxes, _ = stored(self.rows, self.columns, steps, shape.out, staged=False)
        second = Phase(
            self.rows,
            self.columns,
            1,
            depth,
            steps,
            tiles,
            0,
            right_tile(shape, self.columns, depth, 1)[0],
            copies=copies_of(shape, self.columns, 1),
            readers=ceil_div(shape.m, self.rows),
            split=self.size,
            boxes=choose(self.parts > 1, 0, boxes),
            received=sums_received(shape, self.rows, self.columns, shape.l, self.size),
        )
        return first, second

    def kernels(self, shape: Shape) -> tuple[tuple[Phase, ...], ...]:
        """The phases of each kernel: there is one."""
        return (self.phases(shape),)

    def clusters(self, shape: Shape, device: Device | None) -> tuple[Count, ...]:
        """Clusters that the kernel is launched with: one for each tile."""
        tiles = ceil_div(shape.m, self.rows) * ceil_div(shape.l, self.columns) * self.parts
        return (tiles / self.size if isinstance(tiles, np.ndarray) else tiles // self.size,)

    def legal(self, shape: Shape, device: Device) -> Flag:
        """Whether the rule and the lowering take the tiles, but for shared memory."""
        width = self.width(shape)
        fine = width <= widest_of(self.rows, shape.products)
        most = choose(self.rows > 128, REGISTERS_OF_THREE, REGISTERS)
        fine = fine & (width // 4 + self.columns // 2 <= most)
        fine = fine & (self.columns % 8 == 0) & (self.columns <= widest_of(self.rows))
        single = (self.size == 1) & self.divides(shape)
        shares = has_equal_shares(shape.n, self.parts, width)
        parts = whether(self.size > 1, self._in_cluster(shape, device), self._in_l2(shape, device))
        return fine & whether(self.parts == 1, single, shares & parts)

    def _in_l2(self, shape: Shape, device: Device) -> Flag:
        """Whether all parts find room at once, and divide the rows of a sum."""
        (clusters,) = self.clusters(shape, device)
        room = clusters <= resident(device, self.size)
        return (self.rows_of_sum(shape) <= self.rows) & room

    def _in_cluster(self, shape: Shape, device: Device) -> Flag:
        """Whether the CTAs of a cluster make all parts, and sum slices of a tile.

        Slices are whole rows of a tile, or equal parts of the only one. They lie within the tile
        that is multiplied, and the last ones may end before.
        """
        inside = least(self.rows, shape.m)
        whole = ceil_div(shape.m, self.size) * self.size <= self.rows
        within = (inside % self.size == 0) | whole
        equal = whether(inside == 1, self.columns % (2 * self.size) == 0, within)
        return (self.size == self.parts) & (self.size <= device.max_cluster) & equal

    def tiles(self) -> dict[str, Any]:
        """The fields of `RegisterTiles`, of one candidate."""
        names = {
            "rows": self.rows,
            "columns": self.columns,
            "parts": self.parts,
            "cluster": self.size,
        }
        return {name: int(each) for name, each in names.items()}
