"""The end of a tile: its sums are stored, added to others', or held for the next product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.dsm_gather import Giver
from crossfuse.lower.hopper.dsm_reduce import Pairing, SplitReduction
from crossfuse.lower.hopper.epilogue.prefetch import Ahead, Fragment
from crossfuse.lower.hopper.epilogue.store import Accumulation, BoxPlace, Epilogue
from crossfuse.lower.hopper.flags import FlagWriter
from crossfuse.lower.hopper.plan.operands import GROUP, GROUP_REGISTERS, kept_registers
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.reduced.epilogue import RowEpilogue
from crossfuse.lower.hopper.registers import hold
from crossfuse.lower.hopper.statements import let
from crossfuse.lower.hopper.warmup import Warmup
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS


class Keeper:
    """Rounds a warpgroup's sums to the left operand of its next product, in registers.

    ::

        sums of 16 columns in a thread        registers of the operand
        row g      c c+1        c+8 c+9        0           2
        row g + 8  c c+1        c+8 c+9        1           3

    Each thread holds just the elements that wgmma wants of it. `plan` is the phase that makes the
    tile, `kept` the registers that hold the operand.
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
        """Prefetch further operands of the tile that `values` place."""
        self.further.start(*self._first(values))

    def _first(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of this warpgroup's first element."""
        origin = self.plan.program.store.tile.origin
        row, column = (at(each, dict(values)) for each in origin)
        return row + self.warpgroup * WARPGROUP_ROWS, column

    def keep(self, values: Mapping[Any, Any]) -> None:
        """Round the tile that `values` place."""
        row, column = self._first(values)
        row, column = let("row", row), let("column", column)
        for group in range(self.width // GROUP):
            self.further.advance()
            first = group * GROUP_REGISTERS
            operand = [self.kept[first + each] for each in range(GROUP_REGISTERS)]
            self.fragment.pack(operand, row, column, group * GROUP, self.further.pairs)
        hold(self.kept, kept_registers(self.width))


class TileEnd:
    """Ends each tile of a phase, in one of four ways.

    The cluster adds its parts, a pair of CTAs or all; a slice is sent to the whole cluster; a
    thread holds the sums as an operand; or an epilogue stores them. `kept` are registers for the
    next product's left operand, None without one; `boxes` is where TMA's boxes are filled.
    """

    def __init__(
        self,
        body: Body,
        number: int,
        warpgroup: Any,
        accumulators: Any,
        kept: Any,
        boxes: BoxPlace | None,
        warmup: Warmup,
    ) -> None:
        phase = body.plan.phases[number]
        self.thread, self.warmup = body.where.thread, warmup
        self.accumulators, self.boxes = accumulators, boxes
        self.writer = None if phase.raises is None else FlagWriter(body.placed(phase.raises))
        self.pairing = self._pairing(body, number, warpgroup)
        self.reduction = self.pairing or self._reduction(body, number, warpgroup)
        self.giver: Giver | None = None
        self.keeper: Keeper | None = None
        self.epilogue: Epilogue | RowEpilogue | None = None
        part = (phase, body.where, warpgroup, accumulators)
        if self.reduction is not None:
            return
        if phase.program.gives is not None and body.gather is not None:
            self.giver = Giver(*part, body.region("gathered"), body.gather, warmup)
        elif phase.program.keeps:
            self.keeper = Keeper(*part, kept, warmup)
        else:
            self.epilogue = self._epilogue(body, number, warpgroup)

    def _pairing(self, body: Body, number: int, warpgroup: Any) -> Pairing | None:
        phase = body.plan.phases[number]
        if phase.program.exchange is None or not phase.program.exchange.pair:
            return None
        note = partial(body.timeline.stamp, phase=number)
        part = (phase, body.where, warpgroup, body.region("paired"), body.paired)
        return Pairing(*part, self.warmup, note, self.writer)

    def _reduction(self, body: Body, number: int, warpgroup: Any) -> SplitReduction | None:
        phase = body.plan.phases[number]
        if phase.program.exchange is None or body.exchange is None:
            return None
        note = partial(body.timeline.stamp, phase=number)
        part = (phase, body.where, warpgroup, body.region("received"), body.exchange)
        return SplitReduction(*part, self.warmup, note)

    def _epilogue(self, body: Body, number: int, warpgroup: Any) -> Epilogue | RowEpilogue:
        phase = body.plan.phases[number]
        part = (body.where, warpgroup, self.accumulators)
        if phase.program.reduced is not None:
            return RowEpilogue(phase.program.reduced, *part, self.warmup)
        note = partial(body.timeline.stamp, phase=number)
        leave_by = Accumulation if phase.program.store.adds else Epilogue
        return leave_by(phase, *part, self.boxes, body.maps, self.warmup, note)

    def ahead(self, places: dict[Any, Any]) -> None:
        """Prefetch further operands of a tile, before it is multiplied."""
        for way in (self.giver, self.keeper, self.epilogue):
            if way is not None:
                way.ahead(places)

    def tile(self, places: dict[Any, Any], leave: Callable[[], None] | None) -> None:
        """Finish a tile, from one CTA's sums or from those of the cluster.

        `leave`, if given, is called when this thread sends no more to its peers.
        """
        if self.reduction is not None:
            self.reduction.combine(self.accumulators, places, leave)
        elif self.giver is not None:
            self.giver.give(places)
        elif self.keeper is not None:
            self.keeper.keep(places)
        elif self.epilogue is not None:
            if leave is not None:
                with self.warmup.skipped():
                    leave()
            self.epilogue.store(places, self.writer)
            if self.boxes is not None and leave is None:
                self.boxes.close(self.thread, self.warmup)

    def finish(self) -> None:
        """Wait for stores that are still in flight."""
        if self.epilogue is not None:
            self.epilogue.finish()
