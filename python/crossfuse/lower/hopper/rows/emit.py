"""The warps, or warpgroups, that make rows of the left operand, and those that help late CTAs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP, WARPGROUP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.features.feature import (
    ROWS_BEGUN,
    ROWS_MADE,
    ConsumerPart,
    Feature,
    LeftsPart,
)
from crossfuse.lower.hopper.flags import EndOfWait, FlagReader, Flags, fence_copies
from crossfuse.lower.hopper.pipeline import Cursor, Throttle
from crossfuse.lower.hopper.rows.plan import FIRST_WARP
from crossfuse.lower.hopper.rows.program import RowProgram
from crossfuse.lower.hopper.rows.statements import moved
from crossfuse.lower.hopper.statements import (
    Coordinates,
    Variable,
    Warmup,
    at,
    branches,
    grid_places,
    hidden,
    let,
    run,
    when,
)
from crossfuse.planner.kernels.memory import Piece
from crossfuse.planner.kernels.phase import ROW_WARPS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.kernel import KernelPlan
    from crossfuse.lower.hopper.roles import Body, Loader

# Warps of the loading warpgroup that make rows of the left operand, while others multiply.

#: Bytes of a cache line, and the most bytes of a tensor that are prefetched.
_LINE, _MOST = 128, 32 << 10
_FETCH_LINE = """\
__device__ __forceinline__ void crossfuse_fetch_line(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(place) : "memory");
}
"""
# nvcc may make loads of constants from plain ones, and move them in front of a wait; but not in
# front of what their address comes from, and volatile statements keep their order.
_PINNED = """\
__device__ __forceinline__ int crossfuse_pinned(int place) {
  asm volatile("" : "+r"(place) : : "memory");
  return place;
}
"""


@dataclass(frozen=True)
class WholeRows(Feature):
    """Rows of the first phase's left operand are made in the same kernel, each at once."""

    #: Whether a warpgroup makes a row, or a warp.
    by_warpgroups: bool
    #: Bytes of what the warps of a row pass one another.
    states: int
    #: Whether nvcc cannot move the loads of rows in front of a wait.
    may_start_early: bool
    fast: bool
    #: Stages of right tiles in flight before the rows of the first left tile are made.
    first: int = 0
    #: Whether these are fewer than usual.
    holds: bool = False

    events = (ROWS_BEGUN, ROWS_MADE)

    @staticmethod
    def program(plan: KernelPlan) -> RowProgram:
        """What makes a row."""
        rows = plan.phases[0].program.rows
        assert rows is not None
        return rows

    @staticmethod
    def flags(plan: KernelPlan) -> Flags:
        """Those of the tiles of rows."""
        flags = plan.phases[0].awaits
        assert flags is not None
        return flags

    def behind_all(self, stages: int) -> tuple[Piece, ...]:
        """Barriers, and what the warps of a row pass one another."""
        pieces = [Piece("rows_barrier", 8)]
        if self.by_warpgroups:
            pieces.append(Piece("help", 3 * 8))
        if self.states:
            pieces.append(Piece("row_states", self.states))
        return tuple(pieces)

    @property
    def barriers(self) -> tuple[str, ...]:  # type: ignore[override]
        """That which completes when the rows of the first left tile are made."""
        return ("rows_barrier",) if self.holds else ()

    def noting(self, where: Coordinates) -> Any:
        """The first thread that makes a row."""
        maker, thread = (1, 0) if self.by_warpgroups else (0, FIRST_WARP * WARP)
        return ir.script.And(where.warpgroup == maker, where.thread == thread)

    def throttle(self, body: Body) -> Throttle:
        """Right tiles but the first are loaded after rows are made."""
        return Throttle(
            body.right, body.plan.on_their_way, self.first, body.memory.barrier("rows_barrier")
        )

    def lefts(self, loader: Loader, number: int) -> LeftsPart:
        """Whoever loads the first left tile says that its rows are made."""
        if not self.holds:
            return LeftsPart()
        if number == 0:
            return Tells(loader.body)
        without = max(each.program.tiles for each in loader.plan.phases[:number])
        if without >= loader.plan.clusters:
            return LeftsPart()
        return TellsWithoutTile(loader, self.flags(loader.plan), without)


class Tells(LeftsPart):
    """Signals who loads right tiles that the rows of the first left tile are made."""

    def __init__(self, body: Body) -> None:
        self.body, self.told = body, Variable("told", "int32", 0)

    def ready(self) -> None:
        """Signal it once."""
        with when(self.told.value == 0):
            self._tell()

    def _tell(self) -> None:
        self.told.set(1)
        with when(self.body.where.lane == 0):
            mbarrier.arrive(self.body.memory.barrier("rows_barrier"))


class TellsWithoutTile(Tells):
    """Signals it in a CTA that has no tile of the phases before: once the first rows are made."""

    def __init__(self, loader: Loader, flags: Flags, without: int) -> None:
        super().__init__(loader.body)
        self.without = without
        self.reader = FlagReader(loader.body.placed(flags), loader.launch)

    def first(self, cursor: Cursor, places: dict[Any, Any]) -> int:
        """Wait for them before the flags of the tile."""
        with when(ir.script.And(self.told.value == 0, self.body.where.cluster >= self.without)):
            self.reader.start(0, 0)
            self.reader.wait(0)
            self._tell()
        return 0

    def ready(self) -> None:
        """Others have signalled it."""


class RowsByWarps(WholeRows):
    """Warps of the loading warpgroup make rows, while others multiply."""

    def prefetch(self, body: Body) -> None:
        """Prefetch the first rows of this CTA, before weights are asked for."""
        where = body.where
        _prefetch(body, [where.warpgroup == 0, where.thread >= FIRST_WARP * WARP])

    def beside_loads(self, body: Body) -> None:
        """Make rows.

        Row r is that of warp ``r // ctas`` of CTA ``r % ctas``, so that the first rows of all CTAs
        are under way together.
        """
        rows = self.program(body.plan)
        with (
            when(body.where.warp >= FIRST_WARP),
            _each_row(body, self, body.where.lane, ROW_WARPS) as (row, lane),
        ):
            with when(row < rows.rows):
                ir.script.add_to_parent(rows.of(let("own_row", row), let("lane", lane)))
            # All lanes have stored their elements.
            run(ir.script.cuda.warp_sync())


class RowsByWarpgroups(WholeRows):
    """Multiplying warpgroups make rows, one each, before the first left tile can have come.

    They have nothing else to do then. For 128 threads a row is short: all of it is asked for at
    once and kept in registers. Of its state the warps pass one another theirs, through shared
    memory.
    """

    def prefetch(self, body: Body) -> None:
        """Prefetch the first rows of this CTA, before weights are asked for."""
        _prefetch(body, [body.where.warpgroup > 0])

    def meeting(self, body: Body) -> None:
        """Make rows: nobody waits for who makes them, and loads are on their way before weights."""
        with (
            when(body.where.warpgroup > 0),
            _each_row(body, self, body.where.thread, body.plan.consumers) as (row, thread),
        ):
            make_row(body, self.program(body.plan), row, thread)


def _prefetch(body: Body, makes: list[Any]) -> None:
    rows = WholeRows.program(body.plan)
    row = let("row_ahead", first_row(body.plan, body.where, rows))
    with when(ir.conjunction([*makes, row < rows.rows])):
        for each in rows.read:
            fetch(each, rows.given(row), body.where.thread % rows.threads, rows.threads)


def fetch(buffer: Any, row: Any, lane: Any, threads: int) -> None:
    """Prefetch a row of a matrix, or a vector, into L2: each thread takes lines of its own."""
    *matrix, length = (int(extent) for extent in buffer.ty.shape)
    elements = max(1, _LINE * 8 // ir.tvm.DataType(str(buffer.ty.dtype)).bits)
    lines = -(-min(length, _MOST // _LINE * elements) // elements)
    for first in range(0, lines, threads):
        line = lane + first
        place = buffer.ptr_to([*([row] if matrix else []), line * elements])
        with when(line < lines) if first + threads > lines else nullcontext():
            run(ir.cuda_func_call("crossfuse_fetch_line", place, source_code=_FETCH_LINE))


def first_row(plan: KernelPlan, where: Coordinates, rows: RowProgram, number: Any = None) -> Any:
    """The first row of a warp or a warpgroup: those of all CTAs are under way together.

    With a `number`, that of those that a warpgroup makes side by side.
    """
    cta = where.cluster * plan.cluster_size + where.rank
    if number is None:
        number = where.warpgroup - 1 if rows.by_warpgroups else where.warp - FIRST_WARP
    return number * (plan.clusters * plan.cluster_size) + cta


def after_kernel_before(plan: KernelPlan, **places: Any) -> tuple[Any, ...]:
    """Wait for the kernel before, if this one starts early; returns `places`, known only then.

    Loads whose addresses come from them stay behind the wait, see `_PINNED`.
    """
    if not plan.early:
        return tuple(places.values())
    run(ir.script.ptx.griddepcontrol.wait())
    return tuple(
        let(
            name,
            ir.cuda_func_call("crossfuse_pinned", each, source_code=_PINNED, return_type="int32"),
        )
        for name, each in places.items()
    )


@contextmanager
def _each_row(body: Body, made: WholeRows, thread: Any, makers: int) -> Iterator[tuple[Any, Any]]:
    """Loop over the rows of one of a CTA's `makers`, warps or warpgroups; yields row and thread.

    It counts each row at the flag of its tile, by its first `thread`; rows of the last tile that
    the matrix does not have are counted too.
    """
    plan, rows, flags = body.plan, made.program(body.plan), made.flags(body.plan)
    first, own = after_kernel_before(
        plan, row_then=first_row(plan, body.where, rows), lane_then=thread
    )
    body.timeline.stamp(ROWS_BEGUN)
    row = Variable("row", "int32", first)
    writer = body.placed(flags)
    with ir.script.While(row.value < flags.down * flags.rows):
        yield row.value, own
        with when(thread == 0):
            writer.raise_flag(ir.script.min(row.value, rows.rows - 1), 0)
        row.set(row.value + makers * plan.clusters * plan.cluster_size)
    body.timeline.stamp(ROWS_MADE)


# One loop for the rows that a warpgroup makes: its own first, then those that are late.
#
# There is one copy of a row's statements so; see `helping` for who is late when.


class RowLoop:
    """One loop over rows of a warpgroup: its own, then, if they are late, those of its CTA's tile.

    Rows run from `first` on, `step` apart, `at_once` of them side by side.
    """

    def __init__(self, body: Body, flags: Flags, first: Any, step: Any, at_once: int = 1) -> None:
        self.body, self.flags, self.at_once = body, flags, at_once
        self._row = Variable("row", "int32", first)
        self._last = Variable("last_row", "int32", flags.down * flags.rows)
        self._step = Variable("row_step", "int32", step)
        self.writer = body.placed(flags)

    @property
    def step(self) -> Any:
        """How many rows further the next one is; another number once late rows are made."""
        return self._step.value

    def turn_to_late(self, late: Variable, first: Any, step: Any) -> None:
        """Go on with rows of the tile if `late` is not 0, or with none."""
        body = self.body
        program = body.plan.phases[0].program
        places = body.where.places | grid_places(program, body.where.cluster)
        row = at(program.contraction.left.origin[0], places)
        start = let("late_row", row // self.flags.rows * self.flags.rows)
        self._row.set(start + first)
        self._last.set(ir.script.Select(late.value > 0, start + self.flags.rows, 0))
        self._step.set(step)

    @contextmanager
    def each(self) -> Iterator[Any]:
        """Statements for each row, or for the first of those side by side; yields its number."""
        with ir.script.While(self._row.value < self._last.value):
            yield self._row.value
            self._row.set(self._row.value + self.at_once * self.step)


def make_row(body: Body, rows: RowProgram, row: Any, thread: Any) -> None:
    """Make a row with a warpgroup, if there is one of that number, and meet behind its stores."""
    number = body.where.warpgroup - 1
    with when(row < rows.rows):
        made = rows.of(let("own_row", row), let("own_thread", thread))
        ir.script.add_to_parent(passed_on(made, staged(body, rows, number), number))
    # All threads have stored their elements, and read one another's states.
    mbarrier.meet_warpgroup(number)


@dataclass(frozen=True, eq=False)
class Staged:
    """A buffer that warps of a row pass one another, at elements of the arena from `first` on."""

    buffer: Any
    elements: Any
    first: Any

    def place(self, indices: Any) -> tuple[Any, Any]:
        """The place in the arena of an element."""
        place: Any = 0
        for extent, each in zip(self.buffer.ty.shape, indices, strict=True):
            place = place * int(extent) + each
        return self.elements, [self.first + place]


def staged(body: Body, rows: RowProgram, number: Any) -> list[Staged]:
    """Where the warps of a row pass one another states: row `number` of those under way."""
    found: list[Staged] = []
    place = number * rows.state_places
    for each in rows.staged:
        found.append(Staged(each, body.memory.elements("row_states", str(each.ty.dtype)), place))
        place = place + ir.element_count(each)
    return found


def passed_on(made: Any, staged: list[Staged], warpgroup: Any) -> Any:
    """Statements with what is passed on in the arena; a warpgroup meets behind what stores it."""
    barrier = ir.script.Cast("uint32", 1 + warpgroup)
    meeting = ir.tirx.Evaluate(ir.script.ptx.bar.sync(barrier, ir.script.uint32(WARPGROUP)))

    places = {each.buffer: each.place for each in staged}

    def share(node: Any, mutator: Any) -> Any:
        passes = any(each.buffer in places for each in ir.buffer_stores(node))
        node = mutator.default_mutate(node)
        return ir.SeqStmt([node, meeting]) if passes else node

    def declare(node: Any, mutator: Any) -> Any:
        return ir.tirx.Evaluate(0) if node.buffer in places else node

    return moved(ir.mutate(made, (ir.IfThenElse, share), (ir.AllocBuffer, declare)), places)


# Rows that a CTA makes for others that are late, so that nobody waits forever.
#
# CTAs that wait for one another have to run at the same time. A cooperative launch sees to that,
# and
# begins when the launch before has ended: none of its CTAs takes the place of one that is done.
# Here
# nobody needs the others. If the rows of its tile do not come, the warpgroups of a CTA, which have
# made their own rows and wait too, make all of them. Who is late makes its rows once more later:
# the
# same bits at the same places, and counts them; helpers count nothing, so that flags count on as
# ever.
#
#     loads left tiles        watches                 make rows, then multiply
#     ----------------        -------                 ------------------------
#     looks at the flag       waits for `made`,       make own rows, raise their flags
#     until it is raised,     not for long: then      wait for the first tile,
#     or help `asked` for <-- arrives at `asked`      or for `called`
#     then: arrives at `called` --------------------> make the tile's rows,
#     waits for `done` <----------------------------- arrive at `done`
#     arrives at `made`, loads                        multiply
#
# Who loads says alone whether rows are late: once it has called, no tile comes before all have
# helped, so that all threads of a warpgroup see the same. A CTA that has started makes its own rows
# before it waits, and then waits only for its own threads and its cluster's, which start together.
# What comes after the flag is short: such code runs once, and is fetched while all wait for it.


#: Looks at a barrier before help is called for, of a microsecond at most and 40 ns at least. Rows
#: come in 3 us, unless CTAs of another launch keep some from starting.
PATIENCE = 2048

_WATCH = """\
__device__ __forceinline__ void crossfuse_watch(void* made, void* asked, int looks) {
  unsigned in_time = 0;
  for (int look = 0; look < looks && !in_time; ++look) {
    asm volatile("{ .reg .pred p; "
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], 0, %2; "
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(in_time) : "r"((unsigned)__cvta_generic_to_shared(made)), "r"(1000u)
                 : "memory");
  }
  if (!in_time) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];"
                 :: "r"((unsigned)__cvta_generic_to_shared(asked)) : "memory");
  }
}
"""
_UNLESS = "__any_sync(0xffffffffu, crossfuse_is_complete(asked))"
_FUNCTIONS = """\
__device__ __forceinline__ bool crossfuse_is_complete(void* barrier) {
  unsigned complete;
  asm volatile("{ .reg .pred p; "
               "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], 0; "
               "selp.u32 %0, 1, 0, p; }"
               : "=r"(complete) : "r"((unsigned)__cvta_generic_to_shared(barrier)) : "memory");
  return complete;
}
__device__ __forceinline__ void crossfuse_await_help(void* called, void* done) {
  if ((threadIdx.x & 31) == 0) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];"
                 :: "r"((unsigned)__cvta_generic_to_shared(called)) : "memory");
  }
  asm volatile("{ .reg .pred P1; "
               "AGAIN: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%0], %1; "
               "@!P1 bra AGAIN; }"
               :: "r"((unsigned)__cvta_generic_to_shared(done)), "r"(0) : "memory");
}
"""
_AWAIT_EITHER = """\
__device__ __forceinline__ int crossfuse_await_either(void* full, void* called) {
  unsigned late;
  asm volatile("{ .reg .pred f, c; mov.u32 %0, 0; "
               "AGAIN: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 f, [%1], 0, %3; "
               "@f bra THERE; "
               "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 c, [%2], 0; "
               "@!c bra AGAIN; mov.u32 %0, 1; THERE: }"
               : "=&r"(late) : "r"((unsigned)__cvta_generic_to_shared(full)),
               "r"((unsigned)__cvta_generic_to_shared(called)), "r"(20000u) : "memory");
  return (int)late;
}
"""


@dataclass(frozen=True)
class Help:
    """The mbarriers through which the roles of a CTA call for help with rows that are late."""

    #: Address of the barrier that completes when the rows of the tile are there.
    made: Any
    #: Of those that complete when help is asked for, and when helpers are to begin.
    asked: Any
    called: Any
    #: Of the one that completes when warpgroups have made the rows.
    done: Any

    def initialise(self, warpgroups: int) -> None:
        """Set up all barriers but `made`, which the kernel owns; one thread calls it."""
        mbarrier.initialise(self.asked, 1)
        mbarrier.initialise(self.called, 1)
        mbarrier.initialise(self.done, warpgroups)

    def watch(self) -> None:
        """Ask for help if rows do not come; for a thread that has nothing else to do."""
        looks = ir.script.int32(PATIENCE)
        run(ir.cuda_func_call("crossfuse_watch", self.made, self.asked, looks, source_code=_WATCH))

    @property
    def ending(self) -> EndOfWait:
        """How a wait for flags ends if help was asked for before they came: others help first."""
        return EndOfWait(
            "_or_help",
            _FUNCTIONS,
            ",\n                            void* asked, void* called, void* done",
            (self.asked, self.called, self.done),
            _UNLESS,
            "      crossfuse_await_help(called, done);\n",
        )

    def await_or_call(self, full: Any) -> Any:
        """Wait at a barrier, or for the call for help: 1 for the call, else 0."""
        return ir.cuda_func_call(
            "crossfuse_await_either",
            full,
            self.called,
            source_code=_AWAIT_EITHER,
            return_type="int32",
        )

    def say_done(self) -> None:
        """Arrive at `done`; one thread of a warpgroup calls it, after it met the others."""
        fence_copies()
        mbarrier.arrive(self.done)


class _Part(ConsumerPart):
    """Rows that a warpgroup makes twice: its own, and if others are late, those of its tile.

    One loop makes either, in the warm-up and after it: so there is one copy of its statements, and
    the code of the first products is warmed up while the rows of others are on their way.
    """

    feature: RowsWithHelp

    def begin(self) -> None:
        """Declare the loop."""
        plan, where = self.body.plan, self.body.where
        self.rows, flags = self.feature.program(plan), self.feature.flags(plan)
        first, self._thread = after_kernel_before(
            plan, row_then=first_row(plan, where, self.rows), lane_then=where.thread
        )
        self.body.timeline.stamp(ROWS_BEGUN)
        step = plan.consumers * plan.clusters * plan.cluster_size
        self._loop = RowLoop(self.body, flags, first, step)

    def warm(self, warmup: Warmup) -> None:
        """Make rows: in the warm-up its own, then those that are late."""
        body, where, help_ = self.body, self.body.where, self.feature.help(self.body)
        counts = hidden(warmup.turn)
        late = Variable("rows_are_late", "int32", 0)
        with when(counts > 0):
            late.set(help_.await_or_call(body.left.full(0)))
            self._loop.turn_to_late(late, where.warpgroup - 1, body.plan.consumers)
        with self._loop.each() as row:
            make_row(body, self.rows, row, self._thread)
            with when(ir.script.And(where.thread == 0, counts == 0)):
                self._loop.writer.raise_flag(ir.script.min(row, self.rows.rows - 1), 0)
        with branches(counts > 0) as (helped, made):
            with helped, when(ir.script.And(where.thread == 0, late.value > 0)):
                help_.say_done()
            with made:
                body.timeline.stamp(ROWS_MADE)
                if body.plan.cluster_size > 1:
                    mbarrier.await_started()
                body.timeline.stamp("cluster met")


class RowsWithHelp(RowsByWarpgroups):
    """Warpgroups make their own rows, and those of their tile if others are late."""

    part: ClassVar[type[ConsumerPart]] = _Part
    helps = True
    barriers: tuple[str, ...] = ("rows_barrier",)

    def help(self, body: Body) -> Help:
        """Its barriers."""
        return Help(
            body.memory.barrier("rows_barrier"),
            *(body.memory.barrier("help", each) for each in range(3)),
        )

    def makers(self, body: Body) -> range:
        """Indices of the warpgroups that make rows."""
        return range(1, body.plan.consumers + 1)

    def initialise(self, body: Body) -> None:
        """Initialise all barriers."""
        super().initialise(body)
        with when(body.where.thread == 0):
            self.help(body).initialise(len(self.makers(body)))

    def meeting(self, body: Body) -> None:
        """Rows are made in the warm-up."""

    def lefts(self, loader: Loader, number: int) -> LeftsPart:
        """Whoever loads left tiles says when the rows of the first are there."""
        return Tells(loader.body)

    def end_of_wait(self, body: Body) -> EndOfWait:
        """Flags are not waited for once help has been asked for."""
        return self.help(body).ending

    def beside_loads(self, body: Body) -> None:
        """A thread watches whether rows come."""
        with when(body.where.thread == FIRST_WARP * WARP):
            self.help(body).watch()
