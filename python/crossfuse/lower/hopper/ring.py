"""A ring of stages in shared memory, filled by TMA and emptied by warpgroups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.statements import Variable, let, when


@dataclass(frozen=True)
class Ring:
    """Barriers of the stages.

    Attributes
    ----------
    stages : int
        Number of stages.
    barriers : Any
        Buffer of 64-bit barriers: `stages` that tell a stage is full, then `stages` that tell it
        is empty.
    """

    stages: int
    barriers: Any

    def initialise(self, consumers: int) -> None:
        """Set up all barriers; a stage is empty once `consumers` warpgroups have said so."""
        for stage in range(self.stages):
            mbarrier.initialise(self.full(stage), 1)
            mbarrier.initialise(self.empty(stage), consumers)

    def full(self, stage: Any) -> Any:
        """Address of the barrier that completes when a stage has been filled."""
        return self.barriers.ptr_to([stage])

    def empty(self, stage: Any) -> Any:
        """Address of the barrier that completes when a stage has been read by everybody."""
        return self.barriers.ptr_to([self.stages + stage])


class Cursor:
    """One role's way round a ring: it carries stage and parity, so that no one else counts.

    Parameters
    ----------
    ring : Ring
        The ring.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._stage = Variable("stage", "int32", 0)
        self._parity = Variable("parity", "int32", 0)

    @property
    def stage(self) -> Any:
        """The stage it stands at."""
        return self._stage.value

    @property
    def previous(self) -> Any:
        """The stage behind it."""
        stages = self.ring.stages
        return ir.script.Select(self.stage == 0, stages - 1, self.stage - 1)

    def wait_full(self) -> None:
        """Wait until the stage has been filled."""
        mbarrier.wait(self.ring.full(self.stage), self._parity.value)

    def wait_empty(self) -> None:
        """Wait until the stage may be overwritten. The first time round it is empty at once."""
        mbarrier.wait(self.ring.empty(self.stage), self._parity.value ^ 1)

    def expect(self, size: int) -> Any:
        """Announce the bytes of the stage; returns the barrier that they complete."""
        mbarrier.expect(self.ring.full(self.stage), size)
        return self.ring.full(self.stage)

    def advance(self) -> None:
        """Go on to the next stage."""
        self._stage.set(self.stage + 1)
        with when(self.stage == self.ring.stages):
            self._stage.set(0)
            self._parity.set(self._parity.value ^ 1)


class Release:
    """How a warpgroup hands stages back to everybody who fills them.

    Parameters
    ----------
    ring : Ring
        The ring.
    thread : Any
        Index of the thread in its warpgroup.
    sharers : int
        CTAs that fill stages of one another in some phase: the whole cluster, or 1.
    """

    def __init__(self, ring: Ring, thread: Any, sharers: int) -> None:
        self.ring = ring
        self.thread = thread
        self.sharers = sharers
        if sharers > 1:
            self.remote = Variable("empty_in_cluster", "uint32")
            rank = let("release_rank", thread % sharers)
            mbarrier.cluster_address(self.remote.value, ring.empty(0), rank)

    def __call__(self, stage: Any, *, shared: bool) -> None:
        """Say that this warpgroup has read a stage.

        Parameters
        ----------
        stage : Any
            Its number.
        shared : bool
            Whether all CTAs fill it in this phase. If only this one does, it counts for all: the
            barrier waits for as many arrivals in every phase.
        """
        if not shared:
            with when(self.thread == 0):
                mbarrier.arrive(self.ring.empty(stage), self.sharers)
            return
        with when(self.thread < self.sharers):
            offset = ir.script.Cast("uint32", stage * 8)
            mbarrier.arrive_remote(self.remote.value + offset)
