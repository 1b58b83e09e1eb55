"""Who makes the rows of a left operand, and products whose first steps multiply raw rows.

Of these (see `plan`) a warpgroup multiplies its rows of each raw tile by what is known of their
elements, where the tile lies, and waits for no one else. A thread has one group of 16 bytes of
every 16th row, so that it needs the same columns of all its rows::

    thread    0     1    ...   7        8     9    ...
    row       0     0          0        1     1           then 16, 17, ... 32, ... 48, ...
    group     0     1          7        0     1           of 8 columns, swizzled by 128 bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, WARPGROUP, WARPGROUP_ROWS, Device
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.features.feature import (
    ROWS_BEGUN,
    ROWS_MADE,
    ConsumerPart,
    Feature,
    LeftsPart,
)
from crossfuse.lower.hopper.flags import PlacedFlags
from crossfuse.lower.hopper.pipeline import Cursor, Throttle
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.rows.chunks import RowsByChunks
from crossfuse.lower.hopper.rows.emit import (
    RowLoop,
    RowsByWarpgroups,
    RowsByWarps,
    RowsWithHelp,
    Tells,
    WholeRows,
    after_kernel_before,
    fetch,
    first_row,
    passed_on,
    staged,
)
from crossfuse.lower.hopper.rows.plan import (
    BESIDE_HEAD,
    MULTIPLYING,
    ON_THEIR_WAY,
    HeadPlan,
    plan_head,
)
from crossfuse.lower.hopper.rows.statements import fresh, independent_of
from crossfuse.lower.hopper.statements import (
    Coordinates,
    Variable,
    Warmup,
    at,
    branches,
    grid_places,
    hidden,
    let,
    registers,
    run,
    set_registers,
    when,
)
from crossfuse.lower.hopper.wgmma import Multiplier
from crossfuse.lower.image import BufferSpec, TensorMap
from crossfuse.planner.kernels.memory import BEFORE_ROWS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.kernel import KernelPlan
    from crossfuse.lower.hopper.roles import Body, Loader, Steps

#: Elements of 16 bytes (a vector access of a 16-bit type), and groups of so many in a stage's row.
_GROUP, _GROUPS = 8, ROW_BYTES // 16
#: Rows that a warpgroup takes in one access of all its threads.
_ROWS = WARPGROUP // _GROUPS


class Head(ConsumerPart):
    """The head of a product, in a warpgroup that multiplies."""

    def __init__(self, feature: RowsBesideHead, body: Body, warpgroup: Any) -> None:
        super().__init__(feature, body, warpgroup)
        self.phase, self.head = body.plan.phases[0], feature.head
        self.rows = feature.program(body.plan)
        assert self.rows.scaled is not None
        self.scaled, self.dtype = self.rows.scaled, self.phase.program.contraction.left.dtype

    def begin(self) -> None:
        """Wait for the kernel before."""
        (self.thread,) = after_kernel_before(self.body.plan, lane_then=self.body.where.thread)

    def warm(self, warmup: Warmup) -> None:
        """Wait for the cluster during the warm-up: nothing has been sent or received before."""
        if self.body.plan.cluster_size > 1:
            with when(hidden(warmup.turn) == 0):
                mbarrier.await_started()
        self.body.timeline.stamp("cluster met")

    def first(self, steps: Steps) -> int:
        """Multiply the steps of raw rows, and scale their sums."""
        # Code that runs once is fetched from L2. Of a number of steps that it knew, the compiler
        # would make as many copies.
        steps.emit(0, hidden(ir.script.int32(self.head.steps)))
        steps.multiplier.wait(pending=0)
        steps.left.cursor.wait_full()  # the next rows have been made
        self.scale(steps.multiplier)
        return self.head.steps

    def tile(self, number: int, places: dict[Any, Any]) -> None:
        """Multiply all raw tiles by what is known of their elements.

        `places` has values of all variables of the tile's origin, but for the step.
        """
        where, thread = self.body.where, self.thread
        group = thread % _GROUPS * _GROUP
        known = [self._vectors(places, step, group) for step in range(self.head.steps)]
        tiles = self.body.memory.elements("left", self.dtype)
        row = let("raw_row", thread // _GROUPS)
        first = (where.warpgroup - 1) * WARPGROUP_ROWS + row
        # Rows that a thread has are multiples of 8 apart: the swizzle is the same for all of them.
        place = let(
            "raw_place",
            first * (_GROUPS * _GROUP) + ir.tirx.bitwise_xor(thread % _GROUPS, row % 8) * _GROUP,
        )
        for step in range(self.head.steps):
            mbarrier.wait(self.body.left.full(step), 0)
            stage = step * self.body.plan.left.pitch * _GROUP // 16
            below = range(0, WARPGROUP_ROWS, _ROWS)
            mine = [place + (stage + each * _GROUPS * _GROUP) for each in below]
            # All loads before any store: the compiler would keep them behind it.
            raw = [self._raw(tiles, each) for each in mine]
            for each, elements in zip(mine, raw, strict=True):
                self._finish(tiles, each, elements, known[step])
        run(ir.script.ptx.fence.proxy.async_.shared__cta())  # wgmma reads them, TMA overwrites them
        mbarrier.meet_warpgroup(where.warpgroup - 1)

    def _vectors(self, places: dict[Any, Any], step: int, group: Any) -> dict[Any, Any]:
        """Load eight elements of each vector to registers."""
        contraction = self.phase.program.contraction
        column = (
            at(contraction.left.origin[1], places | {contraction.step: ir.script.int32(step)})
            + group
        )
        found: dict[Any, Any] = {}
        for each in self.scaled.vectors:
            kept = registers(f"{each.name}_of_{step}", _GROUP, str(each.ty.dtype))
            _copied(kept, 0, each, column)
            found[each] = kept
        return found

    def _raw(self, tiles: Any, place: Any) -> Any:
        """Load eight elements of a raw tile to registers."""
        raw = registers("raw", _GROUP, self.dtype)
        _copied(raw, 0, tiles, place)
        return raw

    def _finish(self, tiles: Any, place: Any, raw: Any, known: dict[Any, Any]) -> None:
        """Multiply eight elements by what is known of them, and store them where they were."""
        made = registers("known", _GROUP, self.dtype)
        with ir.script.unroll(0, _GROUP) as lane:
            value = ir.script.Cast(self.dtype, self._element(raw, known, lane))
            ir.script.buffer_store(made, value, [lane])
        _copied(tiles, place, made, 0)

    def _element(self, raw: Any, known: dict[Any, Any], lane: Any) -> Any:
        def load(node: Any, _: Any) -> Any:
            return (
                raw[lane] if node.source.same_as(self.scaled.source) else known[node.source][lane]
            )

        return ir.mutate(self.scaled.element, (ir.TensorLoad, load))

    def scale(self, multiplier: Multiplier) -> None:
        """Multiply the sums of raw rows by the factors of these rows, which have been made by now.

        No wgmma that adds to the sums may be under way.
        """
        where, left = self.body.where, self.phase.program.contraction.left
        inside = (where.warpgroup - 1) * WARPGROUP_ROWS + where.warp * 16 + where.lane // 4
        places = where.places | grid_places(self.phase.program, where.cluster)
        row = let("row_of_factor", at(left.origin[0], places) + inside)
        factors = [Variable("factor", "float32", 1.0) for _ in range(2)]
        for half, factor in enumerate(factors):
            below = row + 8 * half
            # Rows that there are not are counted at the flags of their own tiles, and have none.
            with when(below < self.rows.rows) if self.phase.tails[0] else nullcontext():
                factor.set(self.body.buffers[self.head.factors.name][below])
        multiplier.scale(*(each.value for each in factors))


def _copied(to: Any, first: Any, source: Any, place: Any) -> None:
    """Copy 16 bytes."""
    with ir.script.vectorized(0, _GROUP) as lane:
        ir.script.buffer_store(to, source[place + lane], [first + lane])


# Rows that a warpgroup of its own makes, while others multiply raw ones.
#
# First those of its CTA, then, if the rows of its tile are late, all of these: see `helping`. A
# thread of each row stores its factor, by which sums of raw rows are multiplied.


class HeadRows:
    """The warpgroup that makes rows while others multiply raw ones."""

    def __init__(self, body: Body, feature: RowsBesideHead) -> None:
        self.body, self.head, self.rows = body, feature.head, feature.program(body.plan)
        self.flags, self.help = feature.flags(body.plan), feature.help(body)

    def emit(self) -> None:
        """Write all that the warpgroup does."""
        body, where = self.body, self.body.where
        ctas = body.plan.clusters * body.plan.cluster_size
        own = first_row(body.plan, where, self.rows, 0)
        first, self._thread = after_kernel_before(body.plan, row_then=own, lane_then=where.thread)
        body.timeline.stamp(ROWS_BEGUN)
        loop = RowLoop(body, self.flags, first, ctas, self.head.at_once)
        late = Variable("rows_are_late", "int32", 0)
        with ir.script.serial(0, hidden(ir.script.int32(2))) as turn:
            ir.IRBuilder.name("turn", turn)
            helps = hidden(turn)
            with when(helps > 0):
                late.set(self.help.await_or_call(self.help.made))
                loop.turn_to_late(late, 0, 1)
            with loop.each() as row:
                self._make(row, loop.step)
                counted = let("row_counted", row + where.thread * loop.step)
                with when(ir.script.And(where.thread < self.head.at_once, helps == 0)):
                    self._count(loop.writer, counted)
            with when(helps == 0):
                if body.plan.cluster_size > 1:
                    mbarrier.await_started()  # who loads has set barriers up
                # Not who raises flags: their releases take a while.
                with when(where.thread == WARPGROUP - 1):
                    mbarrier.arrive(body.memory.barrier("own_rows_barrier"))
                body.timeline.stamp(ROWS_MADE)
        with when(ir.script.And(where.thread == 0, late.value > 0)):
            self.help.say_done()
        if body.plan.cluster_size > 1:
            mbarrier.leave_cluster()

    def _count(self, writer: PlacedFlags, row: Any) -> None:
        """Count a row at its flag, also one that the last tile does not have."""
        with when(row < self.flags.down * self.flags.rows):
            writer.raise_flag(ir.script.min(row, self.rows.rows - 1), 0)

    def _make(self, first: Any, pitch: Any) -> None:
        """Make rows side by side; in place of missing ones, the last one again."""
        number = self.body.where.warpgroup - 1
        with when(first < self.rows.rows):
            for statement in self._side_by_side(first, pitch, number):
                ir.script.add_to_parent(statement)
        # All threads have stored their elements, and read one another's states.
        mbarrier.meet_warpgroup(number)

    def _side_by_side(self, first: Any, pitch: Any, number: Any) -> list[Any]:
        """Statements of several rows, one of each at a time; what all of them load, once.

        What is loaded once comes first, though it is needed last: ptxas keeps the order of loads,
        see `loads_first`, but would put the last of them behind the merge of states.
        """
        rows, thread = self.rows, let("own_thread", self._thread)
        statements = [*ir.sequence(rows.statement), self._kept()]
        same = independent_of(rows.row, statements)
        made = []
        for each in range(self.head.at_once):
            row = let("own_row", ir.script.min(first + each * pitch, rows.rows - 1))
            place = staged(self.body, rows, each)
            copies = statements if each == 0 else fresh(statements, same)
            values = {rows.row: row, rows.lane: thread}
            made.append([passed_on(ir.substitute(copy, values), place, number) for copy in copies])
        shared: list[Any] = []
        others: list[Any] = []
        for statement, together in zip(statements, zip(*made, strict=True), strict=True):
            once = _is_of(statement, same)
            (shared if once else others).extend(together[:1] if once else together)
        return [*shared, *others]

    def _kept(self) -> Any:
        """The statement that stores a row's factor."""
        rows = self.rows
        assert rows.scaled is not None
        store = ir.BufferStore(
            self.body.buffers[self.head.factors.name], rows.scaled.factor, [rows.row]
        )
        return ir.IfThenElse(rows.lane == 0, store, None)


def _is_of(statement: Any, same: dict[Any, Any]) -> bool:
    """Whether a statement fills or allocates registers that all rows share."""
    if isinstance(statement, ir.AllocBuffer):
        return statement.buffer in same
    return ir.among(statement, same.values())


class _Raw(Tells):
    def __init__(self, loader: Loader, head: HeadPlan) -> None:
        super().__init__(loader.body)
        self.loader, self.head = loader, head

    def first(self, cursor: Cursor, places: dict[Any, Any]) -> int:
        """Load the raw tiles of a head.

        They wait for no other CTA, but for the rows of this one: the warpgroup that makes these
        needs the same elements first, which are in L2 then.
        """
        body, head, (phase,) = self.body, self.head, self.body.plan.phases
        assert phase.left is not None
        mbarrier.wait(body.memory.barrier("own_rows_barrier"), 0)
        # Code that runs once is fetched from L2: of a number that it knew, the compiler would make
        # as many copies.
        raw = replace(phase.left, map=head.raw)
        with body.each_step(phase, 0, hidden(ir.script.int32(head.steps))) as (step, _):
            with when(body.where.lane == 0):
                self.loader.load(phase, cursor, (raw,), places | step)
            cursor.advance()
        return head.steps


@dataclass(frozen=True)
class RowsBesideHead(RowsWithHelp):
    """A product begins with raw rows, while a warpgroup of its own makes the others."""

    head: HeadPlan = field(kw_only=True)
    #: Raw tiles, and the factors of all rows.
    tensor_maps: tuple[TensorMap, ...] = ()
    workspaces: tuple[BufferSpec, ...] = ()

    part = Head
    registers = BESIDE_HEAD[:2]
    warpgroups = 1
    barriers = ("rows_barrier", "own_rows_barrier")

    def makers(self, body: Body) -> range:
        """The last warpgroup alone."""
        return range(body.plan.consumers + 1, body.plan.consumers + 2)

    def noting(self, where: Coordinates) -> Any:
        """The first thread of that warpgroup."""
        return ir.script.And(where.warpgroup == MULTIPLYING + 1, where.thread == 0)

    def prefetch(self, body: Body) -> None:
        """Prefetch all rows that this CTA makes, and once what they share."""
        plan, where, rows = body.plan, body.where, self.program(body.plan)
        with when(where.warpgroup > plan.consumers):
            for number in range(self.head.at_once):
                row = let("row_ahead", first_row(plan, where, rows, number))
                with when(row < rows.rows):
                    for each in rows.read if number == 0 else rows.matrices:
                        fetch(each, row, where.thread, rows.threads)

    @contextmanager
    def apart(self, body: Body) -> Iterator[None]:
        """One warpgroup makes rows, the others multiply."""
        with branches(body.where.warpgroup > body.plan.consumers) as (making, multiplying):
            with making:
                set_registers("dec", BESIDE_HEAD[2])
                if body.plan.cluster_size > 1:
                    mbarrier.say_started()
                HeadRows(body, self).emit()
            with multiplying:
                yield

    def throttle(self, body: Body) -> Throttle:
        """Few right tiles are in flight at first: rows, flags and raw tiles wait behind them."""
        begin = ON_THEIR_WAY, 2 * self.head.steps
        return Throttle(body.right, body.plan.on_their_way, begin=begin)

    def lefts(self, loader: Loader, number: int) -> LeftsPart:
        """Raw tiles are loaded first."""
        return _Raw(loader, self.head)


# Rows of the left operand that its own kernel makes, and which of its threads make them.


@dataclass(frozen=True)
class Rows(WholeRows):
    """Whole rows, of which it is not settled yet who makes them."""

    asked_by: ClassVar = "rows"

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int], device: Device) -> Feature:
        """Of the first phase: chunk by chunk, or as whole rows."""
        phase = phases[0]
        rows = phase.program.rows
        assert rows is not None
        if phase.chunks is not None:
            maps = phase.chunks.source, phase.chunks.factors
            return RowsByChunks(phase.chunks, maps, rows.is_placed, rows.fast)
        states = 4 * rows.state_places * phase.consumers
        return cls(rows.by_warpgroups, states, rows.is_placed, rows.fast)

    def settled(self, plan: KernelPlan, device: Device) -> KernelPlan:
        """Have rows made by warps beside the loads, or by warpgroups that multiply them then.

        A CTA of one tile need not wait for others: its warpgroups make the rows of the tile
        themselves if they have waited long, see `helping`. For a second tile they would not be free
        while they wait.
        """
        # Rows that are made meanwhile, their stores and their flags would wait behind all others.
        first = min(plan.on_their_way, max(1, BEFORE_ROWS // plan.asked_for))
        known = {**vars(self), "first": first, "holds": first < plan.on_their_way}
        phase = plan.phases[0]
        alone = len(plan.phases) == 1 and phase.raises is None
        if not self.by_warpgroups:
            return plan.with_feature(self, RowsByWarps(**known))
        if not alone or plan.clusters != phase.program.tiles:
            return plan.with_feature(self, RowsByWarpgroups(**known))
        if first < plan.on_their_way and not plan.is_awaited_by_all:
            ctas = plan.clusters * plan.cluster_size
            head = plan_head(phase, ctas, plan.left.stages, plan.number)
            arena = plan.arena.with_region("own_rows_barrier", 8, 8)
            if head is not None and arena.size <= device.max_shared_bytes:
                made = RowsBesideHead(
                    **known, head=head, tensor_maps=(head.raw,), workspaces=(head.factors,)
                )
                return replace(plan.with_feature(self, made), arena=arena)
        return plan.with_feature(self, RowsWithHelp(**known))
