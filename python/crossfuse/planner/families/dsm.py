"""Family ``dsm``: kernels whose intermediate stays in the shared memory of a cluster.

The tiles of `crossfuse.schedule.rules.parted_ffn`: a cluster makes a part of the intermediate's
columns, each CTA a slice of it; all gather all slices through DSM, and multiply a slice of the
output each. Several parts are summed through L2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import ClassVar

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import Clock, Work, turns_of
from crossfuse.planner.cost.rates import at
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.kernels.kernel import PartedKernel
from crossfuse.planner.kernels.phase import Phase, hold_both
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
    given_or,
    grid,
    least,
    row_options,
    rows_in_parts,
)

#: Columns that slices are multiples of, and all slices of a cluster: what wgmma multiplies at once,
#: and a row of a tile of D.
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


FAMILY = ChainFamily(
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
