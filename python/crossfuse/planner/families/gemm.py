"""Family ``gemm``: one product, of tiles in one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from crossfuse.hardware import Device
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.counts import Share
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.families.tiled import TiledKernel
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.shape import Shape, TileRule


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

    def passing(self, rates: Rates) -> tuple[str, Share]:
        """One phase passes nothing on."""
        raise AssertionError("one product has no intermediate")

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """One product has none."""
        raise AssertionError("one product has no intermediate")

    def tiles(self) -> dict[str, Any]:
        """Fields of `TensorTiles`, of one candidate."""
        return self.first_tiles()


FAMILY = ChainFamily(
    GemmKernel,
    "one product",
    products=1,
    rule="tiled_gemm.schedule_tiled_gemm",
    tiles={"tiles": "tensor_tiles.TensorTiles"},
    counts=False,
    second=("columns",),
)
