"""Tiles of products by the weights of experts, timed as those of one product of one row.

To memory the weights of several experts are a weight of as many more columns; where the products of
a token's experts are added up, one that sums over as many more elements. How the warps of a CTA are
divided among these tells `crossfuse.schedule.rules.experts`.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.hardware import MMA_LANES, Device, device
from crossfuse.planner.cost.estimate import corrected
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families.expert_columns import LANES, ColumnsKernel
from crossfuse.planner.families.skinny import SkinnyKernel
from crossfuse.planner.kernels.shape import Shape

_LANES = MMA_LANES, 2 * MMA_LANES
_PARTS, _LOADS, _MOST_WARPS = (1, 2, 4, 8, 16), (1, 2, 4, 8), 16


@dataclass(frozen=True)
class ExpertsShape:
    """Extents of products by the weights of experts."""

    #: Rows of the output: tokens, or pairs of a token and an expert.
    tokens: int
    columns: int
    #: What the product of one expert sums over.
    depth: int
    #: Two for gate and up.
    products: int = 1
    #: Experts whose products are added up in a row of the output.
    experts: int = 1
    #: Types of rows and weights.
    kinds: tuple[str, ...] = ("bfloat16", "bfloat16")
    #: Whether weights are stored as [n, k].
    k_major: bool = True
    #: Columns that are stored together of which one is made: 2 where gate and up alternate in
    #: weights stored as [k, n].
    joined: int = 1

    @property
    def text(self) -> str:
        """Rows, and the extents of their product."""
        of = f"{self.experts} experts added up" if self.experts > 1 else "one expert"
        return f"{self.tokens} x {self.depth} x {self.columns} of {of} each"

    @property
    def wide(self) -> Shape:
        """One row of a product that reads as much."""
        columns, depth = self.tokens * self.columns, self.experts * self.depth
        return Shape(1, columns, depth, 0, self.products)

    def kernel(self, tiles: SkinnyKernel) -> SkinnyKernel:
        """The kernel of some tiles for weights that lie so."""
        kind = SkinnyKernel if self.k_major else ColumnsKernel
        return kind(tiles.lanes, tiles.warps, tiles.loads)

    def broken(self, tiles: SkinnyKernel) -> str:
        """Name the first rule that tiles break, empty if none."""
        parts, rest = divmod(int(tiles.warps), self.experts)
        if rest or not parts:
            return f"{tiles.warps} warps, which {self.experts} experts do not share evenly"
        if set(self.kinds) not in ({"bfloat16"}, {"float16"}):
            return f"elements of {' and '.join(self.kinds)}"
        if self.columns % int(tiles.width):
            return f"columns that tiles of {int(tiles.width)} do not divide"
        step = int(tiles.depth) // self.experts
        if self.depth % step:
            return f"a reduction of {self.depth}, which steps of {step} do not divide"
        return tiles.broken(self.wide)

    def kernels(self) -> list[SkinnyKernel]:
        """List all tiles that keep the rules."""
        warps = [self.experts * parts for parts in _PARTS if self.experts * parts <= _MOST_WARPS]
        lanes = _LANES if self.k_major else LANES
        every = [SkinnyKernel(a, b, c) for a in lanes for b in warps for c in _LOADS]
        return [each for each in map(self.kernel, every) if not self.broken(each)]


def best_kernels(shape: ExpertsShape, target: Device | None = None) -> list[SkinnyKernel]:
    """Order tiles by their estimated time, the least first; empty where none divide the shape."""
    spec = target or device()
    rates = rates_of(spec)

    def time(tiles: SkinnyKernel) -> float:
        return float(corrected(tiles, shape.wide, spec, rates).microseconds)

    return sorted(shape.kernels(), key=time)
