"""The multiplying roles of a stream: tile after tile of keys, scores ahead of the sums.

The scores of a tile are multiplied beside the sums of the one before it, also where that belongs
to another tile of rows: tiles of a CTA are one stream.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, WARPGROUP, WARPGROUP_ROWS
from crossfuse.lower.hopper.epilogue.elements import scatter
from crossfuse.lower.hopper.pipeline import Cursor
from crossfuse.lower.hopper.plan.tiles import GROUP, GROUP_REGISTERS
from crossfuse.lower.hopper.statements import Variable, branches, let, registers, run, when
from crossfuse.lower.hopper.stream.body import Lanes, StreamBody
from crossfuse.lower.hopper.stream.copies import (
    ColumnStore,
    Multiplier,
    ResultStore,
    ScoreProduct,
    SumProduct,
)
from crossfuse.lower.hopper.stream.plan.memory import BOX, BOX_KEYS
from crossfuse.lower.hopper.stream.values import Elements, RowState, Values, pin_sums
from crossfuse.lower.hopper.wgmma import await_batches

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
        asked = self.elements.ask(self._at())
        self.tiles.look_ahead()
        self.queries.wait_full()
        self.keys.wait_full()
        self.multiplier.score(self.queries.stage, self.keys.stage)
        await_batches(0)
        self.multiplier.hold_scores()
        self._scored()
        self.elements.run(self.rows, asked)
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
                self.tiles.step()
        self._multiply()
        with branches(is_new) as (first, next_):
            with first:
                done = {var: each.value.astype(str(var.ty)) for var, each in self.done.items()}
                self.store.store(self.done_rows, done)
                self.keep.set(ir.script.uint32(0))
            with next_:
                self._carry()
                self.keep.set(ir.script.uint32(1))

    def _multiply(self) -> None:
        """Multiply the scores of the current tile beside the sums of the one before."""
        asked = self.elements.ask(self._at())
        self.tiles.look_ahead()
        self.keys.wait_full()
        self.ping_pong.take()
        self.multiplier.hold_sums()
        self.multiplier.score(self.queries.stage, self.keys.stage)
        self.values.wait_full()
        self.multiplier.add(self.values.stage, self.keep.value)
        self.ping_pong.give()
        await_batches(1)
        self.multiplier.hold_scores()
        self._scored()
        self.elements.run(self.rows, asked)
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
        await_batches(0)
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
        await_batches(0)
        self.multiplier.hold_sums()

    def _end(self) -> None:
        """Finish the last tile of rows."""
        self._add_last()
        self.done_rows.copy(self.rows)
        self.store.store(self.done_rows, self.tiles.places)
        self.store.finish()


# Roles where warpgroups share the columns of 64 rows: one scores, the others add.

# Weights and values of rows pass from one warpgroup to others, by shared memory and two barriers.
#
# One named barrier (PTX ISA, bar) tells those who add that weights are there, the other one tells
# who scores that they have been read.

#: Named barriers behind those of meetings: weights are there, and they have been read.
_THERE, _READ = 8, 9


class Handoff:
    """Weights and values of rows in shared memory, between the scoring role and the adding ones."""

    def __init__(self, body: StreamBody) -> None:
        plan = body.plan
        assert plan.handoff is not None
        self.body, self.layout = body, plan.handoff
        self._threads = ir.script.uint32(WARPGROUP * (1 + plan.adders))
        count = max(1, len(self._buffers)) * WARPGROUP_ROWS
        start = plan.arena["passed"].offset + self.layout.of_rows
        self._rows = body.memory.view("passed_rows", "float32", count, start)

    @property
    def _buffers(self) -> tuple[Any, ...]:
        return (*self.layout.carried, *self.layout.finished)

    def await_read(self) -> None:
        """Wait, as the scoring role, until what it handed over before has been read."""
        run(ir.script.ptx.bar.sync(ir.script.uint32(_READ), self._threads))

    def hand_over(self) -> None:
        """Say, as the scoring role, that weights are there, also for wgmma."""
        run(ir.script.ptx.fence.proxy.async_.shared__cta())
        run(ir.script.ptx.bar.arrive(ir.script.uint32(_THERE), self._threads))

    def say_read(self) -> None:
        """Say, as an adding role, that it has read everything, or begins."""
        run(ir.script.ptx.bar.arrive(ir.script.uint32(_READ), self._threads))

    def await_there(self) -> None:
        """Wait, as an adding role, for weights."""
        run(ir.script.ptx.bar.sync(ir.script.uint32(_THERE), self._threads))

    def put_weights(self, words: Any) -> None:
        """Store the weights of a tile, as wgmma takes a left operand from shared memory."""
        region = self.body.memory.region("passed")
        for part in range(self.body.plan.program.tile[1] // GROUP):
            box, column = divmod(part * GROUP, BOX_KEYS)

            def address(inside: Any, box: int = box) -> Any:
                return region(box * BOX + inside)

            first = part * GROUP_REGISTERS
            matrices = [words[first + each] for each in range(GROUP_REGISTERS)]
            scatter(self.body.where, matrices, ROW_BYTES, column, address)

    def put_rows(self, rows: RowState, lanes: Lanes, buffers: tuple[Any, ...]) -> None:
        """Store values of rows; one of the four threads of a row does."""
        with when(self.body.where.lane % 4 == 0):
            for buffer in buffers:
                for half in range(2):
                    value = rows.register(buffer, half)
                    ir.script.buffer_store(self._rows, value, [self._place(buffer, lanes, half)])

    def take_rows(self, lanes: Lanes, buffers: tuple[Any, ...]) -> dict[Any, Any]:
        """Load values of rows into registers."""
        found = {}
        for buffer in buffers:
            found[buffer] = registers(str(buffer.name), 2, "float32")
            for half in range(2):
                value = self._rows[self._place(buffer, lanes, half)]
                ir.script.buffer_store(found[buffer], value, [half])
        return found

    def _place(self, buffer: Any, lanes: Lanes, half: int) -> Any:
        number = next(n for n, each in enumerate(self._buffers) if each.same_as(buffer))
        return number * WARPGROUP_ROWS + lanes.rows[half]


_ANY = """\
__device__ __forceinline__ bool crossfuse_any(bool found) {
  return __any_sync(0xffffffffu, found);
}
"""


class Scorer:
    """The warpgroup that makes weights of scores, and has the state of the rows."""

    def __init__(self, body: StreamBody) -> None:
        self.body, self.plan, self.program = body, body.plan, body.plan.program
        self.lanes = Lanes.of(body.where, ir.script.int32(0))
        self.elements = Elements(self.plan)
        self.product = ScoreProduct(body, 0, self.elements)
        self.rows = RowState(self.plan.registers.rows)
        self.tiles = body.tiles()
        self.queries, self.keys = Cursor(body.queries), Cursor(body.keys)
        self._release = body.release(body.keys)
        self.handoff = Handoff(body)

    def emit(self) -> None:
        """Write all its tiles."""
        with self.tiles.all():
            for step in self.program.before:
                self.rows.run(step, self._at())
            self.queries.wait_full()
            with self.tiles.blocks():
                self._tile()
            self.queries.advance()

    def _at(self) -> Values:
        """Expressions of the current tile."""
        return self.elements.values(self.rows, self.lanes, self.tiles.values)

    def _tile(self) -> None:
        """Write the scores of a tile of keys, their weights, and all that is made of rows."""
        asked = self.elements.ask(self._at())
        self.tiles.look_ahead()
        self.keys.wait_full()
        self.product.score(self.queries.stage, self.keys.stage)
        await_batches(0)
        self.product.hold_scores()
        if not self.program.shares_tile:
            self._release(self.keys.stage)
        self.keys.advance()
        self.elements.run(self.rows, asked)
        pin_sums(self.body, self.rows)
        self.elements.pack(self._at())
        self.handoff.await_read()
        self.handoff.put_weights(self.elements.words)
        self.handoff.put_rows(self.rows, self.lanes, self.handoff.layout.carried)
        with when(self.tiles.is_last_block):
            self._finish()
        self.handoff.hand_over()

    def _finish(self) -> None:
        """Hand over the values of rows that results are made of."""
        for buffer in self.plan.registers.deferred:
            self.rows.gather(buffer)
        for step in self.program.after:
            self.rows.run(step, self._at())
        self.handoff.put_rows(self.rows, self.lanes, self.handoff.layout.finished)


class Adder:
    """One of the warpgroups that share the columns of the sums."""

    def __init__(self, body: StreamBody) -> None:
        self.body, self.plan, self.program = body, body.plan, body.plan.program
        group = let("group", body.where.warpgroup - 2)
        lanes = Lanes.of(body.where, ir.script.int32(0))
        column = let("group_column", group * self.plan.columns + lanes.column)
        self.lanes = replace(lanes, column=column)
        self.product = SumProduct(body, group)
        self.store = ColumnStore(body, group, self.lanes, self.product.sums)
        self.tiles = body.tiles()
        self.queries, self.values = Cursor(body.queries), Cursor(body.values)
        self._release, self._release_queries = map(body.release, (body.values, body.queries))
        self.keep = Variable("keep", "uint32", ir.script.uint32(0))
        self.handoff = Handoff(body)

    def emit(self) -> None:
        """Write all its tiles."""
        self.product.clear()
        with self.tiles.all():
            self.keep.set(ir.script.uint32(0))
            with self.tiles.blocks():
                self._tile()
            self._leave()

    def _tile(self) -> None:
        """Add a tile of keys."""
        self.handoff.say_read()
        self.tiles.look_ahead()
        self.handoff.await_there()
        if self.program.carries:
            with when(self.keep.value != ir.script.uint32(0)):
                self._carry()
        self.values.wait_full()
        self.product.add(self.values.stage, self.keep.value)
        self._release(self.values.stage)
        self.values.advance()
        self.keep.set(ir.script.uint32(1))

    def _with_rows(self, buffers: tuple[Any, ...]) -> Values:
        """Expressions of sums, and of values of rows that were handed over."""
        held = self.handoff.take_rows(self.lanes, buffers)

        def row(buffer: Any, half: int) -> Any:
            return held[buffer][half] if buffer in held else None

        places, sums = self.tiles.values, self.product.sums
        return Values.of_sums(self.program, self.lanes, places, row, sums)

    def _carry(self) -> None:
        """Correct the sums before a tile is added."""
        carried = self.handoff.layout.carried
        values = self._with_rows(carried)
        scaled = all(_is_scaled(each.value, self.program.sums) for each in self.program.carries)
        with when(_is_any_not_one(values, carried)) if scaled else nullcontext():
            for step in self.program.carries:
                values.store(self.product.sums, step.value, self.plan.sums)

    def _leave(self) -> None:
        """Store the results of a tile of rows, and make room for its next queries."""
        values = self._with_rows(self.handoff.layout.finished)
        self.store.leave(values, self.tiles.places)
        self.store.finish()
        self._release_queries(self.queries.stage)
        self.queries.advance()


def _is_scaled(value: Any, sums: Any) -> bool:
    """Whether sums are multiplied by a value of their row: a factor of 1 changes nothing then."""
    if not isinstance(value, ir.tirx.Mul):
        return False
    both = (value.a, value.b)
    return all(isinstance(each, ir.TensorLoad) for each in both) and any(
        each.source.same_as(sums) for each in both
    )


def _is_any_not_one(values: Values, buffers: tuple[Any, ...]) -> Any:
    """Whether some row of the warp has another factor than 1.

    Maxima seldom grow behind the first tiles. All lanes go the same way, as wgmma behind it asks.
    """
    one = ir.script.float32(1)
    differs = [values.rows(each, half) != one for each in buffers for half in range(2)]
    return ir.cuda_func_call(
        "crossfuse_any", reduce(ir.script.Or, differs), source_code=_ANY, return_type="bool"
    )
