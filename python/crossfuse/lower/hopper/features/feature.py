"""What a kernel of products has beside its rings of tiles: the points at which it takes part.

A feature that a kernel does not have appears nowhere in its code: whoever plans or emits the kernel
goes through `KernelPlan.features`, and asks each of them at these points, in this order::

    plan        found_in; its shared memory; settled: what depends on all else
    all warps   prefetch; initialise: its barriers; meeting: while the cluster meets
    loading     load, or lefts; loaded: behind the last one; beside_loads
    multiplying begin; warm: in the warm-up too; finish: behind the last tile
                of a phase: left, ending; of a tile: tile, first; of a step: step
    others      apart
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.flags import EndOfWait, PlacedFlags
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import Coordinates, Warmup, at, run, when
from crossfuse.lower.image import BufferSpec, TensorMap

if TYPE_CHECKING:
    from crossfuse.hardware import Device
    from crossfuse.lower.hopper.epilogue.store import BoxPlace
    from crossfuse.lower.hopper.pipeline import Cursor, Throttle
    from crossfuse.lower.hopper.plan.kernel import KernelPlan
    from crossfuse.lower.hopper.roles import Body, Loader, Steps
    from crossfuse.lower.hopper.wgmma import LeftOperand
    from crossfuse.planner.kernels.memory import Piece


T = TypeVar("T")


def first_of(found: Iterable[T | None]) -> T | None:
    """The first that there is."""
    return next((each for each in found if each is not None), None)


class LeftsPart:
    """What a feature does where the left tiles of a phase are loaded: nothing."""

    def first(self, cursor: Cursor, places: dict[Any, Any]) -> int:
        """Load the first steps of a tile in a way of its own; returns their number."""
        return 0

    def ready(self) -> None:
        """Before a step is loaded, when its left tile has been made."""


class ConsumerPart:
    """What a feature does in a multiplying warpgroup, with what it declares there: nothing."""

    def __init__(self, feature: Any, body: Body, warpgroup: Any) -> None:
        self.feature, self.body, self.warpgroup = feature, body, warpgroup

    def begin(self) -> None:
        """Where the role begins."""

    def warm(self, warmup: Warmup) -> None:
        """Before the first tile, in the warm-up too."""

    def left(self, number: int) -> LeftOperand | None:
        """Where the left tiles of a phase are, if they are in no ring."""
        return None

    def ending(self, sums: TileSums) -> Ending | None:
        """What ends the tiles of a phase, if they are not stored."""
        return None

    def tile(self, number: int, places: dict[Any, Any]) -> None:
        """Before a tile of a phase is multiplied."""

    def first(self, steps: Steps) -> int:
        """Multiply the first steps of a tile in a way of its own; returns their number."""
        return 0

    def step(self, steps: Steps, number: Any) -> None:
        """Before the products of a step of the tile."""

    def finish(self, warmup: Warmup) -> None:
        """Behind the last tile."""


@dataclass(frozen=True)
class TileSums:
    """The sums of a phase's tiles in a multiplying warpgroup, of which something is to become."""

    body: Body
    #: Of the phase.
    number: int
    warpgroup: Any
    #: Registers of all products.
    accumulators: Any
    #: Where TMA's boxes are filled; None where elements are stored directly.
    boxes: BoxPlace | None
    warmup: Warmup

    @property
    def phase(self) -> PhasePlan:
        """The plan of the phase."""
        return self.body.plan.phases[self.number]

    @property
    def writer(self) -> PlacedFlags | None:
        """Raises the flags of the tiles, if others wait for these."""
        flags = self.phase.raises
        return None if flags is None else self.body.placed(flags)


class Ending(ABC):
    """The end of each tile of a phase, in one multiplying warpgroup."""

    def __init__(self, sums: TileSums) -> None:
        self.body, self.plan, self.where = sums.body, sums.phase, sums.body.where
        self.number, self.warpgroup = sums.number, sums.warpgroup
        self.accumulators, self.warmup = sums.accumulators, sums.warmup

    def note(self, event: str) -> None:
        """Record an event of the phase, see `timeline`."""
        self.body.timeline.stamp(event, self.number)

    def origin(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of the first element of the tile that `values` place."""
        row, column = (at(each, values) for each in self.plan.program.store.tile.origin)
        return row, column

    def ahead(self, values: Mapping[Any, Any]) -> None:  # noqa: B027 -- nothing, unless overridden
        """Prefetch what the tile that `values` place needs beside its sums, before it is made."""

    @abstractmethod
    def end(self, values: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
        """Take over the sums of the tile that `values` place.

        `leave`, if given, is called when this thread sends no more to its peers.
        """

    def leave(self, leave: Callable[[], None] | None) -> None:
        """Call `leave` at once, where nothing is sent to peers."""
        if leave is not None:
            with self.warmup.skipped():
                leave()

    def finish(self) -> None:  # noqa: B027 -- nothing, unless overridden
        """Wait for stores that are still in flight, behind the last tile."""


class Feature:
    """A feature of a kernel, as plain values; at every point it does nothing.

    Phases are named by their numbers: the kernel is emitted on other buffers than it is planned on.
    """

    #: What a phase's program has that asks for it.
    asked_by: ClassVar[str]
    #: Its part in a warpgroup that multiplies.
    part: ClassVar[type[ConsumerPart]] = ConsumerPart
    #: Bytes that CTAs of the cluster send to this one, where it has multiplied its tiles.
    received: int = 0
    #: Registers of a thread that loads, and of one that multiplies, if they are not as usual.
    registers: tuple[int, int] | None = None
    #: Registers that a thread has in use beside its sums, from one phase to the next.
    held: int = 0
    #: Warpgroups beside those that load and multiply.
    warpgroups: int = 0
    #: Whether warpgroups begin before the cluster has met, and wait for no other CTA.
    helps: bool = False
    #: Whether functions are computed in 16 bits, see `crossfuse.lower.buffers`.
    fast: bool = False
    #: Whether the kernel may start before the one before it is over.
    may_start_early: bool = True
    #: Whether multiplying warpgroups read what the kernel before may still be writing.
    reads_early: bool = False
    #: Buffers in global memory for one launch.
    workspaces: tuple[BufferSpec, ...] = ()
    #: Descriptors that it copies by.
    tensor_maps: tuple[TensorMap, ...] = ()
    #: Shared memory in front of the rings, and behind them where something is sent to.
    before_tiles: tuple[Piece, ...] = ()
    behind_tiles: tuple[Piece, ...] = ()
    #: Regions of a barrier each, at which one thread arrives.
    barriers: tuple[str, ...] = ()
    #: Events that it notes in front of all phases, and those behind them, see `timeline`.
    events: tuple[str, ...] = ()
    events_behind: tuple[str, ...] = ()

    @classmethod
    def found_in(cls, phases: tuple[PhasePlan, ...], device: Device) -> Feature | None:
        """The feature if phases ask for it."""
        numbers = [
            each for each, phase in enumerate(phases) if getattr(phase.program, cls.asked_by)
        ]
        return cls.of(phases, numbers, device) if numbers else None

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int], device: Device) -> Feature:
        """The feature of a kernel in which the phases of these numbers ask for it."""
        return cls()

    def settled(self, plan: KernelPlan, device: Device) -> KernelPlan:
        """The plan with what of the feature depends on all else in it."""
        return plan

    def behind_all(self, stages: int) -> tuple[Piece, ...]:
        """Shared memory behind all that, with so many stages of left tiles."""
        return ()

    def events_of(self, number: int) -> tuple[str, ...]:
        """Events of a phase, between those that it is multiplied and stored."""
        return ()

    def noting(self, where: Coordinates) -> Any:
        """Whether this thread notes its events; asked of features that have some."""
        raise NotImplementedError(f"{type(self).__name__} has events that no thread notes")

    def prefetch(self, body: Body) -> None:
        """Before anything is loaded."""

    def initialise(self, body: Body) -> None:
        """Initialise its barriers, by one warp."""
        for name in self.barriers:
            with when(body.where.thread == 0):
                mbarrier.initialise(body.memory.barrier(name), 1)

    def meeting(self, body: Body) -> None:
        """While the CTAs of a cluster wait for one another."""

    def apart(self, body: Body) -> AbstractContextManager[Any]:
        """What its own warpgroups do; in the context is what those that multiply do."""
        return nullcontext()

    def load(self, loader: Loader) -> bool:
        """Load both operands in a way of its own; whether it does."""
        return False

    def throttle(self, body: Body) -> Throttle | None:
        """What limits the right tiles in flight, if it has other limits than usual."""
        return None

    def lefts(self, loader: Loader, number: int) -> LeftsPart:
        """Its part in loading the left tiles of a phase."""
        return LeftsPart()

    def end_of_wait(self, body: Body) -> EndOfWait | None:
        """What may end a wait for flags early."""
        return None

    def loaded(self, body: Body, launch: Any) -> None:
        """Behind the last left tile, in the warp that loads them, in launch number `launch`."""

    def beside_loads(self, body: Body) -> None:
        """What other warps of the loading warpgroup do."""


# Records when a kernel did what: an instrument for whoever wants to make it faster.
#
# A kernel that is lowered with a timeline stores the global timer at each event, for each CTA, into
# one more output. It costs a few stores; kernels without a timeline have none of it.

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
