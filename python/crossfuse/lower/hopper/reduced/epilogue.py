"""From the sums of a tile to what is stored of its rows, all in registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.epilogue.elements import fast, fast_tanh
from crossfuse.lower.hopper.features.feature import ConsumerPart, Ending, Feature, TileSums
from crossfuse.lower.hopper.reduced.recover import NOWHERE
from crossfuse.lower.hopper.statements import Variable, Warmup, at, let, registers, when
from crossfuse.lower.hopper.stream.lanes import Lanes
from crossfuse.lower.hopper.stream.program import Best, Kind, Output, RowReductions, ranges
from crossfuse.lower.hopper.stream.values import RowState, Values, shuffled

# The best elements of rows by repeated selection: the four threads of a row find each together.

#: Threads of a warp that share a row.
QUAD = 4
#: Most registers of a tile with which a thread goes through both of its rows side by side.
_SIDE_BY_SIDE = 64


class Selected:
    """Registers of the best elements of a thread's rows: of each four ranks a thread has one."""

    def __init__(self, step: Best) -> None:
        self.step = step
        self.groups = -(-step.count // QUAD)
        name = step.target.name
        self.values = registers(f"best_{name}", 2 * self.groups, "float32")
        self.places = registers(f"places_{name}", 2 * self.groups, "int32")

    def register(self, buffer: Any, half: int, group: int) -> Any:
        """The register of this thread's rank of a group of four; None for another buffer."""
        for mine, found in ((self.step.target, self.values), (self.step.places, self.places)):
            if buffer.same_as(mine):
                return found[half * self.groups + group]
        return None

    def run(self, values: Values, count: int, quarter: Any, warmup: Warmup) -> None:
        """Select from a tile of which a thread has `count` registers.

        The loop over ranks stays one: its code is fetched once.
        """
        together = [(0, 1)] if count <= _SIDE_BY_SIDE else [(0,), (1,)]
        for halves in together:
            rows = [_Row(self.step, values, count, half) for half in halves]
            with ir.script.serial(0, warmup.turns(self.step.count)) as rank:
                ir.IRBuilder.name("rank", rank)
                for row in rows:
                    row.find()
                    self._keep(row, rank, quarter)
                    row.take_out()

    def _keep(self, row: _Row, rank: Any, quarter: Any) -> None:
        """Store what has been found in the thread whose rank it is."""
        for group in range(self.groups):
            mine = ir.tirx.EQ(rank, quarter + group * QUAD)
            at = row.half * self.groups + group
            for kept, found in ((self.values, row.best), (self.places, row.place)):
                ir.script.buffer_store(kept, ir.script.Select(mine, found.value, kept[at]), [at])


class _Row:
    """One row of a thread: its elements that have not been selected yet."""

    def __init__(self, step: Best, values: Values, count: int, half: int) -> None:
        self.half = half
        self.column = values.lanes.column
        own = [each for each in range(count) if values.lanes.layout.row(each) == half]
        self.columns = [values.lanes.layout.column(each) for each in own]
        self.left = registers("left", len(own), "float32")
        for number, register in enumerate(own):
            element = values.of_element(step.value, register)
            ir.script.buffer_store(self.left, element, [number])
        self.best = Variable("best", "float32")
        self.place = Variable("place", "int32")

    def find(self) -> None:
        """Find the largest element of the row, the first of equal ones.

        A thread goes through its elements from the last one, so that an earlier one wins a tie.
        """
        self.best.set(ir.script.float32(-math.inf))
        self.place.set(NOWHERE - self.column)
        for number in reversed(range(len(self.columns))):
            element = self.left[number]
            ahead = let("ahead", element >= self.best.value)
            place = ir.tirx.IntImm("int32", self.columns[number])
            self.place.set(ir.script.Select(ahead, place, self.place.value))
            # No maximum waits for a comparison, and none takes what is no number.
            self.best.set(ir.script.max(element, self.best.value))
        self.place.set(self.place.value + self.column)
        for distance in (1, 2):
            best = let("other", shuffled(self.best.value, distance))
            place = let("other_place", shuffled(self.place.value, distance))
            first = ir.tirx.And(ir.tirx.EQ(best, self.best.value), place < self.place.value)
            ahead = let("ahead", ir.tirx.Or(best > self.best.value, first))
            self.place.set(ir.script.Select(ahead, place, self.place.value))
            self.best.set(ir.script.Select(ahead, best, self.best.value))

    def take_out(self) -> None:
        """Replace what has been found by NaN, which no comparison finds again."""
        place = let("own_place", self.place.value - self.column)
        nothing = ir.script.float32(math.nan)
        for number, column in enumerate(self.columns):
            is_found = ir.tirx.EQ(place, ir.tirx.IntImm("int32", column))
            element = ir.script.Select(is_found, nothing, self.left[number])
            ir.script.buffer_store(self.left, element, [number])


class RowEpilogue(Ending):
    """The epilogue that reduces rows, for one multiplying warpgroup.

    It takes the place of the epilogue that stores the tile. In the warm-up nothing is stored.
    """

    def __init__(self, sums: TileSums, program: RowReductions) -> None:
        super().__init__(sums)
        assert sums.writer is None, "a kernel of row reductions has one phase"
        # Outputs may be float32: they are made by exact functions, once for each of them.
        self.program = program.mapped(lambda value: fast(fast_tanh(value)))
        self.lanes = Lanes.of(self.where, self.warpgroup)
        self.quarter = let("quarter", self.where.lane % QUAD)
        self.rows = RowState(program.rows)
        self.best = {each.target: Selected(each) for each in program.best}

    def end(self, places: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
        """Reduce and store the tile at the coordinates of `places`."""
        self.leave(leave)
        values = Values(self.program, self.lanes, dict(places), self.rows.register, self._element)
        for step in self.program.before:
            self.rows.run(step, values)
        for step in self.program.steps:
            if isinstance(step, Best):
                self.best[step.target].run(
                    values, self.program.tile[1] // 2, self.quarter, self.warmup
                )
            elif step.kind is Kind.ROW:
                self.rows.run(step, values)
            else:
                self.rows.reduce(step, values, self.program.tile[1] // 2, deferred=False)
        for step in self.program.after:
            self.rows.run(step, values)
        for output in self.program.outputs:
            self._store(output, dict(places))

    def _element(self, buffer: Any, register: int) -> Any:
        assert buffer.same_as(self.program.scores), buffer
        return self.accumulators[register]

    def _store(self, output: Output, places: dict[Any, Any]) -> None:
        """Store an output: four neighbours of a row by the four threads that share the row."""
        for first in range(0, output.box.columns, QUAD):
            for half in range(2):
                ranked = partial(self._ranked, half, first // QUAD)
                values = Values(self.program, self.lanes, places, self.rows.register, ranked)
                column = self.quarter + first
                with when(ir.conjunction(self._conditions(output, places, half, first))):
                    value = values.of_column(output.value, half, column)
                    where = self._place(output, places, half, column)
                    ir.script.buffer_store(output.box.buffer, value, where)

    def _ranked(self, half: int, group: int, buffer: Any, _register: int) -> Any:
        """The register of the rank that this thread has of four."""
        for each in self.best.values():
            found = each.register(buffer, half, group)
            if found is not None:
                return found
        raise AssertionError(buffer)

    def _place(self, output: Output, places: dict[Any, Any], half: int, column: Any) -> list[Any]:
        box = output.box
        origin = [at(each, places) for each in box.origin]
        origin[box.axis] = origin[box.axis] + self.lanes.rows[half]
        origin[-1] = origin[-1] + column
        return origin

    def _conditions(
        self, output: Output, places: dict[Any, Any], half: int, first: int
    ) -> list[Any]:
        box = output.box
        conditions = self.warmup.conditions()
        if first + QUAD > box.columns:
            conditions.append(self.quarter < box.columns - first)
        rows = box.shape[box.axis]
        last = box.origin[box.axis] + (box.rows - 1)
        if not ranges(self.program).can_prove(last < rows):
            conditions.append(self._place(output, places, half, 0)[box.axis] < rows)
        return conditions


class _Part(ConsumerPart):
    def ending(self, sums: TileSums) -> Ending | None:
        """The reductions of a phase's rows."""
        reduced = sums.phase.program.reduced
        return None if reduced is None else RowEpilogue(sums, reduced)


class RowsReduced(Feature):
    """Rows of the sums are reduced, and what they are reduced to is stored in place of them."""

    asked_by = "reduced"
    part = _Part
    reads_early = True
