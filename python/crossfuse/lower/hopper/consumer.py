"""The multiplying role: products of the tiles in the rings, then the epilogue of their sums."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.epilogue.store import BoxPlace, Epilogue, PlaceInStages
from crossfuse.lower.hopper.features.feature import ConsumerPart, Ending, TileSums, first_of
from crossfuse.lower.hopper.pipeline import Cursor, Release
from crossfuse.lower.hopper.plan.memory import count
from crossfuse.lower.hopper.statements import Warmup, registers, run, warmed_up, when
from crossfuse.lower.hopper.tma import sharing_rank
from crossfuse.lower.hopper.wgmma import Multiplier, ring_tiles


def emit_multiplying(body: Body) -> None:
    """Emit the role of a warpgroup that multiplies."""
    plan, where = body.plan, body.where
    warpgroup = where.warpgroup - 1
    accumulators = registers("accumulators", plan.accumulators, "float32")
    parts = [each.part(each, body, warpgroup) for each in plan.features]
    rings = [_Side(body, "left"), _Side(body, "right")]
    for part in parts:
        part.begin()
    # With several tiles a CTA the first one warms up for the others.
    once = all(plan.clusters >= each.program.tiles for each in plan.phases)
    with warmed_up(once) as warmup:
        for part in parts:
            part.warm(warmup)
        if plan.is_awaited_by_all:
            with warmup.skipped():
                run(ir.script.ptx.griddepcontrol.wait())
        for number, phase in enumerate(plan.phases):
            share = phase.warpgroups.share
            left = first_of(part.left(number) for part in parts) or ring_tiles(
                plan.left, body.region("left"), warpgroup, share
            )
            multiplier = Multiplier(phase, left, plan.right, body.region("right"), accumulators)
            boxes = _boxes(body, number, warpgroup, rings[0])
            sums = TileSums(body, number, warpgroup, accumulators, boxes, warmup)
            end = first_of(part.ending(sums) for part in parts) or Epilogue(sums)
            _emit_tiles(Steps(body, number, multiplier, rings, parts), end, warmup)
        for part in parts:
            part.finish(warmup)
    if plan.cluster_size > 1 and not plan.leaves_early:
        mbarrier.leave_cluster()


def _emit_tiles(steps: Steps, end: Ending, warmup: Warmup) -> None:
    """Multiply and finish all tiles of a phase."""
    body, plan, phase, number = steps.body, steps.body.plan, steps.phase, steps.number
    with body.each_tile(phase) as places:
        # Beside what is held, a block's sums beside another's, or the sums of two phases beside
        # those of a third, there is no room for registers that nothing defines: to ptxas they are
        # in use since the start.
        crowded = plan.held or plan.blocks > 1 or len(plan.phases) > 2
        steps.multiplier.clear() if crowded else steps.multiplier.forget()
        end.ahead(places)
        with warmup.skipped():
            for part in steps.parts:
                part.tile(number, places)
            steps.multiply()
        body.timeline.stamp("multiplied", number)
        leaves = plan.leaves_early and phase is plan.phases[-1]
        end.end(places, mbarrier.leave_cluster if leaves else None)
        body.timeline.stamp("stored", number)
    end.finish()


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
        """How stages are released in a phase: to the CTAs that fill them."""
        program, fillers = self.body.plan.phases[number].program, self.plan.fillers[number]
        where, found = self.body.where, count(fillers)
        rank = sharing_rank(program, fillers, where, where.thread % found)
        return Release(self.ring, where.thread, (found, rank), self.plan.sharers // found)


class Steps:
    """Steps of a tile; a stage is released once the next one's products are in flight.

    The last left stages are not, if boxes will take their place.
    """

    def __init__(
        self,
        body: Body,
        number: int,
        multiplier: Multiplier,
        rings: list[_Side],
        parts: list[ConsumerPart],
    ) -> None:
        self.parts = parts
        self.body, self.number, self.phase = body, number, body.plan.phases[number]
        self.multiplier, (self.left, self.right) = multiplier, rings
        self.rings = rings if self.phase.left is not None else [self.right]
        self.kept_from = self.phase.program.contraction.steps - self.phase.store.pages

    def multiply(self) -> None:
        """Multiply all steps of a tile."""
        self.releases = [ring.release(self.number) for ring in self.rings]
        first = sum(part.first(self) for part in self.parts)
        self.emit(first, self.phase.program.contraction.steps)
        self.multiplier.wait(pending=0)
        self.hand_back()

    def hand_back(self, number: Any = None) -> None:
        """Release the stages before those of step `number`, or the last ones."""
        for ring, release in zip(self.rings, self.releases, strict=True):
            keeps = self.phase.store.pages and ring is self.left
            if keeps and number is None:
                continue  # boxes come into the last ones
            with when(number <= self.kept_from) if keeps else nullcontext():
                release(ring.cursor.before(1))

    def emit(self, first: int, last: Any) -> None:
        """Emit the steps from `first` up to, not including, `last`."""
        body, phase, multiplier = self.body, self.phase, self.multiplier
        # Registers have no addresses: each step names its own.
        unrolled = phase.program.reuses
        with body.each_step(phase, first, last, unrolled=unrolled) as (values, number):
            for ring in self.rings:
                ring.cursor.wait_full()
            body.timeline.stamp("first tiles", self.number, number == 0)
            step = values[phase.program.contraction.step]
            for part in self.parts:
                part.step(self, number, step)
            place = self.left.cursor.stage if phase.left is not None else step
            multiplier.start(place, self.right.cursor.stage, number == 0)
            multiplier.wait(pending=1)
            with when(number > 0):
                self.hand_back(number)
            for ring in self.rings:
                ring.cursor.advance()


def _boxes(body: Body, phase_number: int, warpgroup: Any, left: _Side) -> BoxPlace | None:
    """Where a phase's boxes lie in shared memory, or None."""
    phase = body.plan.phases[phase_number]
    if not phase.store.boxes:
        return None
    if not phase.store.pages:
        return BoxPlace(phase.store, body.region("boxes"), body.plan.box_pitch, warpgroup)
    return PlaceInStages(
        phase.store,
        body.region("left"),
        body.plan.left.pitch,
        warpgroup,
        left.cursor,
        partial(left.release, phase_number),
    )
