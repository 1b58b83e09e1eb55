"""A ring of stages in shared memory, filled by TMA and emptied by warpgroups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.plan.memory import Arena
from crossfuse.lower.hopper.statements import Variable, let, when


@dataclass(frozen=True)
class Ring:
    """Full and empty barriers of the stages."""

    stages: int
    #: Buffer of 64-bit mbarriers: one for each full stage, then one for each empty stage.
    barriers: Any

    def initialise(self, consumers: int, thread: Any) -> None:
        """Initialise all barriers, a stage each thread; `consumers` arrivals make a stage empty.

        Instructions that run once have to be fetched from L2: one after another, they would keep
        the cluster waiting for a microsecond.
        """
        with when(thread < self.stages):
            mbarrier.initialise(self.full(thread), 1)
            mbarrier.initialise(self.empty(thread), consumers)

    def full(self, stage: Any) -> Any:
        """Address of the barrier that completes when a stage has been filled."""
        return self.barriers.ptr_to([stage])

    def empty(self, stage: Any) -> Any:
        """Address of the barrier that completes when all consumers have read a stage."""
        return self.barriers.ptr_to([self.stages + stage])


def ring_barriers(arena: Arena, memory: Any, name: str, stages: int, offset: int) -> Ring:
    """The barriers of a ring, at an offset among those of the kernel."""
    buffer = ir.script.decl_buffer(
        (2 * stages,),
        "uint64",
        data=memory.data,
        scope="shared.dyn",
        byte_offset=arena["barriers"].offset + offset,
    )
    ir.IRBuilder.name(name, buffer)
    return Ring(stages, buffer)


class Cursor:
    """One role's position in a ring: it carries stage and parity, so that no one else counts."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._stage = Variable("stage", "int32", 0)
        self._parity = Variable("parity", "int32", 0)

    @property
    def stage(self) -> Any:
        """The current stage."""
        return self._stage.value

    def before(self, number: int) -> Any:
        """The stage `number` before the current one, at most the length of the ring."""
        stages = self.ring.stages
        wraps = self.stage == 0 if number == 1 else self.stage < number
        wrapped = stages - 1 if number == 1 else self.stage + (stages - number)
        return ir.script.Select(wraps, wrapped, self.stage - number)

    def wait_full(self) -> None:
        """Wait until the stage has been filled."""
        mbarrier.wait(self.ring.full(self.stage), self._parity.value)

    def wait_empty(self) -> None:
        """Wait until the stage may be overwritten. On the first round it is empty at once."""
        mbarrier.wait(self.ring.empty(self.stage), self._parity.value ^ 1)

    def advance(self) -> None:
        """Go on to the next stage."""
        self._stage.set(self.stage + 1)
        with when(self.stage == self.ring.stages):
            self._stage.set(0)
            self._parity.set(self._parity.value ^ 1)


class Throttle:
    """Limits how many stages a loader has in flight, not yet arrived.

    Loads are served in order: all that the CTA loads or stores later waits behind them, while the
    memory needs to know of little more than what it delivers in its latency. At most `most` stages
    are in flight, or fewer at first: ``begin = (few, end)`` allows `few` until `end` are issued.
    The stages after number `first` are issued once the barrier at `gate` completes, if there is
    one.
    """

    def __init__(
        self,
        ring: Ring,
        most: int,
        first: int = 0,
        gate: Any = None,
        begin: tuple[int, int] = (0, 0),
    ) -> None:
        self.ring = ring
        self.first = first
        #: Whether somebody waits for the first stages.
        self.begins_with_few = begin[1] > 0
        self.gate = gate if first < most else None
        # Stages are waited for, one more each time: between two numbers of those asked for, and
        # from a third on.
        few, end = begin
        self._waits: list[tuple[int, int | None]] = [(few, end)] if end else []
        if most < ring.stages:
            self._waits.append((end - few + most, None))
        if self._waits:
            self._arrived = Cursor(ring)
        self._counts = bool(self._waits) or self.gate is not None
        if self._counts:
            self._asked = Variable("asked_for", "int32", 0)

    def __call__(self) -> None:
        """Wait until one more stage may be issued."""
        if self.gate is not None:
            with when(self._asked.value == self.first):
                mbarrier.wait(self.gate, 0)
        for start, end in self._waits:
            begun = self._asked.value >= start
            within = begun if end is None else ir.script.And(begun, self._asked.value < end)
            with when(within):
                self._arrived.wait_full()
                self._arrived.advance()
        if self._counts:
            self._asked.set(self._asked.value + 1)


class Release:
    """Hands stages of a warpgroup back to all CTAs that fill them.

    `fillers` are the CTAs that fill a stage of this one in this phase or a later one: their number,
    and the rank of number `thread` of them. Each arrival counts `weight`, so that the barrier
    expects the same number in every phase: that of all CTAs that share a stage in the phase where
    most do.
    """

    def __init__(self, ring: Ring, thread: Any, fillers: tuple[int, Any], weight: int) -> None:
        self.ring = ring
        self.thread = thread
        self.fillers, rank = fillers
        self.weight = weight
        if self.fillers > 1:
            self.remote = Variable("empty_in_cluster", "uint32")
            mbarrier.cluster_address(self.remote.value, ring.empty(0), let("release_rank", rank))

    def __call__(self, stage: Any) -> None:
        """Signal that this warpgroup has read a stage."""
        with when(self.thread < self.fillers):
            if self.fillers == 1:
                mbarrier.arrive(self.ring.empty(stage), self.weight)
                return
            offset = ir.script.Cast("uint32", stage * 8)
            mbarrier.arrive_remote(self.remote.value + offset, self.weight)
