"""The multiplying role where CTAs of a cluster share the keys of a tile of rows."""

from __future__ import annotations

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.statements import when
from crossfuse.lower.hopper.stream.consumer import Consumer
from crossfuse.lower.hopper.stream.merge import Merger


class SplitConsumer(Consumer):
    """One multiplying warpgroup of a CTA that has a part of the keys, or none of them."""

    def emit(self) -> None:
        """Write its part, hand the state over, and merge a slice of all states."""
        merger = Merger(self.body, self.warpgroup, self.lanes, self.multiplier.sums)
        merger.announce()
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
        mbarrier.await_started()
        merger.send(self.rows, self.tiles.places)
        merger.merge(self.tiles.places)
