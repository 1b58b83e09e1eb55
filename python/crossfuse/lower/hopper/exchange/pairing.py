"""Two products of one tile, made by two CTAs, whose halves pass through DSM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.exchange.reduction import ExchangeBarriers, SplitReduction
from crossfuse.lower.hopper.finish.epilogue import publish_elements
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import let, run, when
from crossfuse.lower.hopper.sync import mbarrier
from crossfuse.lower.hopper.sync.flags import FlagWriter
from crossfuse.lower.hopper.warmup import Warmup


class Pairing(SplitReduction):
    """Push-and-multiply of one warpgroup's accumulators.

    As a split reduction, but what is received of both CTAs stays apart for the epilogue::

        before                 push                      after
        CTA 0: gate0 gate1     CTA 0 <-- gate0, up0      CTA 0: silu(gate0) * up0
        CTA 1: up0   up1       CTA 1 <-- gate1, up1      CTA 1: silu(gate1) * up1

    The receive buffer has a place of its own: right tiles of the next phase are loaded meanwhile.
    So whoever has multiplied sends at once.

    Parameters
    ----------
    plan : PhasePlan
        The phase.
    where : Coordinates
        Of this thread.
    warpgroup : Any
        Index of the multiplying warpgroup.
    buffer : Any
        Function from a byte offset to an address in the receive buffer.
    received : Any
        Address of the barrier that both CTAs' halves complete.
    warmup : Warmup
        In which nothing is sent, awaited or stored.
    note : Callable
        Notes an event, see `timeline`.
    writer : FlagWriter | None
        Tells others that a tile is stored.
    """

    def __init__(
        self,
        plan: PhasePlan,
        where: Coordinates,
        warpgroup: Any,
        buffer: Any,
        received: Any,
        warmup: Warmup,
        note: Callable[[str], None],
        writer: FlagWriter | None,
    ) -> None:
        barriers = ExchangeBarriers(None, received)
        super().__init__(plan, where, warpgroup, buffer, barriers, warmup, note)
        self.writer = writer

    def expect(self) -> None:
        """Say what both CTAs will send; some of it may have arrived before."""
        with when(ir.script.And(self.warpgroup == 0, self.where.thread == 0)):
            mbarrier.expect(self.barriers.received, self.size * self.plan.slice_bytes)

    def _announce(self) -> None:
        """Nobody has to wait: nothing else is in the buffer."""

    def combine(
        self, accumulators: Any, values: Mapping[Any, Any], leave: Callable[[], None] | None
    ) -> None:
        """Exchange halves, make and store this CTA's half, and raise the flag of the tile."""
        super().combine(accumulators, values, leave)
        if self.writer is not None:
            origin = self.plan.program.store.tile.origin
            row, column = (let("first", at(each, dict(values))) for each in origin)
            # What each thread stored is to be read by TMA.
            run(ir.script.ptx.fence.proxy.async_.global_())
            publish_elements(self.writer, self.where, self.warpgroup, (row, column), self.warmup)

    def _add(self, unit: Any, total: Any, received: Any) -> tuple[Any, ...]:
        """Both products of a unit."""
        for slot, target in enumerate((total, received)):
            self._load(slot, unit, target)
        return total, received
