"""Records when a kernel did what: an instrument for whoever wants to make it faster.

A kernel that is lowered with a timeline stores the global timer at each event, for each CTA, into
one more output. It costs a few stores; kernels without a timeline have none of it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import run, when
from crossfuse.lower.image import BufferSpec

if TYPE_CHECKING:
    from crossfuse.lower.hopper.coordinates import Coordinates
    from crossfuse.lower.hopper.plan.kernel import KernelPlan

#: Name of the output, before the kernel's number.
TIMELINE = "crossfuse_timeline"
#: Noted by the thread that loads right tiles; what features note, by a thread of theirs, and all
#: others by the first one that multiplies.
_ASKED = "weights asked for"
ROWS_BEGUN, ROWS_MADE = "rows begun", "rows made"
_STAMP = """\
__device__ __forceinline__ void crossfuse_stamp(void* at) {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  *(unsigned long long*)at = now;
}
"""


def events(plan: KernelPlan) -> tuple[str, ...]:
    """Names of a kernel's events, in the order in which they happen in a CTA."""
    found = ["begin", "cluster met", *(event for each in plan.features for event in each.events)]
    for number, phase in enumerate(plan.phases):
        own = (event for each in plan.features for event in each.events_of(number))
        written = ("in boxes", *(("written",) if phase.raises else ())) if phase.store.boxes else ()
        each = (_ASKED, "first tiles", "multiplied", *own, *written, "stored")
        found += [f"{event} {number}" for event in each]
    return (*found, *(event for each in plan.features for event in each.events_behind), "end")


def timeline_buffer(plan: KernelPlan) -> BufferSpec:
    """The output for the events of all CTAs: nanoseconds, 0 for what did not occur."""
    ctas = plan.clusters * plan.cluster_size
    return BufferSpec(f"{TIMELINE}_{plan.number}", (ctas, len(events(plan))), "int64", True)


class Timeline:
    """Emits the stamps of one kernel, into a buffer; none without one."""

    def __init__(self, plan: KernelPlan, where: Coordinates, buffer: Any) -> None:
        self.events, self.features = events(plan), plan.features
        self.where, self.buffer = where, buffer
        self.cta = where.cluster * plan.cluster_size + where.rank

    def begin(self) -> None:
        """Clear the row of this CTA, each event by the thread that records it; stamp the first."""
        if self.buffer is None:
            return
        own = {event: each for each in self.features for event in each.events}
        asked = [each for each in self.events if each.startswith(_ASKED)]
        for group in (
            [each for each in self.events if each not in own and each not in asked],
            asked,
            *(each.events for each in self.features if each.events),
        ):
            with when(self._notes(group[0])):
                for each in group:
                    ir.script.buffer_store(self.buffer, ir.script.int64(0), self._place(each))
        self.stamp("begin")

    def stamp(self, event: str, phase: int | None = None, condition: Any = None) -> None:
        """Record that the thread that notes this event has come here, if a condition holds."""
        if self.buffer is not None:
            name = event if phase is None else f"{event} {phase}"
            with nullcontext() if condition is None else when(condition), when(self._notes(name)):
                self._stamp(name)

    def stamp_here(self, event: str, phase: int) -> None:
        """Record that the one thread that executes this has come here."""
        if self.buffer is not None:
            self._stamp(f"{event} {phase}")

    def _stamp(self, event: str) -> None:
        place = self.buffer.ptr_to(self._place(event))
        run(ir.cuda_func_call("crossfuse_stamp", place, source_code=_STAMP))

    def _place(self, event: str) -> list[Any]:
        return [self.cta, self.events.index(event)]

    def _notes(self, event: str) -> Any:
        """Whether this thread records an event."""
        for each in self.features:
            if event in each.events:
                return each.noting(self.where)
        warpgroup = 0 if event.startswith(_ASKED) else 1
        return ir.script.And(self.where.warpgroup == warpgroup, self.where.thread == 0)
