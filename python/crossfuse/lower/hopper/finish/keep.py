"""Sums become the left operand of the next product, in the registers of the same thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.finish.ahead import Ahead
from crossfuse.lower.hopper.finish.fragment import Fragment
from crossfuse.lower.hopper.multiply.hold import hold
from crossfuse.lower.hopper.plan.kept import GROUP, GROUP_REGISTERS, kept_registers
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import let
from crossfuse.lower.hopper.warmup import Warmup
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS


class Keeper:
    """Rounds a warpgroup's sums and keeps them for its next product.

    ::

        sums of 16 columns in a thread        registers of the operand
        row g      c c+1        c+8 c+9        0           2
        row g + 8  c c+1        c+8 c+9        1           3

    Parameters
    ----------
    plan : PhasePlan
        The phase that makes the tile.
    where : Coordinates
        Of this thread.
    warpgroup : Any
        Index of the multiplying warpgroup.
    accumulators : Any
        Its sums.
    kept : Any
        Registers that hold the operand.
    warmup : Warmup
        In which nothing is read.
    """

    def __init__(
        self,
        plan: PhasePlan,
        where: Coordinates,
        warpgroup: Any,
        accumulators: Any,
        kept: Any,
        warmup: Warmup,
    ) -> None:
        self.plan = plan
        self.warpgroup = warpgroup
        self.kept = kept
        self.fragment = Fragment(plan, where, accumulators)
        self.width = plan.program.store.tile.shape[1]
        groups = tuple((first, GROUP) for first in range(0, self.width, GROUP))
        self.further = Ahead(self.fragment, groups, warmup)

    def ahead(self, values: Mapping[Any, Any]) -> None:
        """Read what the tile at the place that `values` tell needs besides its sums."""
        self.further.start(*self._first(values))

    def _first(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of this warpgroup's first element."""
        origin = self.plan.program.store.tile.origin
        row, column = (at(each, dict(values)) for each in origin)
        return row + self.warpgroup * WARPGROUP_ROWS, column

    def keep(self, values: Mapping[Any, Any]) -> None:
        """Make the tile at the place that `values` tell."""
        row, column = self._first(values)
        row, column = let("row", row), let("column", column)
        for group in range(self.width // GROUP):
            self.further.advance()
            first = group * GROUP_REGISTERS
            operand = [self.kept[first + each] for each in range(GROUP_REGISTERS)]
            self.fragment.pack(operand, row, column, group * GROUP, self.further.pairs)
        hold(self.kept, kept_registers(self.width))
