"""An intermediate that stays in registers, as the left operand of the next product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.epilogue.prefetch import Ahead, Fragment
from crossfuse.lower.hopper.features.feature import ConsumerPart, Ending, Feature, TileSums
from crossfuse.lower.hopper.plan.operands import GROUP, GROUP_REGISTERS, kept_registers
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import let, registers
from crossfuse.lower.hopper.wgmma import LeftOperand, left_registers
from crossfuse.lower.hopper.wgmma_instruction import hold
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.body import Body


class Keeper(Ending):
    """Rounds a warpgroup's sums to the left operand of its next product, in registers.

    ::

        sums of 16 columns in a thread        registers of the operand
        row g      c c+1        c+8 c+9        0           2
        row g + 8  c c+1        c+8 c+9        1           3

    Each thread holds just the elements that wgmma wants of it. `kept` are the registers that hold
    the operand.
    """

    def __init__(self, sums: TileSums, kept: Any) -> None:
        super().__init__(sums)
        self.kept = kept
        self.fragment = Fragment(self.plan, self.where, self.accumulators)
        self.width = self.plan.program.store.tile.shape[1]
        groups = tuple((first, GROUP) for first in range(0, self.width, GROUP))
        self.further = Ahead(self.fragment, groups, self.warmup)

    def ahead(self, values: Mapping[Any, Any]) -> None:
        """Prefetch further operands of the tile that `values` place."""
        self.further.start(*self._first(values))

    def _first(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of this warpgroup's first element."""
        origin = self.plan.program.store.tile.origin
        row, column = (at(each, dict(values)) for each in origin)
        return row + self.warpgroup * WARPGROUP_ROWS, column

    def end(self, values: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
        """Round the tile that `values` place."""
        row, column = self._first(values)
        row, column = let("row", row), let("column", column)
        for group in range(self.width // GROUP):
            self.further.advance()
            first = group * GROUP_REGISTERS
            operand = [self.kept[first + each] for each in range(GROUP_REGISTERS)]
            self.fragment.pack(operand, row, column, group * GROUP, self.further.pairs)
        hold(self.kept, kept_registers(self.width))


class _Part(ConsumerPart):
    def __init__(self, feature: KeptLeft, body: Body, warpgroup: Any) -> None:
        super().__init__(feature, body, warpgroup)
        self.kept = registers("kept", feature.held, "uint32")

    def left(self, number: int) -> LeftOperand | None:
        """The registers, if a phase multiplies what they hold."""
        phase = self.body.plan.phases[number]
        if not phase.program.reuses:
            return None
        return left_registers(self.kept, phase.kept, phase.program.contraction.depth)

    def ending(self, sums: TileSums) -> Ending | None:
        """The phase before rounds its sums."""
        return Keeper(sums, self.kept) if sums.phase.program.keeps else None


@dataclass(frozen=True)
class KeptLeft(Feature):
    """A phase multiplies what the one before has left in registers."""

    asked_by: ClassVar = "reuses"
    part: ClassVar = _Part
    #: Registers of a thread that hold it.
    held: int

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int]) -> KeptLeft:
        """All phases have the same registers."""
        return cls(max(phases[each].kept for each in numbers))
