"""From the sums of a tile to what is stored of its rows, all in registers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.fast_math import fast, fast_tanh
from crossfuse.lower.hopper.reduced.program import Best, Output, RowReductions
from crossfuse.lower.hopper.reduced.select import QUAD, Selected
from crossfuse.lower.hopper.statements import let, when
from crossfuse.lower.hopper.stream.program.affine import ranges
from crossfuse.lower.hopper.stream.program.parts import Kind
from crossfuse.lower.hopper.stream.rows import RowState
from crossfuse.lower.hopper.stream.values import Lanes, Values
from crossfuse.lower.hopper.sync.flags import FlagWriter
from crossfuse.lower.hopper.warmup import Warmup


class RowEpilogue:
    """The row reductions of one multiplying warpgroup.

    Parameters
    ----------
    program : RowReductions
        What to compute.
    where : Coordinates
        Of this thread.
    warpgroup : Any
        Index of the multiplying warpgroup.
    accumulators : Any
        Its registers.
    warmup : Warmup
        In which nothing is stored.
    """

    def __init__(
        self,
        program: RowReductions,
        where: Coordinates,
        warpgroup: Any,
        accumulators: Any,
        warmup: Warmup,
    ) -> None:
        # Outputs may be float32: they are made by exact functions, once for each of them.
        self.program = program.mapped(lambda value: fast(fast_tanh(value)))
        self.accumulators = accumulators
        self.warmup = warmup
        self.lanes = Lanes.of(where, warpgroup)
        self.quarter = let("quarter", where.lane % QUAD)
        self.rows = RowState(program.rows)
        self.best = {each.target: Selected(each) for each in program.best}

    def ahead(self, values: Mapping[Any, Any]) -> None:
        """Nothing is read besides the sums before these are there."""

    def finish(self) -> None:
        """Nothing is still being stored."""

    def store(self, places: Mapping[Any, Any], writer: FlagWriter | None = None) -> None:
        """Reduce and store the tile at the place that `places` tell."""
        assert writer is None, "a kernel of row reductions has one phase"
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
        """Four neighbours of a row are stored by the four threads that have the row."""
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
