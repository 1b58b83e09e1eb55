"""The multiplying role: tile after tile of keys, scores ahead of the sums.

The scores of a tile are multiplied beside the sums of the one before it, also where that belongs
to another tile of rows: tiles of a CTA are one stream.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.pipeline import Cursor
from crossfuse.lower.hopper.statements import Variable, branches, let, run, when
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.copies import ResultStore
from crossfuse.lower.hopper.stream.multiply import Multiplier
from crossfuse.lower.hopper.stream.values import Elements, Lanes, RowState, Values, pin_sums

# Multiplying warpgroups take turns at the tensor cores, by named barriers (PTX ISA, bar).
#
# While one of them makes exponentials, another one multiplies.

#: First of the named barriers, one for each warpgroup; those before it are for meetings.
_FIRST = 8


class PingPong:
    """The turns of one warpgroup at the tensor cores; one warpgroup alone needs none."""

    def __init__(self, count: int, warpgroup: Any) -> None:
        self.count = count
        self.warpgroup = warpgroup

    def begin(self) -> None:
        """Give the first warpgroup the first turn."""
        if self.count > 1:
            with when(self.warpgroup == 0):
                self._arrive(ir.script.int32(0))

    def take(self) -> None:
        """Wait for this warpgroup's turn."""
        if self.count > 1:
            run(ir.script.ptx.bar.sync(*self._barrier(self.warpgroup)))

    def give(self) -> None:
        """Give the next warpgroup its turn."""
        if self.count > 1:
            self._arrive((self.warpgroup + 1) % self.count)

    def _arrive(self, warpgroup: Any) -> None:
        run(ir.script.ptx.bar.arrive(*self._barrier(warpgroup)))

    @staticmethod
    def _barrier(warpgroup: Any) -> tuple[Any, Any]:
        return ir.script.Cast("uint32", _FIRST + warpgroup), ir.script.uint32(2 * WARPGROUP)


class Consumer:
    """One multiplying warpgroup: scores, the state of its rows, and sums."""

    def __init__(self, body: StreamBody) -> None:
        plan = body.plan
        self.body, self.plan, self.program = body, plan, plan.program
        warpgroup = self.warpgroup = let("multiplying", body.where.warpgroup - 1)
        self.lanes = Lanes.of(body.where, warpgroup)
        self.elements = Elements(plan)
        self.multiplier = Multiplier(body, warpgroup, self.elements)
        self.rows = RowState(plan.registers.rows)
        # A tile's state is stored while the next one is begun; a part of a tile has no next one.
        self.done_rows = RowState(() if plan.mailbox is not None else plan.registers.rows, "done_")
        self.tiles = body.tiles()
        places = () if plan.mailbox is not None else self.tiles.places
        self.done = {var: Variable(f"done_{var.name}", "int32", 0) for var in places}
        self.queries, self.keys, self.values = (
            Cursor(each) for each in (body.queries, body.keys, body.values)
        )
        self._releases = {
            each: body.release(each.ring) for each in (self.queries, self.keys, self.values)
        }
        self.ping_pong = PingPong(plan.consumers, warpgroup)
        self.keep = Variable("keep", "uint32", ir.script.uint32(0))

    def emit(self) -> None:
        """Write all its tiles."""
        self.store = ResultStore(self.body, self.warpgroup, self.lanes, self.multiplier.sums)
        self.multiplier.clear()
        with when(self.tiles.is_left):
            self.ping_pong.begin()
            self.tiles.take()
            self._start_rows()
            self._begin()
            more = ir.script.Or(ir.script.Not(self.tiles.is_last_block), self.tiles.is_left)
            with ir.script.While(more):
                self._turn()
            self._end()

    def _release(self, cursor: Cursor) -> None:
        """Hand a stage back to the thread that fills it."""
        self._releases[cursor](cursor.stage)

    def _start_rows(self) -> None:
        for step in self.program.before:
            self.rows.run(step, self._at())

    def _at(self) -> Values:
        """Expressions of the current tile."""
        return self.elements.values(self.rows, self.lanes, self.tiles.values)

    def _begin(self) -> None:
        """Write the first tile of keys, without sums beside it."""
        self.queries.wait_full()
        self.keys.wait_full()
        self.multiplier.score(self.queries.stage, self.keys.stage)
        self.multiplier.wait(0)
        self.multiplier.hold_scores()
        self._scored()
        self.elements.run(self.rows, self._at())
        self.elements.pack(self._at())

    def _scored(self) -> None:
        """Release the keys, and the queries too if these were the last keys."""
        if not self.program.shares_tile:
            self._release(self.keys)
        with when(self.tiles.is_last_block):
            self._release(self.queries)
        self.keys.advance()

    def _turn(self) -> None:
        """Write the scores of one tile of keys beside the sums of the one before."""
        is_new = let("is_new", self.tiles.is_last_block)
        with branches(is_new) as (first, next_):
            with first:
                self._leave()
                self._start_rows()
                self.queries.advance()
                self.queries.wait_full()
            with next_:
                self.tiles.block.set(self.tiles.block.value + 1)
        self._multiply()
        with branches(is_new) as (first, next_):
            with first:
                self.store.store(self.done_rows, self._done_places())
                self.keep.set(ir.script.uint32(0))
            with next_:
                self._carry()
                self.keep.set(ir.script.uint32(1))

    def _multiply(self) -> None:
        """Multiply the scores of the current tile beside the sums of the one before."""
        self.keys.wait_full()
        self.ping_pong.take()
        self.multiplier.hold_sums()
        self.multiplier.score(self.queries.stage, self.keys.stage)
        self.values.wait_full()
        self.multiplier.add(self.values.stage, self.keep.value)
        self.ping_pong.give()
        self.multiplier.wait(1)
        self.multiplier.hold_scores()
        self._scored()
        self.elements.run(self.rows, self._at())
        self.multiplier.hold_scores()
        self._pin()
        self._added()
        self.elements.pack(self._at())

    def _leave(self) -> None:
        """Copy what is needed of a finished tile of rows, and go on to the next one."""
        self.done_rows.copy(self.rows)
        for var, value in self.tiles.places.items():
            self.done[var].set(value.astype("int32"))
        self.tiles.take()

    def _done_places(self) -> dict[Any, Any]:
        return {var: each.value.astype(str(var.ty)) for var, each in self.done.items()}

    def _pin(self) -> None:
        """Compute sums of weights before the wait for the second product, if they hide behind it.

        Measured on an H100: with 128 columns of values beside tiles of 128 keys this is 2 % faster,
        with 64 columns, whose product is over in half the time, 10 % slower.
        """
        if self.plan.sums < self.plan.scores:
            return
        pin_sums(self.body, self.rows)

    def _added(self) -> None:
        """Wait for the sums, and release the values."""
        self.multiplier.wait(0)
        self.multiplier.hold_sums()
        self._release(self.values)
        self.values.advance()

    def _carry(self) -> None:
        """Correct the sums before the next tile of keys is added."""
        sums, rows = self.multiplier.sums, self.rows.register
        values = Values.of_sums(self.program, self.lanes, self.tiles.values, rows, sums)
        for step in self.program.carries:
            values.store(sums, step.value, self.plan.sums)

    def _add_last(self) -> None:
        """Multiply weights and values of the last tile of keys."""
        self.values.wait_full()
        self.multiplier.add(self.values.stage, self.keep.value)
        self.multiplier.wait(0)
        self.multiplier.hold_sums()

    def _end(self) -> None:
        """Finish the last tile of rows."""
        self._add_last()
        self.done_rows.copy(self.rows)
        self.store.store(self.done_rows, self.tiles.places)
        self.store.finish()
