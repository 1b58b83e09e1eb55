"""Barriers of the warps that make rows chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crossfuse.lower.hopper.rows.chunk_plan import ROW_WARPS, ChunkPlan
from crossfuse.lower.hopper.statements import when
from crossfuse.lower.hopper.sync import mbarrier


@dataclass(frozen=True, eq=False)
class ChunkBarriers:
    """Where they are.

    Attributes
    ----------
    plan : ChunkPlan
        How rows are shared out.
    place : Callable
        Function from the number of a barrier to its address.
    """

    plan: ChunkPlan
    place: Callable[[Any], Any]

    def full(self, warp: Any, slot: Any) -> Any:
        """A warp's batch has come."""
        return self.place(warp * self.plan.slots + slot)

    def made(self, parity: Any) -> Any:
        """All warps have stored a chunk; those of odd and of even numbers take turns."""
        return self.place(ROW_WARPS * self.plan.slots + parity)

    def told(self, parity: Any) -> Any:
        """Its flag has been raised, so that the warps may arrive for the chunk after the next."""
        return self.place(ROW_WARPS * self.plan.slots + 2 + parity)

    def initialise(self, thread: Any) -> None:
        """Set up all of them, a thread each."""
        made = ROW_WARPS * self.plan.slots
        with when(thread < self.plan.barriers):
            arrivals = _either((thread >= made) & (thread < made + 2), ROW_WARPS, 1)
            mbarrier.initialise(self.place(thread), arrivals)


def _either(condition: Any, one: int, other: int) -> Any:
    from crossfuse import _tvm as ir

    return ir.script.Select(condition, ir.script.uint32(one), ir.script.uint32(other))
