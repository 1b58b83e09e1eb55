"""Tiles of products by weights stored as [k, n], for one row: threads multiply by themselves.

Neighbours in memory are columns of one step of the reduction, and no operand of tensor cores. Of
one row each element is multiplied once, which threads do faster than memory delivers elements: an
SM has about twenty bytes of weights a cycle, and multiplies 128 elements. Nobody has timed these
kernels; what they share with those of [n, k] is told by what was fitted to these.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.hardware import SM_REGISTERS, WARP, Device
from crossfuse.planner.families.skinny import MOST_LOADS, REGISTERS, VECTOR, SkinnyKernel
from crossfuse.planner.kernels.shape import Count, Shape, Share, TileRule

#: Lanes at most beside which a warp's load has whole lines of the weights; and all that are tried.
_LINE_LANES, LANES = 4, (4, 8, 16)
#: Schedulers of an SM, and instructions for an element: it is widened, and multiplied.
_SCHEDULERS, _INSTRUCTIONS = 4, 2


@dataclass(frozen=True)
class ColumnsKernel(SkinnyKernel):
    """Tiles of one candidate: `lanes` threads of a warp share eight columns of each product."""

    @property
    def width(self) -> Count:
        """Columns of a CTA."""
        return VECTOR * self.groups

    @property
    def columns(self) -> Count:
        """Columns of the output that a thread sums, which it loads side by side."""
        return VECTOR

    @property
    def depth(self) -> Count:
        """Elements of the reduction in a step."""
        return self.warps * self.loads * self.lanes

    @property
    def halved(self) -> Count:
        """Whether a warp's load has less than whole lines of the weights."""
        return self.lanes > _LINE_LANES

    def sums(self, shape: Shape) -> Count:
        """Sums of a thread."""
        return self.columns * shape.products

    def row_bytes(self, shape: Shape) -> Count:
        """Bytes of rows that a warp loads with a load of the weights: lanes' neighbours are one."""
        return self.lanes * shape.item

    def cycles(self, shape: Shape) -> Share:
        """Cycles of an SM in which a warp multiplies what it has loaded."""
        return _INSTRUCTIONS * self.columns * shape.products / _SCHEDULERS

    def made(self, shape: Shape) -> Count:
        """Bytes of the sums of a tile, of each lane."""
        return super().made(shape) * self.lanes

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule on tiles."""
        room = SM_REGISTERS // (REGISTERS * WARP)
        return (
            TileRule("rows", "one row", shape.m == 1),
            TileRule("weights", "weights of 16 bits", shape.item == 2),
            TileRule("lanes", "4, 8 or 16 lanes that share columns", self.lanes in LANES),
            TileRule("warps", f"at most {room} warps", self.warps <= room),
            TileRule(
                "loads",
                f"{MOST_LOADS} loads of a thread at a time",
                shape.products * self.loads <= MOST_LOADS,
            ),
            TileRule("columns", "CTAs divide the columns", shape.n % self.width == 0),
            TileRule("reduction", "steps divide the reduction", shape.k % self.depth == 0),
        )
