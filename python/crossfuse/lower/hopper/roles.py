"""The roles of a kernel: its memory and barriers, who loads tiles, and who multiplies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.epilogue.store import BoxPlace, Epilogue, PlaceInStages
from crossfuse.lower.hopper.features.feature import (
    ConsumerPart,
    Ending,
    TileSums,
    Timeline,
    first_of,
)
from crossfuse.lower.hopper.flags import FlagReader, Flags, PlacedFlags
from crossfuse.lower.hopper.pipeline import (
    Cursor,
    Release,
    Ring,
    SharedMemory,
    Throttle,
    load_tile,
    sharing_rank,
)
from crossfuse.lower.hopper.plan.kernel import KernelPlan, filler_count
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.plan.tiles import Operand
from crossfuse.lower.hopper.recover.contraction import first_of_reduction
from crossfuse.lower.hopper.statements import (
    Coordinates,
    Variable,
    Warmup,
    at,
    grid_places,
    hidden,
    let,
    registers,
    run,
    warmed_up,
    when,
)
from crossfuse.lower.hopper.wgmma import Multiplier, ring_tiles


@dataclass(frozen=True)
class Body:
    """The plan, coordinates, memory and barriers that a kernel's roles work with."""

    plan: KernelPlan
    where: Coordinates
    #: Tensor map parameters by name.
    maps: dict[str, Any]
    memory: SharedMemory
    left: Ring
    right: Ring
    #: Buffers in global memory that are no parameters of the function, by name.
    buffers: dict[str, Any]
    timeline: Timeline

    @property
    def flags(self) -> Any:
        """Buffer of flags in global memory, in a kernel whose CTAs wait for one another."""
        return self.buffers[self.plan.state[0].name]

    def placed(self, flags: Flags) -> PlacedFlags:
        """Flags of a phase together with where they lie in memory."""
        return PlacedFlags(flags, self.flags, self.plan.first_flag(flags))

    @contextmanager
    def each_tile(self, phase: PhasePlan) -> Iterator[dict[Any, Any]]:
        """Loop over the tiles of this cluster; yields the values of all places."""
        clusters, tiles = self.plan.clusters, phase.program.tiles
        cluster, places = self.where.cluster, self.where.places
        if phase.first:
            cluster = let("own", (cluster + (clusters - phase.first)) % clusters)
        if clusters == tiles:
            yield places | grid_places(phase.program, cluster)
        elif clusters > tiles:
            with when(cluster < tiles):
                yield places | grid_places(phase.program, cluster)
        else:
            tile = Variable("tile", "int32", cluster)
            with ir.script.While(tile.value < tiles):
                yield places | grid_places(phase.program, tile.value)
                tile.set(tile.value + clusters)

    @contextmanager
    def each_step(
        self, phase: PhasePlan, first: int = 0, last: Any = None, *, unrolled: bool = False
    ) -> Iterator[tuple[dict[Any, Any], Any]]:
        """Loop over the steps of the reduction; yields the step variable's value, also by itself.

        From step `first` up to, not including, `last` if they are given.
        """
        contraction = phase.program.contraction
        loop = ir.script.unroll if unrolled else ir.script.serial
        with loop(first, contraction.steps if last is None else last) as number:
            ir.IRBuilder.name("step", number)
            yield {contraction.step: number}, number


# The loading roles: one thread keeps the ring of right tiles full, another that of left tiles.
#
# Right tiles are weights, which depend on nothing: their thread runs on into the next phase while
# left tiles wait for the preceding kernel, or for flags of the preceding phase.


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
                    # Flags are waited for by a whole warp, whose first thread loads.
                    with when(body.where.lane == 0) if plan.is_persistent else nullcontext():
                        self.load(phase, cursor, phase.lefts, places | step)
                    cursor.advance()
        for each in plan.features:
            each.loaded(body, self.launch)
        self.over()

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
        body = self.body
        name, plan = "right", self.plan.right
        if cursor.ring is body.left:
            name, plan = "left", self.plan.left
        cursor.wait_empty()
        full = cursor.ring.full(cursor.stage)
        mbarrier.expect(full, sum(each.size for each in operands) + more)
        also(cursor.stage, full)
        # Tiles lie back to back in the stage.
        stage, region, start = cursor.stage * plan.pitch, body.memory.region(name), 0
        for operand in operands:

            def address(offset: Any, first: Any = stage + start) -> Any:
                return region(first + offset)

            map_ = body.maps[operand.map.name]
            load_tile(phase.program, operand, map_, body.where, values, address, full)
            start += operand.size


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


# The multiplying role: products of the tiles in the rings, then the epilogue of their sums.


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
            left = first_of(part.left(number) for part in parts) or ring_tiles(
                plan.left, body.memory.region("left"), warpgroup, phase.share
            )
            multiplier = Multiplier(
                phase, left, plan.right, body.memory.region("right"), accumulators
            )
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
        where, found = self.body.where, filler_count(fillers)
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
        with body.each_step(phase, first, last, unrolled=unrolled) as (_, number):
            for ring in self.rings:
                ring.cursor.wait_full()
            body.timeline.stamp("first tiles", self.number, number == 0)
            for part in self.parts:
                part.step(self, number)
            place = self.left.cursor.stage if phase.left is not None else number
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
        return BoxPlace(phase.store, body.memory.region("boxes"), body.plan.box_pitch, warpgroup)
    return PlaceInStages(
        phase.store,
        body.memory.region("left"),
        body.plan.left.pitch,
        warpgroup,
        left.cursor,
        partial(left.release, phase_number),
    )
