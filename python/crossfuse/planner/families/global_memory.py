"""Family ``global``: a kernel for each product, the second of which begins early.

The tiles of `crossfuse.planner.families.tiled`; the intermediate is in global memory.
"""

from __future__ import annotations

from typing import ClassVar

from crossfuse.hardware import Device
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.counts import Share
from crossfuse.planner.families.family import ChainFamily, Placement
from crossfuse.planner.families.tiled import PHASE_TILES, SECOND, ChainedKernel
from crossfuse.planner.kernels.memory import cached_level
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.shape import Shape


class SeparateKernels(ChainedKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "global"

    def kernels(self, shape: Shape) -> tuple[tuple[Phase, ...], ...]:
        """A kernel for each phase."""
        return tuple((each,) for each in self.phases(shape))

    def passing(self, rates: Rates) -> tuple[str, Share]:
        """The second kernel waits for the end of the first."""
        return "relaunch", rates.fitted.relaunch

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """All of it is stored before any is read."""
        return cached_level(size, device), "stored by the first kernel, read by the next"


FAMILY = ChainFamily(
    SeparateKernels,
    "in global memory, one kernel for each product",
    products=2,
    rule="tiled_ffn.schedule_tiled_ffn",
    tiles=PHASE_TILES,
    fixed={"staged": False},
    options=("paired",),
    placements={
        "global": Placement(
            "the fused kernel in two launches, intermediate in global memory; of cascades the "
            "states of CTAs that share an axis, which the second launch merges"
        )
    },
    second=SECOND,
    fits_all=True,
)
