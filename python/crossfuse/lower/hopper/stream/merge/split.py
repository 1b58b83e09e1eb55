"""The multiplying role where CTAs share the keys of a tile of rows."""

from __future__ import annotations

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import when
from crossfuse.lower.hopper.stream.consumer import Consumer
from crossfuse.lower.hopper.stream.merge.cluster import Merger
from crossfuse.lower.hopper.stream.merge.states import StateWriter


class SplitConsumer(Consumer):
    """One multiplying warpgroup of a CTA that has a part of the keys, or none of them."""

    def emit(self) -> None:
        """Write its part, and hand the state over; in a cluster merge a slice of all states."""
        kind = Merger if self.plan.receives else StateWriter
        handing = kind(self.body, self.warpgroup, self.lanes, self.multiplier.sums)
        handing.begin()
        # The state of no keys, if there are none.
        self.multiplier.clear()
        self.tiles.take()
        self._start_rows()
        with when(self.tiles.has_block):
            self.turns.begin()
            self._begin()
            with ir.script.While(ir.script.Not(self.tiles.is_last_block)):
                self.tiles.block.set(self.tiles.block.value + 1)
                self._multiply()
                self._carry()
                self.keep.set(ir.script.uint32(1))
            self._add_last()
        handing.finish(self.rows, self.tiles.places)
