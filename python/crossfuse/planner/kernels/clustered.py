"""Kernels whose intermediate stays in the shared memory of a cluster.

The tiles of `crossfuse.schedule.rules.cluster_tiles`: a cluster makes a part of the intermediate's
columns, each CTA a slice of it; all gather all slices through DSM, and multiply a slice of the
output each. Several parts are summed through L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.dataflow.counts import Count, Flag, ceil_div, choose, least
from crossfuse.planner.kernels.phase import Phase, copies_of, left_tile, right_tile, stored
from crossfuse.planner.kernels.resident import resident
from crossfuse.planner.kernels.shape import Shape
from crossfuse.planner.kernels.shares import has_equal_shares, rows_in_parts

#: Columns that slices are multiples of, and all slices of a cluster: what wgmma multiplies at once,
#: and a row of a tile of D.
SLICE, STEP = 16, 64
#: Columns that tiles of the output are multiples of.
BOX = 8
#: Most bytes of the intermediate in a CTA: tiles have to fit beside it.
MAX_GATHERED = 128 << 10


@dataclass(frozen=True)
class ClusteredKernel:
    """Tiles of one candidate, or of many.

    Attributes
    ----------
    rows : Count
        Rows of a cluster's tile: 64 for each warpgroup.
    size : Count
        CTAs of a cluster.
    parts : Count
        Parts of the intermediate's columns.
    multiple : int
        Columns that slices are multiples of.
    """

    rows: Count
    size: Count
    parts: Count
    multiple: int = SLICE

    @property
    def family(self) -> str:
        """Name of the family."""
        return "dsm"

    @property
    def cluster(self) -> Count:
        """CTAs of a cluster."""
        return self.size

    def width(self, shape: Shape) -> Count:
        """Columns of a slice; the slices of a cluster together are whole steps."""
        multiple = _multiple(self.multiple, self.size)
        return ceil_div(shape.n, self.parts * self.size * multiple) * multiple

    def share(self, shape: Shape) -> Count:
        """Columns of the intermediate that a cluster makes."""
        return self.size * self.width(shape)

    def columns(self, shape: Shape) -> Count:
        """Columns of a CTA's tile of the output; the last one may reach beyond it."""
        return ceil_div(shape.l, self.size * BOX) * BOX

    def rows_of_sum(self, shape: Shape) -> Count:
        """Rows of a tile of which each part adds as many elements."""
        inside = least(self.rows, shape.m)
        return rows_in_parts(inside, self.columns(shape), self.parts)

    def divides(self, shape: Shape) -> Flag:
        """Whether no slice and no tile that is added reaches beyond its tensor."""
        inside = least(self.rows, shape.m)
        whole = (self.parts == 1) | (self.rows_of_sum(shape) == inside)
        exact = self.parts * self.share(shape) == shape.n
        return whole & exact & (self.size * self.columns(shape) == shape.l)

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """What CTAs do, one after another."""
        width, columns = self.width(shape), self.columns(shape)
        depth = shape.depth if shape.k_major else shape.depth // 2
        tiles = ceil_div(shape.m, self.rows) * self.parts
        left, sharing = left_tile(self.rows, self.size)
        right, _ = right_tile(shape, width, shape.depth, 1)
        first = Phase(
            self.rows,
            width,
            shape.products,
            shape.depth,
            ceil_div(shape.k, shape.depth),
            tiles,
            left,
            shape.products * right,
            sharing,
            1,
            1 + shape.products * copies_of(shape, width, 1),
            ceil_div(shape.m, self.rows),
            gathers=True,
        )
        steps = ceil_div(self.share(shape), depth)
        boxes, _ = stored(self.rows, columns, steps, shape.out, staged=False)
        second = Phase(
            self.rows,
            columns,
            1,
            depth,
            steps,
            tiles,
            0,
            right_tile(shape, columns, depth, 1)[0],
            copies=copies_of(shape, columns, 1),
            readers=ceil_div(shape.m, self.rows),
            boxes=choose(self.parts > 1, 0, boxes),
            gathered=self.rows * self.share(shape) * shape.item,
        )
        return first, second

    def kernels(self, shape: Shape) -> tuple[tuple[Phase, ...], ...]:
        """The phases of each kernel: there is one."""
        return (self.phases(shape),)

    def clusters(self, shape: Shape, device: Device) -> tuple[Count, ...]:
        """Clusters that the kernel is launched with: one for each tile."""
        return (ceil_div(shape.m, self.rows) * self.parts,)

    def legal(self, shape: Shape, device: Device) -> Flag:
        """Whether the rule and the lowering take the tiles, but for shared memory."""
        width, columns, share = self.width(shape), self.columns(shape), self.share(shape)
        gathered = self.rows * share * shape.item
        fine = (width <= 256 // shape.products) & (columns <= 256) & (gathered <= MAX_GATHERED)
        shares = has_equal_shares(shape.n, self.parts, share)
        within = self.rows_of_sum(shape) <= self.rows
        (clusters,) = self.clusters(shape, device)
        room = clusters <= resident(device, self.size)
        return fine & ((self.parts == 1) | (shares & within & room))

    def tiles(self) -> dict[str, Any]:
        """The fields of `ClusterTiles`, of one candidate."""
        names = {"rows": self.rows, "cluster": self.size, "parts": self.parts}
        return {name: int(each) for name, each in names.items()}


def _multiple(multiple: int, size: Count) -> Count:
    """Columns that a slice is a multiple of, so that all slices together are whole steps."""
    if not isinstance(size, np.ndarray):
        return lcm(multiple, STEP // gcd(STEP, int(size)))
    table = [lcm(multiple, STEP // gcd(STEP, each)) for each in range(1, 17)]
    return np.array([1, *table], np.float64)[size.astype(np.int64)]
