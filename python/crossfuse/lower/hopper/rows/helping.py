"""Rows that a CTA makes for others that are late, so that nobody waits forever.

CTAs that wait for one another have to run at the same time. A cooperative launch sees to that, and
begins when the launch before has ended: none of its CTAs takes the place of one that is done. Here
nobody needs the others. If the rows of its tile do not come, the warpgroups of a CTA, which have
made their own rows and wait too, make all of them. Who is late makes its rows once more later: the
same bits at the same places, and counts them; helpers count nothing, so that flags count on as
ever.

    loads left tiles        watches                 make rows, then multiply
    ----------------        -------                 ------------------------
    looks at the flag       waits for `made`,       make own rows, raise their flags
    until it is raised,     not for long: then      wait for the first tile,
    or help `asked` for <-- arrives at `asked`      or for `called`
    then: arrives at `called` --------------------> make the tile's rows,
    waits for `done` <----------------------------- arrive at `done`
    arrives at `made`, loads                        multiply

Who loads says alone whether rows are late: once it has called, no tile comes before all have
helped, so that all threads of a warpgroup see the same. A CTA that has started makes its own rows
before it waits, and then waits only for its own threads and its cluster's, which start together.
What comes after the flag is short: such code runs once, and is fetched while all wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.features.feature import ROWS_BEGUN, ROWS_MADE, ConsumerPart, LeftsPart
from crossfuse.lower.hopper.flags import EndOfWait, fence_copies
from crossfuse.lower.hopper.rows.emit import (
    RowLoop,
    RowsByWarpgroups,
    Tells,
    after_kernel_before,
    first_row,
    make_row,
)
from crossfuse.lower.hopper.rows.plan import FIRST_WARP
from crossfuse.lower.hopper.statements import Variable, Warmup, branches, hidden, run, when

if TYPE_CHECKING:
    from crossfuse.lower.hopper.roles import Body, Loader

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
            body.barrier("rows_barrier"), *(body.barrier("help", each) for each in range(3))
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
