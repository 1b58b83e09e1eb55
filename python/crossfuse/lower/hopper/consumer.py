"""The multiplying role: products of the tiles in the rings, then the epilogue of their sums."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.dsm_gather import await_slices
from crossfuse.lower.hopper.epilogue.store import BoxPlace, OwnPlace, PlaceInStages
from crossfuse.lower.hopper.epilogue.sums import Sum
from crossfuse.lower.hopper.epilogue.tile_end import TileEnd
from crossfuse.lower.hopper.pipeline import Cursor, Release
from crossfuse.lower.hopper.plan.memory import count
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.rows.chunks import correct_sums
from crossfuse.lower.hopper.rows.emit import RowsWithHelp
from crossfuse.lower.hopper.rows.head import Head
from crossfuse.lower.hopper.statements import registers, run, when
from crossfuse.lower.hopper.tma import sharing_rank
from crossfuse.lower.hopper.warmup import Warmup, hidden, warmed_up
from crossfuse.lower.hopper.wgmma import (
    LeftOperand,
    LeftRegisters,
    Multiplier,
    gathered_tiles,
    ring_tiles,
)


def emit_multiplying(body: Body) -> None:
    """Emit the role of a warpgroup that multiplies."""
    plan, where = body.plan, body.where
    warpgroup = where.warpgroup - 1
    accumulators = registers("accumulators", plan.accumulators, "float32")
    kept = registers("kept", plan.kept, "uint32") if plan.kept else None
    rings = [_Side(body, "left"), _Side(body, "right")]
    _expect_slices(body, warpgroup)
    # With several tiles a CTA the first one warms up for the others.
    once = all(plan.clusters >= each.program.tiles for each in plan.phases)
    made, flags = plan.rows, plan.phases[0].awaits
    rows = None
    helps = body.help is not None and plan.head is None
    if helps and made is not None and flags is not None:
        rows = RowsWithHelp(body, made, flags)
    head = None if plan.head is None else Head(body, plan.phases[0], plan.head)
    with warmed_up(once) as warmup:
        if rows is not None:
            rows.make(warmup)
        elif plan.head is not None:
            _meet_started(body, warmup)
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
            end = TileEnd(body, number, warpgroup, accumulators, kept, boxes, warmup)
            _emit_tiles(body, number, multiplier, rings, end, head)
        if plan.summed is not None:
            threads = WARPGROUP * plan.consumers
            total = Sum(plan.summed, where, threads, warmup)
            total.store(body.summed, body.places_of_sum(plan.summed))
            body.timeline.stamp("summed")
    if plan.cluster_size > 1 and not plan.leaves_early:
        mbarrier.leave_cluster()


def _meet_started(body: Body, warmup: Warmup) -> None:
    """Wait for the cluster during the warm-up: nothing has been sent or received before."""
    if body.plan.cluster_size > 1:
        with when(hidden(warmup.turn) == 0):
            mbarrier.await_started()
    body.timeline.stamp("cluster met")


def _expect_slices(body: Body, warpgroup: Any) -> None:
    """Announce the bytes that the cluster will gather, before any can arrive."""
    for phase in body.plan.phases:
        if phase.program.takes is not None and body.gather is not None:
            rank = body.where.places[phase.program.takes.place.var]
            body.gather.expect(warpgroup, body.where.thread, rank)


def _emit_tiles(
    body: Body,
    number: int,
    multiplier: Multiplier,
    rings: list[_Side],
    end: TileEnd,
    head: Head | None,
) -> None:
    """Multiply and finish all tiles of a phase."""
    plan, phase = body.plan, body.plan.phases[number]
    with body.each_tile(phase) as places:
        # Beside what is kept, or a block's sums beside another's, there is no room for
        # registers that nothing defines: to ptxas they are in use since the start.
        crowded = plan.kept or plan.blocks > 1
        multiplier.clear() if crowded else multiplier.forget()
        end.ahead(places)
        with end.warmup.skipped():
            if end.pairing is not None:
                end.pairing.expect()
            gather = phase.program.takes
            if gather is not None and not gather.ring and body.gather is not None:
                await_slices(body.gather, body.where.warpgroup - 1, 0)
            if head is not None:
                head.prepare(places)
            _multiply(body, number, multiplier, rings, head)
        body.timeline.stamp("multiplied", number)
        leaves = plan.leaves_early and phase is plan.phases[-1]
        end.tile(places, mbarrier.leave_cluster if leaves else None)
        body.timeline.stamp("stored", number)
    end.finish()


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
        """How stages are released in a phase: to the CTAs that fill them."""
        program, fillers = self.body.plan.phases[number].program, self.plan.fillers[number]
        where, found = self.body.where, count(fillers)
        rank = sharing_rank(program, fillers, where, where.thread % found)
        return Release(self.ring, where.thread, (found, rank), self.plan.sharers // found)


def _multiply(
    body: Body, number: int, multiplier: Multiplier, rings: list[_Side], head: Head | None
) -> None:
    """Multiply all steps of a tile; with a head, those of raw rows first."""
    steps = _Steps(body, number, multiplier, rings)
    first, last = 0, body.plan.phases[number].program.contraction.steps
    if head is not None:
        first = head.steps
        # Code that runs once is fetched from L2. Of a number of steps that it knew, the compiler
        # would make as many copies.
        steps.emit(0, hidden(ir.script.int32(first)))
        multiplier.wait(pending=0)
        rings[0].cursor.wait_full()  # the next rows have been made
        head.scale(multiplier)
    steps.emit(first, last)
    multiplier.wait(pending=0)
    steps.hand_back()


class _Steps:
    """Steps of a tile; a stage is released once the next one's products are in flight.

    The last left stages are not, if boxes will take their place.
    """

    def __init__(self, body: Body, number: int, multiplier: Multiplier, rings: list[_Side]) -> None:
        self.body, self.number, self.phase = body, number, body.plan.phases[number]
        self.multiplier, (self.left, self.right) = multiplier, rings
        self.rings = rings if self.phase.left is not None else [self.right]
        self.releases = [ring.release(number) for ring in self.rings]
        self.kept_from = self.phase.program.contraction.steps - self.phase.store.pages

    def hand_back(self, number: Any = None) -> None:
        """Release the stages before those of step `number`, or the last ones."""
        for ring, release in zip(self.rings, self.releases, strict=True):
            keeps = self.phase.store.pages and ring is self.left
            if keeps and number is None:
                continue  # boxes come into the last ones
            with when(number <= self.kept_from) if keeps else nullcontext():
                release(ring.cursor.previous)

    def emit(self, first: int, last: Any) -> None:
        """Emit the steps from `first` up to, not including, `last`."""
        body, phase, multiplier = self.body, self.phase, self.multiplier
        # Registers have no addresses: each step names its own.
        unrolled = phase.program.reuses
        with body.each_step(phase, first, last, unrolled=unrolled) as (values, number):
            for ring in self.rings:
                ring.cursor.wait_full()
            if body.plan.timed:
                with when(number == 0):
                    body.timeline.stamp("first tiles", self.number)
            step = values[phase.program.contraction.step]
            _await_slice(body, phase, number, step)
            place = self.left.cursor.stage if phase.left is not None else step
            correct_sums(body, phase, multiplier, place, number)
            multiplier.start(place, self.right.cursor.stage, number == 0)
            multiplier.wait(pending=1)
            with when(number > 0):
                self.hand_back(number)
            for ring in self.rings:
                ring.cursor.advance()


def _await_slice(body: Body, phase: PhasePlan, number: Any, step: Any) -> None:
    """Wait for the slice that a step begins with, in ring order; the first is the CTA's own."""
    gather = phase.program.takes
    if gather is None or not gather.ring or body.gather is None:
        return
    steps = phase.program.contraction.steps // gather.place.extent
    if gather.place.extent > 1:
        with when(ir.script.And(number > 0, number % steps == 0)):
            await_slices(body.gather, body.where.warpgroup - 1, step // steps)


def _boxes(body: Body, phase_number: int, warpgroup: Any, left: _Side) -> BoxPlace | None:
    """Where a phase's boxes lie in shared memory, or None."""
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
