"""Family ``l2``: one persistent kernel, whose second phase waits for flags of the first.

The tiles of `crossfuse.planner.families.tiled`; the intermediate passes through the L2 cache.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import Work
from crossfuse.planner.cost.loop import Clock
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.counts import Share
from crossfuse.planner.families.family import ChainFamily, Placement
from crossfuse.planner.families.tiled import PHASE_TILES, SECOND, ChainedKernel
from crossfuse.planner.kernels.memory import resident
from crossfuse.planner.kernels.phase import hold_both
from crossfuse.planner.kernels.shape import Shape, TileRule

#: Float32 sums of a thread from which on ptxas may spill some, and where it spills most.
SPILLS = (230, 240)


class StagedKernel(ChainedKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "l2"
    staged: ClassVar[bool] = True

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

    def passing(self, rates: Rates) -> tuple[str, Share]:
        """A flag is raised for each tile."""
        return "flag", rates.fitted.flag + rates.measured.flag

    def spend(self, work: Work, clock: Clock) -> None:
        """Add both phases; registers hold the sums of either."""
        super().spend(work, clock)
        first, second = self.phases(work.shape)
        work.spills(clock, first, second, SPILLS)

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """It passes tile by tile."""
        return "l2", "stored by the first phase, read by the second when a flag says so"


FAMILY = ChainFamily(
    StagedKernel,
    "in the L2 cache, one persistent kernel",
    products=2,
    rule="tiled_ffn.schedule_tiled_ffn",
    tiles=PHASE_TILES,
    fixed={"staged": True},
    options=("paired",),
    placements={
        "l2": Placement("the fused kernel in one persistent launch, intermediate in the L2 cache")
    },
    second=SECOND,
    fits_all=True,
)
