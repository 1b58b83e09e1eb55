"""Records when a kernel did what: an instrument for whoever wants to make it faster.

A kernel that is lowered with a timeline stores the global timer at each event, for each CTA, into
one more output. It costs a few stores; kernels without a timeline have none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import run, when
from crossfuse.lower.image import BufferSpec

if TYPE_CHECKING:
    from crossfuse.lower.hopper.coordinates import Coordinates
    from crossfuse.lower.hopper.plan.kernel import KernelPlan
    from crossfuse.lower.hopper.plan.phase import PhasePlan

#: Name of the output, before the kernel's number.
TIMELINE = "crossfuse_timeline"
#: Noted by the thread that loads right tiles, and by the first of those that make rows; all others
#: by the first one that multiplies.
_ASKED = "weights asked for"
ROWS_BEGUN, ROWS_MADE = _ROWS = ("rows begun", "rows made")
_PHASE = (
    _ASKED,
    "first tiles",
    "multiplied",
    "peers multiplied",
    "received",
    "in boxes",
    "written",
    "stored",
)
#: The thread of the loading warpgroup that makes the first row, see `rows.emit`.
_MAKING = 64
_STAMP = """\
__device__ __forceinline__ void crossfuse_stamp(void* at) {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  *(unsigned long long*)at = now;
}
"""


def events(plan: KernelPlan) -> tuple[str, ...]:
    """Names of a kernel's events, in the order in which they happen in a CTA."""
    phases = [
        f"{each} {number}"
        for number, phase in enumerate(plan.phases)
        for each in _PHASE
        if each not in _missing(phase)
    ]
    summed = () if plan.phases[-1].program.summed is None else ("summed",)
    rows = () if plan.rows is None else _ROWS
    return ("begin", "cluster met", *rows, *phases, *summed, "end")


def _missing(phase: PhasePlan) -> set[str]:
    """Events that do not occur in a phase."""
    missing = set()
    if phase.program.exchange is None:
        missing |= {"peers multiplied", "received"}
    if not phase.store.boxes:
        missing |= {"in boxes", "written"}
    if phase.raises is None:
        missing |= {"written"}
    return missing


def timeline_buffer(plan: KernelPlan) -> BufferSpec:
    """The output for the events of all CTAs: nanoseconds, 0 for what did not occur."""
    ctas = plan.clusters * plan.cluster_size
    return BufferSpec(f"{TIMELINE}_{plan.number}", (ctas, len(events(plan))), "int64", True)


class Timeline:
    """Emits the stamps of one kernel; without a buffer it emits nothing."""

    def __init__(self, plan: KernelPlan, where: Coordinates, buffer: Any) -> None:
        self.events = events(plan)
        self.where = where
        self.buffer = buffer
        self.cta = where.cluster * plan.cluster_size + where.rank
        self.by_warpgroups = plan.rows is not None and plan.rows.by_warpgroups
        self.maker = plan.makers.start

    def begin(self) -> None:
        """Clear the row of this CTA, each event by the thread that records it; stamp the first."""
        if self.buffer is None:
            return
        for thread in (self._multiplying, self._loading, self._making):
            with thread():
                for number, event in enumerate(self.events):
                    if self._noting(event) == thread:
                        ir.script.buffer_store(self.buffer, ir.script.int64(0), [self.cta, number])
        self.stamp("begin")

    def stamp(self, event: str, phase: int | None = None) -> None:
        """Record that the first thread that multiplies has reached this place."""
        if self.buffer is not None:
            with self._multiplying():
                self.stamp_here(event, phase)

    def stamp_here(self, event: str, phase: int | None = None) -> None:
        """Record that the one thread that executes this has reached this place."""
        if self.buffer is None:
            return
        index = self.events.index(event if phase is None else f"{event} {phase}")
        place = self.buffer.ptr_to([self.cta, index])
        run(ir.cuda_func_call("crossfuse_stamp", place, source_code=_STAMP))

    def stamp_rows(self, event: str) -> None:
        """Record that the first thread that makes rows has reached this place."""
        if self.buffer is not None:
            with self._making():
                self.stamp_here(event)

    def _noting(self, event: str) -> Any:
        """Which thread records an event."""
        if event in _ROWS:
            return self._making
        return self._loading if event.startswith(_ASKED) else self._multiplying

    def _making(self) -> Any:
        maker, thread = (self.maker, 0) if self.by_warpgroups else (0, _MAKING)
        return when(ir.script.And(self.where.warpgroup == maker, self.where.thread == thread))

    def _loading(self) -> Any:
        return when(ir.script.And(self.where.warpgroup == 0, self.where.thread == 0))

    def _multiplying(self) -> Any:
        return when(ir.script.And(self.where.warpgroup == 1, self.where.thread == 0))
