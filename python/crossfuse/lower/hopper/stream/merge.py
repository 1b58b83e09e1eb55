"""Partial states of a cluster merge: each CTA receives a slice of all of them, and merges that.

Values leave registers for the inboxes of their owners, whose barriers count the bytes. As in
`crossfuse.lower.hopper.exchange`, a CTA sends to itself, too, and states merge in the order of
ranks, so that results are the same in every run.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.plan import WARPGROUP
from crossfuse.lower.hopper.statements import Variable, let, registers, run, when
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.program import Kind, Step
from crossfuse.lower.hopper.stream.rows import RowState
from crossfuse.lower.hopper.stream.values import Lanes, Values, column_of, half_of

#: Rows between both rows of a thread, and columns of a block of registers.
_HALF, _BLOCK = 8, 8


class Merger:
    """Sends what one warpgroup has, and merges what it owns.

    Parameters
    ----------
    body : StreamBody
        The kernel.
    warpgroup : Any
        Index of the multiplying warpgroup.
    lanes : Lanes
        Where its registers are.
    sums : Any
        Registers of the second product.
    """

    def __init__(self, body: StreamBody, warpgroup: Any, lanes: Lanes, sums: Any) -> None:
        self.body, self.plan, self.program = body, body.plan, body.plan.program
        assert self.plan.inbox is not None and self.program.split is not None
        self.inbox, self.split = self.plan.inbox, self.program.split
        self.warpgroup, self.lanes, self.sums = warpgroup, lanes, sums
        self.rank = body.where.rank
        self.buffer = body.region("inbox")

    def announce(self) -> None:
        """Say how many bytes will arrive."""
        left = self.inbox.all_columns - self.rank * self.inbox.columns
        width = ir.script.max(0, ir.script.min(self.inbox.columns, left))
        first = ir.script.And(self.warpgroup == 0, self.body.where.thread == 0)
        with when(first):
            mbarrier.expect(self.body.received, self.inbox.expected(width))

    def send(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Hand the state over."""
        for buffer in self.plan.registers.deferred:
            rows.gather(buffer)

        def element(buffer: Any, register: int) -> Any:
            assert buffer.same_as(self.program.sums), buffer
            return self.sums[register]

        values = Values(self.program, self.lanes, places, rows.register, element)
        for half in range(2):
            if self.plan.consumers == 1 and half * _HALF >= self.inbox.rows:
                continue
            with when(self.lanes.rows[half] < self.inbox.rows):
                self._send_rows(half, values)
                self._send_elements(half, values)

    def _send_rows(self, half: int, values: Values) -> None:
        """Values of a row go to all CTAs; the four threads of a row share them."""
        steps = [each for each in self.split.slabs if each.kind is Kind.ROW]
        made = [let(str(each.name), values.of_row(each.value, half)) for each in steps]
        made += [ir.script.float32(0)] * (2 * self.inbox.pairs - len(made))
        for first in range(0, self.inbox.size, 4):
            rank = let("to", first + self.body.where.lane % 4)
            with when(rank < self.inbox.size) if self.inbox.size % 4 else nullcontext():
                owner = _Owner(self, rank)
                for pair in range(self.inbox.pairs):
                    offset = self.inbox.of_row(self.rank, self.lanes.rows[half], pair)
                    owner.push(offset, made[2 * pair], made[2 * pair + 1])

    def _send_elements(self, half: int, values: Values) -> None:
        (step,) = (each for each in self.split.slabs if each.kind is not Kind.ROW)
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
            both = [values.of_element(step.value, register + each) for each in range(2)]
            owner.push(self.inbox.element(self.rank, self.lanes.rows[half], inside), *both)

    def merge(self, places: dict[Any, Any]) -> None:
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
                _Unit(self, row, column, places).run()

    def _is_stored(self, exists: Any, row: Any, column: Any, places: dict[Any, Any]) -> Any:
        """Whether there is such a unit, inside the tensor."""
        box = self.program.output
        found = exists
        if box.shape[box.axis] % self.inbox.rows:
            found = ir.script.And(
                found, at(box.origin[box.axis], places) + row < box.shape[box.axis]
            )
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


class _Unit:
    """Two neighbouring columns of a row, merged by one thread."""

    def __init__(self, merger: Merger, row: Any, column: Any, places: dict[Any, Any]) -> None:
        self.merger, self.row, self.column, self.places = merger, row, column, places
        self.inbox, self.split = merger.inbox, merger.split
        program = merger.program
        steps = (*self.split.before, *self.split.steps, *program.after)
        self._registers: dict[Any, Any] = {}
        for each in steps:
            if each.target not in self._registers:
                count = 1 if each.kind is Kind.ROW else 2
                self._registers[each.target] = registers(str(each.target.name), count, "float32")
        self._slabs = {
            each: registers(str(each.name), 2, "float32")
            for each in (*self.inbox.of_rows[::2], self.inbox.of_elements)
        }
        lanes = Lanes((row, row), column, merger.lanes.base)
        self.values = Values(program, lanes, places, self._of_row, self._of_element)

    def _of_row(self, buffer: Any, half: int) -> Any:
        for number, each in enumerate(self.inbox.of_rows):
            if each.same_as(buffer):
                first = self.inbox.of_rows[number - number % 2]
                return self._slabs[first][number % 2]
        found = self._registers.get(buffer)
        return None if found is None or len(found.ty.shape) != 1 or _is_pair(found) else found[0]

    def _of_element(self, buffer: Any, register: int) -> Any:
        held = self._slabs if buffer.same_as(self.inbox.of_elements) else self._registers
        return held[buffer][register]

    def run(self) -> None:
        """Write everything about it."""
        self._steps(self.split.before)
        for slot in range(self.inbox.size):
            self._load(slot)
            self._steps(self.split.steps)
        self._steps(self.merger.program.after)
        self._store()

    def _steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            target = self._registers[step.target]
            if step.kind is Kind.ROW:
                ir.script.buffer_store(target, self.values.of_row(step.value, 0), [0])
                continue
            for register in range(2):
                value = self.values.of_element(step.value, register)
                ir.script.buffer_store(target, value, [register])

    def _load(self, slot: int) -> None:
        """What a CTA has handed over."""
        load = ir.script.ptx["ld.shared.v2.f32"]
        places = [
            (first, self.inbox.of_row(slot, self.row, pair))
            for pair, first in enumerate(self.inbox.of_rows[::2])
        ]
        places.append((self.inbox.of_elements, self.inbox.element(slot, self.row, self.column)))
        for slab, offset in places:
            target = self._slabs[slab]
            run(load(target[0], target[1], self.merger.buffer(offset)))

    def _store(self) -> None:
        box = self.merger.program.output
        image = self.merger.body.images[box.buffer]
        first = [at(each, self.places) for each in box.origin]
        for register in range(2):
            indices = list(first)
            indices[box.axis] = indices[box.axis] + self.row
            indices[-1] = indices[-1] + self.column + register
            value = self.values.of_element(self.merger.program.result, register)
            ir.script.buffer_store(image, value, indices)


def _is_pair(buffer: Any) -> bool:
    return int(buffer.ty.shape[0]) == 2
