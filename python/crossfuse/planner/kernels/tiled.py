"""Kernels of tiles in global memory: one product, and two whose intermediate passes through L2.

The tiles of `crossfuse.schedule.rules.tensor_tiles`. `place` says how phases follow each other::

    gemm     one kernel, one phase
    l2       one persistent kernel; the second phase waits for flags of the first
    global   two kernels; the second begins early, and waits for all of the first
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.counts import Count, Flag, ceil_div, choose, most
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.memory import resident
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
from crossfuse.planner.kernels.shape import Shape, TileRule, has_equal_shares

PLACES = ("gemm", "l2", "global")


@dataclass(frozen=True)
class TiledKernel(TileKernel):
    """Tiles of one candidate, or of many."""

    #: One of `PLACES`.
    place: str
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

    @property
    def family(self) -> str:
        """Name of the family."""
        return self.place

    @property
    def cluster(self) -> Count:
        """CTAs of a cluster."""
        return self.size * self.across

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """Phases of a CTA, one after another."""
        first = self._first(shape)
        return (first,) if self.place == "gemm" else (first, self._second(shape))

    def kernels(self, shape: Shape) -> tuple[tuple[Phase, ...], ...]:
        """Phases of each launched kernel."""
        phases = self.phases(shape)
        return tuple((each,) for each in phases) if self.place == "global" else (phases,)

    def _first(self, shape: Shape) -> Phase:
        size, across = self.size, self.across
        share = choose(self.split, size, 1)
        steps = ceil_div(shape.k, share * shape.depth)
        rows_each = choose(self.stacked, size, 1) * self.rows
        beside = across * choose(self.stacked | self.split, 1, size)
        tiles = ceil_div(shape.m, rows_each) * ceil_div(shape.n, self.columns * beside)
        left, sharing = left_tile(self.rows, beside)
        right, common = right_tile(shape, self.columns, shape.depth, choose(self.stacked, size, 1))
        item = shape.out if self.place == "gemm" else shape.item
        boxes, held = stored(self.rows, self.columns, steps, item, staged=self.place == "l2")
        return Phase(
            self.rows,
            self.columns,
            shape.products,
            shape.depth,
            steps,
            tiles,
            left,
            shape.products * right,
            sharing,
            common,
            1 + shape.products * copies_of(shape, self.columns, common),
            ceil_div(shape.m, rows_each),
            share,
            choose(self.split, 0, boxes),
            choose(self.split, 0, held),
            sums_received(shape, self.rows, self.columns, shape.n, share),
        )

    def _second(self, shape: Shape) -> Phase:
        share = choose(self.split2, self.size, 1)
        down = choose(self.split2, 1, self.size)
        steps = ceil_div(shape.n, share * shape.depth)
        tiles = ceil_div(shape.m, self.rows * down)
        tiles = tiles * ceil_div(shape.l, self.columns2 * self.across)
        left, sharing = left_tile(self.rows, self.across)
        right, common = right_tile(shape, self.columns2, shape.depth, down)
        boxes, held = stored(self.rows, self.columns2, steps, shape.out, staged=False)
        return Phase(
            self.rows,
            self.columns2,
            1,
            shape.depth,
            steps,
            tiles,
            left,
            right,
            sharing,
            common,
            1 + copies_of(shape, self.columns2, common),
            ceil_div(shape.m, self.rows * down),
            share,
            choose(self.split2, 0, boxes),
            choose(self.split2, 0, held),
            sums_received(shape, self.rows, self.columns2, shape.l, share),
        )

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

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule and of the lowering on tiles, other than shared memory."""
        split = _flag(self.split)
        most = f"at most {device.max_cluster} CTAs"
        wide = (self.columns % 8 == 0) & (self.columns <= widest_of(self.rows, shape.products))
        one = shape.products == 1 and self.place != "l2"
        # Slices of sums of several tiles of rows are read as whole ones only.
        whole = (shape.n % (self.columns * self.across) == 0) & (shape.m % self.rows == 0)
        shares = _splits(self.split, shape, shape.k, self.rows, self.columns, self.size)
        rules = (
            TileRule("cluster", most, self.cluster <= device.max_cluster),
            TileRule("columns", "columns that registers hold sums of", wide),
            TileRule(
                "split",
                "a reduction is split of one product, in clusters beside each other",
                ~(split & _flag(self.stacked)) & (one | ~split),
            ),
            TileRule("shares", "each CTA of a split has a share, and sums to add", shares),
            TileRule(
                "whole",
                "tiles of a split divide the product",
                ~split | _flag(whole) | _flag(self.rows >= shape.m),
            ),
        )
        return (*rules, *(self._lying() if self.place == "gemm" else self._later(shape, device)))

    def _lying(self) -> tuple[TileRule, ...]:
        fine = (self.stacked != 0) | (self.size == 1) | (self.split != 0)
        return (TileRule("stacked", "clusters stand along the rows, or split", fine),)

    def _later(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions that the second product adds."""
        wide = (self.columns2 <= widest_of(self.rows)) & (self.columns2 % 8 == 0)
        shares = _splits(self.split2, shape, shape.n, self.rows, self.columns2, self.size)
        rules = (
            TileRule(
                "columns 2", "columns of the second product that registers hold sums of", wide
            ),
            TileRule(
                "shares 2",
                "each CTA of the second product's split has a share, and sums to add",
                shares,
            ),
        )
        if self.place != "l2":
            return rules
        # A cluster computes one tile of a split reduction, and waits for tiles of others.
        fits = self._second(shape).tiles <= resident(device, self.cluster)
        text = "clusters of a split second product all run at once"
        return (
            *rules,
            hold_both(*self.phases(shape)),
            TileRule("resident", text, fits | ~_flag(self.split2)),
        )

    def tiles(self) -> dict[str, Any]:
        """Fields of `TensorTiles`, of one candidate; of a chain as ``first`` and ``second``."""
        split = int(self.size) if self.split else 1
        first = {
            "rows": int(self.rows),
            "columns": int(self.columns),
            "cluster": 1 if self.split else int(self.size),
            "split": split,
            "across": int(self.across),
        }
        if self.place == "gemm":
            return first
        first |= {"stacked": bool(self.stacked)}
        second = {
            "rows": int(self.rows),
            "columns": int(self.columns2),
            "cluster": 1 if self.split2 else int(self.size),
            "split": int(self.size) if self.split2 else 1,
        }
        return {"first": first, "second": second}


def _flag(value: Flag) -> Any:
    return np.asarray(value, bool)


def _splits(
    split: Flag, shape: Shape, extent: int, rows: Count, columns: Count, size: Count
) -> Any:
    """Whether a reduction that is split has a share for each CTA, and sums that divide."""
    shares = has_equal_shares(extent, size, shape.depth)
    fine = _flag(shares) & _flag(divides_sums(shape, rows, columns, size)) & (_flag(size > 1))
    return fine | ~_flag(split)
