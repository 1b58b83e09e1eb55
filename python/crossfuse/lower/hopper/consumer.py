"""The multiplying role: products of what is in the rings, then what becomes of their sums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.accumulate import Accumulation
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.box_place import BoxPlace, OwnPlace, PlaceInStages
from crossfuse.lower.hopper.epilogue import Epilogue
from crossfuse.lower.hopper.exchange import SplitReduction
from crossfuse.lower.hopper.fillers import count
from crossfuse.lower.hopper.flags import FlagWriter
from crossfuse.lower.hopper.gather import Giver, await_slices
from crossfuse.lower.hopper.keep import Keeper
from crossfuse.lower.hopper.left_tiles import (
    LeftOperand,
    LeftRegisters,
    gathered_tiles,
    ring_tiles,
)
from crossfuse.lower.hopper.load import sharing_rank
from crossfuse.lower.hopper.pairing import Pairing
from crossfuse.lower.hopper.phase import PhasePlan
from crossfuse.lower.hopper.plan import WARPGROUP
from crossfuse.lower.hopper.reduced.epilogue import RowEpilogue
from crossfuse.lower.hopper.ring import Cursor, Release
from crossfuse.lower.hopper.rows.chunk_correct import correct_sums
from crossfuse.lower.hopper.statements import registers, run, when
from crossfuse.lower.hopper.sums import Sum
from crossfuse.lower.hopper.warmup import Warmup, warmed_up
from crossfuse.lower.hopper.wgmma import Multiplier


def emit_multiplying(body: Body) -> None:
    """Write a warpgroup that multiplies."""
    plan, where = body.plan, body.where
    warpgroup = where.warpgroup - 1
    accumulators = registers("accumulators", plan.accumulators, "float32")
    kept = registers("kept", plan.kept, "uint32") if plan.kept else None
    rings = [_Side(body, "left"), _Side(body, "right")]
    for phase in plan.phases:
        if phase.program.takes is not None and body.gather is not None:
            rank = where.places[phase.program.takes.place.var]
            body.gather.expect(warpgroup, where.thread, rank)
    # With several tiles a CTA the first one warms up for the others.
    once = all(plan.clusters >= each.program.tiles for each in plan.phases)
    with warmed_up(once) as warmup:
        if plan.is_awaited_by_all:
            with warmup.skipped():
                run(ir.script.ptx.griddepcontrol.wait())
        for number, phase in enumerate(plan.phases):
            multiplier = Multiplier(
                phase,
                _left(body, phase, warpgroup, kept),
                plan.right,
                body.region("right"),
                accumulators,
            )
            boxes = _boxes(body, number, warpgroup, rings[0])
            store = _Store(body, number, warpgroup, accumulators, kept, boxes, warmup)
            with body.each_tile(phase) as places:
                # Beside what is kept, or a block's sums beside another's, there is no room for
                # registers that nothing defines: to ptxas they are in use since the start.
                crowded = plan.kept or plan.blocks > 1
                multiplier.clear() if crowded else multiplier.forget()
                store.ahead(places)
                with warmup.skipped():
                    if store.pairing is not None:
                        store.pairing.expect()
                    gather = phase.program.takes
                    if gather is not None and not gather.ring and body.gather is not None:
                        await_slices(body.gather, warpgroup, 0)
                    _multiply(body, number, multiplier, rings)
                body.timeline.stamp("multiplied", number)
                leaves = plan.leaves_early and phase is plan.phases[-1]
                store.tile(places, mbarrier.leave_cluster if leaves else None)
                body.timeline.stamp("stored", number)
            store.finish()
        if plan.summed is not None:
            threads = WARPGROUP * plan.consumers
            total = Sum(plan.summed, where, threads, warmup)
            total.store(body.summed, body.places_of_sum(plan.summed))
            body.timeline.stamp("summed")
    if plan.cluster_size > 1 and not plan.leaves_early:
        mbarrier.leave_cluster()


def _left(body: Body, phase: PhasePlan, warpgroup: Any, kept: Any) -> LeftOperand:
    """Where a phase's left tiles are: in their ring, gathered by the cluster, or in registers."""
    if phase.program.reuses:
        return LeftRegisters(kept, phase.kept, phase.program.contraction.depth)
    if phase.program.takes is not None:
        depth = phase.program.contraction.depth
        return gathered_tiles(phase.program.takes, depth, body.region("gathered"), warpgroup)
    rows = phase.warpgroups.share
    return ring_tiles(body.plan.left, body.region("left"), warpgroup, rows)


class _Side:
    """A ring as a multiplying warpgroup sees it."""

    def __init__(self, body: Body, name: str) -> None:
        self.body = body
        self.name = name
        self.ring, self.plan = (
            (body.left, body.plan.left) if name == "left" else (body.right, body.plan.right)
        )
        self.cursor = Cursor(self.ring)

    def release(self, number: int) -> Release:
        """How stages are handed back in a phase: to those who fill them."""
        program, fillers = self.body.plan.phases[number].program, self.plan.fillers[number]
        where, found = self.body.where, count(fillers)
        rank = sharing_rank(program, fillers, where, where.thread % found)
        return Release(self.ring, where.thread, (found, rank), self.plan.sharers // found)


def _multiply(body: Body, phase_number: int, multiplier: Multiplier, rings: list[_Side]) -> None:
    """All steps of a tile; a stage is handed back when the next one's products are under way.

    The last left stages are not, if boxes will take their place.
    """
    phase = body.plan.phases[phase_number]
    left, right = rings
    rings = rings if phase.left is not None else [right]
    releases = [ring.release(phase_number) for ring in rings]
    kept_from = phase.program.contraction.steps - phase.store.pages

    def hand_back(number: Any = None) -> None:
        for ring, release in zip(rings, releases, strict=True):
            keeps = phase.store.pages and ring is left
            if keeps and number is None:
                continue  # boxes come into the last ones
            with when(number <= kept_from) if keeps else nullcontext():
                release(ring.cursor.previous)

    # Registers have no addresses: each step names its own.
    with body.each_step(phase, unrolled=phase.program.reuses) as (values, number):
        for ring in rings:
            ring.cursor.wait_full()
        if body.plan.timed:
            with when(number == 0):
                body.timeline.stamp("first tiles", phase_number)
        step = values[phase.program.contraction.step]
        _await_slice(body, phase, number, step)
        place = left.cursor.stage if phase.left is not None else step
        correct_sums(body, phase, multiplier, place, number)
        multiplier.start(place, right.cursor.stage, number == 0)
        multiplier.wait(pending=1)
        with when(number > 0):
            hand_back(number)
        for ring in rings:
            ring.cursor.advance()
    multiplier.wait(pending=0)
    hand_back()


def _await_slice(body: Body, phase: PhasePlan, number: Any, step: Any) -> None:
    """Wait for the slice that a step begins with, in ring order; the first one is the CTA's own."""
    gather = phase.program.takes
    if gather is None or not gather.ring or body.gather is None:
        return
    steps = phase.program.contraction.steps // gather.place.extent
    if gather.place.extent > 1:
        with when(ir.script.And(number > 0, number % steps == 0)):
            await_slices(body.gather, body.where.warpgroup - 1, step // steps)


class _Store:
    """What becomes of the sums of a phase."""

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
        self.giver = self.keeper = None
        self.epilogue: Epilogue | RowEpilogue
        self.writer = None if phase.raises is None else FlagWriter(body.placed(phase.raises))
        self.pairing = self._pairing(body, number, warpgroup, warmup)
        self.reduction = self.pairing or self._reduction(body, number, warpgroup, warmup)
        self.accumulators = accumulators
        if self.reduction is not None:
            return
        self.where = body.where
        self.warmup = warmup
        self.boxes = boxes
        if phase.program.gives is not None and body.gather is not None:
            buffer, barriers = body.region("gathered"), body.gather
            given = (phase, body.where, warpgroup, accumulators, buffer, barriers, warmup)
            self.giver = Giver(*given)
            return
        if phase.program.keeps:
            self.keeper = Keeper(phase, body.where, warpgroup, accumulators, kept, warmup)
            return
        note = partial(body.timeline.stamp, phase=number)
        if phase.program.reduced is not None:
            self.epilogue = RowEpilogue(
                phase.program.reduced, body.where, warpgroup, accumulators, warmup
            )
            return
        leave_by = Accumulation if phase.program.store.adds else Epilogue
        self.epilogue = leave_by(
            phase,
            body.where,
            warpgroup,
            accumulators,
            boxes,
            body.maps,
            warmup,
            note,
        )

    def ahead(self, places: dict[Any, Any]) -> None:
        """Read what the tile needs besides its sums, before it is multiplied."""
        if self.giver is not None:
            self.giver.ahead(places)
        elif self.keeper is not None:
            self.keeper.ahead(places)
        elif self.reduction is None:
            self.epilogue.ahead(places)

    @staticmethod
    def _reduction(
        body: Body, number: int, warpgroup: Any, warmup: Warmup
    ) -> SplitReduction | None:
        phase = body.plan.phases[number]
        if phase.program.exchange is None or body.exchange is None:
            return None
        note = partial(body.timeline.stamp, phase=number)
        part = (phase, body.where, warpgroup, body.region("received"), body.exchange)
        return SplitReduction(*part, warmup, note)

    def _pairing(self, body: Body, number: int, warpgroup: Any, warmup: Warmup) -> Pairing | None:
        phase = body.plan.phases[number]
        if phase.program.exchange is None or not phase.program.exchange.pair:
            return None
        note = partial(body.timeline.stamp, phase=number)
        part = (phase, body.where, warpgroup, body.region("paired"), body.paired)
        return Pairing(*part, warmup, note, self.writer)

    def tile(self, places: dict[Any, Any], leave: Callable[[], None] | None) -> None:
        """Store a tile, from one CTA's sums or from those of the cluster.

        `leave`, if given, is called when peers will hear no more of this thread.
        """
        if self.reduction is not None:
            self.reduction.combine(self.accumulators, places, leave)
            return
        if self.giver is not None:
            self.giver.give(places)
            return
        if self.keeper is not None:
            self.keeper.keep(places)
            return
        if leave is not None:
            with self.warmup.skipped():
                leave()
        self.epilogue.store(places, self.writer)
        if self.boxes is not None and leave is None:
            self.boxes.close(self.where.thread, self.warmup)

    def finish(self) -> None:
        """Wait for what is still being stored."""
        if self.reduction is None and self.giver is None and self.keeper is None:
            self.epilogue.finish()


def _boxes(body: Body, phase_number: int, warpgroup: Any, left: _Side) -> BoxPlace | None:
    """Where the boxes of a phase are."""
    phase = body.plan.phases[phase_number]
    if not phase.store.boxes:
        return None
    if not phase.store.pages:
        return OwnPlace(phase.store, body.region("boxes"), body.plan.box_pitch, warpgroup)
    return PlaceInStages(
        phase.store,
        body.plan.left,
        body.region("left"),
        warpgroup,
        left.cursor,
        partial(left.release, phase_number),
    )
