"""Partial states of a cluster merge: each CTA receives a slice of all of them, and merges that.

Values leave registers for the inboxes of their owners, whose barriers count the bytes. As in
`crossfuse.lower.hopper.exchange.reduction`, a CTA sends to itself, too, and states merge in the
order of ranks, so that results are the same in every run.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.statements import Variable, let, run, when
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.merge.handing import Handing
from crossfuse.lower.hopper.stream.merge.unit import Unit, with_row
from crossfuse.lower.hopper.stream.rows import RowState
from crossfuse.lower.hopper.stream.values import Lanes, Values, column_of, half_of
from crossfuse.lower.hopper.sync import mbarrier

#: Columns of a block of registers.
_BLOCK = 8


class Merger(Handing):
    """Sends what one warpgroup has to the inboxes of a cluster, and merges what it owns."""

    def __init__(self, body: StreamBody, warpgroup: Any, lanes: Lanes, sums: Any) -> None:
        super().__init__(body, warpgroup, lanes, sums)
        self.rank = body.where.rank
        self.buffer = body.region("inbox")

    def begin(self) -> None:
        """Say how many bytes will arrive."""
        left = self.inbox.all_columns - self.rank * self.inbox.columns
        width = ir.script.max(0, ir.script.min(self.inbox.columns, left))
        first = ir.script.And(self.warpgroup == 0, self.body.where.thread == 0)
        with when(first):
            mbarrier.expect(self.body.received, self.inbox.expected(width))

    def finish(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Hand the state over, and merge a slice of all states."""
        mbarrier.await_started()
        self.send(rows, places)
        self._merge(places)

    def _send_rows(self, half: int, values: Values, places: dict[Any, Any]) -> None:
        """Values of a row go to all CTAs; the four threads of a row share them."""
        made = [let(str(each.name), values.of_row(each.value, half)) for each in self.of_rows]
        made += [ir.script.float32(0)] * (2 * self.inbox.pairs - len(made))
        for first in range(0, self.inbox.size, 4):
            rank = let("to", first + self.body.where.lane % 4)
            with when(rank < self.inbox.size) if self.inbox.size % 4 else nullcontext():
                owner = _Owner(self, rank)
                for pair in range(self.inbox.pairs):
                    offset = self.inbox.of_row(self.rank, self.lanes.rows[half], pair)
                    owner.push(offset, made[2 * pair], made[2 * pair + 1])

    def _send_elements(self, half: int, values: Values, places: dict[Any, Any]) -> None:
        known: dict[int, _Owner] = {}
        width = self.inbox.columns
        for register in range(0, self.plan.sums, 2):
            if half_of(register) != half:
                continue
            first = column_of(register)
            column = self.lanes.column + first
            inside = column - first // width * width
            if width % _BLOCK:
                owner = _Owner(self, let("owner", column // width))
                inside = column % width
            else:
                rank = first // width
                owner = known[rank] if rank in known else _Owner(self, ir.script.int32(rank))
                known[rank] = owner
            both = [values.of_element(self.of_elements.value, register + each) for each in range(2)]
            owner.push(self.inbox.element(self.rank, self.lanes.rows[half], inside), *both)

    def _merge(self, places: dict[Any, Any]) -> None:
        """Merge the slices of all CTAs, a pair of columns a thread and turn."""
        mbarrier.wait_cluster(self.body.received, 0)
        across = self.inbox.columns // 2
        count = self.inbox.rows * across
        threads = self.plan.consumers * WARPGROUP
        me = let("thread_of_tile", self.warpgroup * WARPGROUP + self.body.where.thread)
        with ir.script.serial(0, -(-count // threads)) as turn:
            ir.IRBuilder.name("turn", turn)
            unit = let("unit", turn * threads + me)
            row, column = let("unit_row", unit // across), let("unit_column", unit % across * 2)
            with when(self._is_stored(unit < count, row, column, places)):
                unit_of = Unit(self.program, self.inbox, (row, column), places, self._load)
                unit_of.run(self.body.images)

    def _load(self, target: Any, first: int, offset: Any) -> None:
        load = ir.script.ptx["ld.shared.v2.f32"]
        run(load(target[first], target[first + 1], self.buffer(offset)))

    def _is_stored(self, exists: Any, row: Any, column: Any, places: dict[Any, Any]) -> Any:
        """Whether there is such a unit, inside the tensor."""
        found = with_row(exists, row, self.program, places)
        if self.inbox.size * self.inbox.columns > self.inbox.all_columns:
            inside = self.rank * self.inbox.columns + column < self.inbox.all_columns
            found = ir.script.And(found, inside)
        return found


class _Owner:
    """A CTA of the cluster: its inbox and its barrier."""

    def __init__(self, merger: Merger, rank: Any) -> None:
        inbox, barrier = Variable("inbox_of", "uint32"), Variable("received_by", "uint32")
        mbarrier.cluster_address(inbox.value, merger.buffer(0), rank)
        mbarrier.cluster_address(barrier.value, merger.body.received, rank)
        self.inbox, self.barrier = inbox.value, barrier.value

    def push(self, offset: Any, *values: Any) -> None:
        """Send values to an offset."""
        place = self.inbox + ir.script.Cast("uint32", offset)
        mbarrier.push(place, values, self.barrier)
