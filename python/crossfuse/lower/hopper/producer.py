"""The loading roles: one thread keeps the ring of right tiles full, another that of left tiles.

Right tiles are weights, which depend on nothing: their thread runs on into the next phase while
left tiles wait for the preceding kernel, or for flags of the preceding phase.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.features.feature import first_of
from crossfuse.lower.hopper.flags import FlagReader
from crossfuse.lower.hopper.pipeline import Cursor, Throttle
from crossfuse.lower.hopper.plan.operands import Operand
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.recover.contraction import first_of_reduction
from crossfuse.lower.hopper.statements import hidden, let, run, when
from crossfuse.lower.hopper.tma import load_tile


def emit_loading(body: Body) -> None:
    """Emit the role of the warpgroup that loads."""
    loader, features = Loader(body), body.plan.features
    if not any(each.load(loader) for each in features):
        with when(body.where.thread == 0):
            loader.load_rights()
        # Flags are looked at by a whole warp.
        with when(body.where.warp == 1 if body.plan.is_persistent else body.where.thread == 32):
            loader.load_lefts()
    for each in features:
        each.beside_loads(body)
    if body.plan.cluster_size > 1:
        mbarrier.leave_cluster()


class Loader:
    """Loads the tiles of all phases."""

    def __init__(self, body: Body) -> None:
        self.body, self.plan = body, body.plan
        #: How often the kernel ran before on these flags: nothing is cleared between launches.
        self.launch: Any = None

    def begin(self) -> None:
        """Look up the number of this launch, where CTAs wait for one another."""
        if self.plan.is_persistent:
            self.launch = let("launches_before", self.body.flags[self._own_count])
            # One lane counts this launch before the others are done.
            run(ir.script.cuda.warp_sync())

    def over(self) -> None:
        """Count this launch."""
        if self.plan.is_persistent:
            with when(self.body.where.lane == 0):
                count = self.launch + ir.script.uint32(1)
                ir.script.buffer_store(self.body.flags, count, [self._own_count])

    @property
    def _own_count(self) -> Any:
        """Where this CTA counts the launches that it has seen."""
        cta = self.body.where.cluster * self.plan.cluster_size + self.body.where.rank
        return self.plan.flag_count + cta

    def load_rights(self) -> None:
        """Load all right tiles."""
        body, cursor = self.body, Cursor(self.body.right)
        own = first_of(each.throttle(body) for each in self.plan.features)
        throttle = own or Throttle(body.right, self.plan.on_their_way)
        for number, phase in enumerate(self.plan.phases):
            body.timeline.stamp_here("weights asked for", number)
            steps = ir.script.int32(phase.program.contraction.steps)
            # A loop that is waited for is short, and not unrolled.
            last = hidden(steps) if throttle.begins_with_few else None
            with body.each_tile(phase) as places, body.each_step(phase, 0, last) as (step, _):
                throttle()
                self.load(phase, cursor, phase.rights, places | step)
                cursor.advance()

    def load_lefts(self) -> None:
        """Load all left tiles, each when it has been made."""
        body, plan = self.body, self.plan
        if plan.early:
            run(ir.script.ptx.griddepcontrol.wait())
        self.begin()
        cursor = Cursor(body.left)
        for number, phase in enumerate(plan.phases):
            if phase.left is None:
                continue
            waits = self.waits(phase)
            parts = [each.lefts(self, number) for each in plan.features]
            with body.each_tile(phase) as places:
                waits.start(places)
                first = sum(part.first(cursor, places) for part in parts)
                with body.each_step(phase, first) as (step, _):
                    waits.wait(places | step)
                    for part in parts:
                        part.ready()
                    with self._one_thread():
                        self.load(phase, cursor, phase.lefts, places | step)
                    cursor.advance()
        for each in plan.features:
            each.loaded(body, self.launch)
        self.over()

    def _one_thread(self) -> AbstractContextManager[Any]:
        """Context for what one thread of those that load left tiles does."""
        return when(self.body.where.lane == 0) if self.plan.is_persistent else nullcontext()

    def waits(self, phase: PhasePlan) -> Waits:
        """How the left tiles of a phase are waited for."""
        return Waits(self, phase)

    def load(
        self,
        phase: PhasePlan,
        cursor: Cursor,
        operands: tuple[Operand, ...],
        values: dict[Any, Any],
        more: Any = 0,
        also: Callable[[Any, Any], None] = lambda stage, full: None,
    ) -> None:
        """Load tiles into the next stage of a cursor's ring, once all have read what it holds.

        And `more` bytes of something else: `also` loads them, given the stage and its barrier.
        """
        body, features = self.body, self.plan.features
        name, plan = "right", self.plan.right
        if cursor.ring is body.left:
            name, plan, features = "left", self.plan.left, ()
        cursor.wait_empty()
        full = cursor.ring.full(cursor.stage)
        mbarrier.expect(full, sum(each.size for each in operands) + more)
        also(cursor.stage, full)

        def load(operands: tuple[Operand, ...]) -> None:
            """Load tiles back to back into the stage."""
            stage, region, start = cursor.stage * plan.pitch, body.region(name), 0
            for operand in operands:

                def address(offset: Any, first: Any = stage + start) -> Any:
                    return region(first + offset)

                map_ = body.maps[operand.map.name]
                load_tile(phase.program, operand, map_, body.where, values, address, full)
                start += operand.size

        if not any(each.load_rights(body, phase, load) for each in features):
            load(operands)


class Waits:
    """How left tiles that are made in the same kernel are waited for; others are there."""

    def __init__(self, loader: Loader, phase: PhasePlan) -> None:
        self.phase, body = phase, loader.body
        self.tile = phase.program.contraction.left
        self.reader = None
        if phase.awaits is not None:
            end = first_of(each.end_of_wait(body) for each in body.plan.features)
            self.reader = FlagReader(body.placed(phase.awaits), loader.launch, end)

    def start(self, places: dict[Any, Any]) -> None:
        """Begin waiting with the flags of a tile."""
        if self.reader is None:
            return
        row = at(self.tile.origin[0], places)
        if self.phase.tails[0]:
            # A tile below the tensor has no flags, and loads zeros: any will do.
            row = ir.script.min(row, self.tile.extents[0] - 1)
        self.reader.start(row, at(first_of_reduction(self.phase.program.contraction), places))

    def wait(self, values: dict[Any, Any]) -> None:
        """Wait for all up to the last column of the tile of a step."""
        if self.reader is not None:
            self.reader.wait(at(self.tile.origin[1] + (self.tile.shape[1] - 1), values))
