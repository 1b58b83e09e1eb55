"""The registers that wgmma leaves a tile in, seen from one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfuse.lower.hopper.coordinates import Coordinates
from crossfuse.lower.hopper.finish.elements import Elements
from crossfuse.lower.hopper.finish.further import Pair
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS


class Fragment:
    """A warpgroup's accumulators as elements of a tile.

    The indices of each block of 64 rows follow those of the block above.

    Parameters
    ----------
    plan : PhasePlan
        The phase.
    where : Coordinates
        Of this thread.
    accumulators : Any
        Registers, those of each product after those of the one before.
    """

    def __init__(self, plan: PhasePlan, where: Coordinates, accumulators: Any) -> None:
        self.plan = plan
        self.where = where
        self.accumulators = accumulators
        self.elements = Elements(plan)

    def place(self, row: Any, column: Any, index: int) -> tuple[Any, Any]:
        """Where an accumulator belongs, in a tile of this warpgroup that begins at row and column.

        Accumulator ``4 j + 2 h + q`` of a thread is element (warp * 16 + lane / 4 + 8 h,
        8 j + 2 (lane % 4) + q) of the block. PTX ISA, wgmma, register fragments for D.
        """
        below, index = divmod(index, self.plan.accumulators)
        block, half, pair = index // 4, index // 2 % 2, index % 2
        down = WARPGROUP_ROWS * below + 8 * half
        i = row + (self.where.warp * 16 + self.where.lane // 4 + down)
        return i, column + (block * 8 + self.where.lane % 4 * 2 + pair)

    def sums(self, index: int) -> tuple[Any, ...]:
        """An accumulator of each product."""
        below, index = divmod(index, self.plan.accumulators)
        return tuple(
            self.accumulators[self.plan.first_sum(below, number) + index]
            for number in range(len(self.plan.rights))
        )

    def pack(
        self,
        matrices: list[Any],
        row: Any,
        column: Any,
        first: int,
        read: Callable[[int], Sequence[Pair]],
    ) -> None:
        """Blocks of 8 columns in the order of stmatrix: both halves of the rows of each.

        The columns of a block of rows follow those of the one above it.
        `read` tells of an accumulator what it and the next one read besides their sums.
        """
        for number, register in enumerate(matrices):
            index = first // 2 + number * 2
            i, j = self.place(row, column, index)
            low, high = self.sums(index), self.sums(index + 1)
            self.elements.pack(register, i, j, low, high, read(index))
