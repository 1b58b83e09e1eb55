"""What becomes of a tile's sums: stored, added to others', or kept for the next product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.exchange.gather import Giver
from crossfuse.lower.hopper.exchange.pairing import Pairing
from crossfuse.lower.hopper.exchange.reduction import SplitReduction
from crossfuse.lower.hopper.finish.accumulate import Accumulation
from crossfuse.lower.hopper.finish.box_place import BoxPlace
from crossfuse.lower.hopper.finish.epilogue import Epilogue
from crossfuse.lower.hopper.finish.keep import Keeper
from crossfuse.lower.hopper.reduced.epilogue import RowEpilogue
from crossfuse.lower.hopper.sync.flags import FlagWriter
from crossfuse.lower.hopper.warmup import Warmup


class TileEnd:
    """What becomes of the sums of a phase, in one of four ways.

    The cluster adds its parts, a pair of CTAs or all; a slice is given to the cluster; a thread
    keeps them as an operand; or an epilogue stores them.

    Parameters
    ----------
    body : Body
        Of the kernel.
    number : int
        The phase.
    warpgroup : Any
        Index of the multiplying warpgroup.
    accumulators : Any
        Its sums.
    kept : Any
        Registers for the next product's left operand; None without one.
    boxes : BoxPlace | None
        Where boxes are filled that TMA copies.
    warmup : Warmup
        In which nothing is stored.
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
        """Read what the tile needs besides its sums, before it is multiplied."""
        for way in (self.giver, self.keeper, self.epilogue):
            if way is not None:
                way.ahead(places)

    def tile(self, places: dict[Any, Any], leave: Callable[[], None] | None) -> None:
        """Store a tile, from one CTA's sums or from those of the cluster.

        `leave`, if given, is called when peers will hear no more of this thread.
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
        """Wait for what is still being stored."""
        if self.epilogue is not None:
            self.epilogue.finish()
