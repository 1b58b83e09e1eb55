"""Writes the block of outputs: results of a row, and results of every element."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import old, value
from crossfuse.cascade.rewrite.context import StreamContext, at, finished
from crossfuse.cascade.rewrite.phases import Definitions, Shared, share
from crossfuse.cascade.rewrite.residence import (
    Place,
    Residence,
    ThreadTile,
    Tile,
    each_tile,
    row_of,
)
from crossfuse.cascade.rewrite.scripting import held, loop, numbers, place_symbol, steps, when
from crossfuse.cascade.rewrite.streams import BYTES, Stream
from crossfuse.cascade.rewrite.thread_mapping import Tiling
from crossfuse.cascade.rewrite.work import item_bytes
from crossfuse.cascade.site import OutputSite


class Outputs:
    """Writes the stores of one thread, at a place: row, CTA and thread.

    `state` is the finished state of the row; `before` that of the thread before states merged,
    needed where contributions are used again.
    """

    def __init__(
        self,
        context: StreamContext,
        place: Place,
        residence: Residence,
        state: Mapping[str, Any],
        before: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.context = context
        self.place = place
        self.residence = residence
        self.rows = context.at_row(place[0])
        self.values = finished(context, context.invariants(self.rows), state)
        for slot in context.slots if before else ():
            self.values.values[old(slot.name)] = before[numbers(slot, context.dtype)[0].name]
        derived = context.derivation
        self.results = [each for each in context.site.outputs if each.name in derived.results]
        self.along = [each for each in context.site.outputs if each.name in derived.rows]

    def run(self) -> None:
        """Statements: results by one thread, then elements by all."""
        if self.results:
            _, cta, thread = self.place
            alone = thread == 0
            if self.context.mapping.cluster > 1:
                alone = ir.tirx.And(cta == 0, alone)
            with when(alone):
                for output in self.results:
                    self.result(output)
        if self.along:
            derived = self.context.derivation
            rows = [derived.rows[each.name] for each in self.along]
            parts = share(rows, self.context.moving, derived.slots)
            self.values.define(parts.fixed)
            each_tile(self.residence, lambda *tile: _Tile(self, parts, *tile).run())

    def result(self, output: OutputSite) -> None:
        """Statements: store a result of a row; one for each rank if it has columns."""
        extents = [int(self.context.site.extents[each]) for each in output.columns]
        if not extents:
            indices = [at(each, self.rows) for each in output.indices]
            ir.script.buffer_store(output.buffer, self.written(output, 0), indices)
            return
        staged = held(f"{output.name}_ranks", (extents[-1],), _dtype(output), "local")
        for number in range(extents[-1]):
            ir.script.buffer_store(staged, self.written(output, number), [number])
        # One statement, so that one thread is seen to write each element.
        with loop("rank", extents[-1], "unroll") as rank:
            indices = [at(each, {**self.rows, output.columns[-1]: rank}) for each in output.indices]
            ir.script.buffer_store(output.buffer, staged[rank], indices)

    def written(self, output: OutputSite, number: int) -> Any:
        """A result over the choice of a rank."""
        known = Definitions(self.values.values, self.context.dtype)
        for slot in self.context.slots:
            if slot.name in self.values.chosen:
                kept = self.values.chosen[slot.name]
                rank = min(number, slot.monoid.k - 1) if slot.monoid.k else 0
                known.values[value(slot.name)] = kept[rank]
                known.values[place_symbol(slot)] = kept[len(kept) // 2 + rank]
        result = self.context.derivation.results[output.name]
        # Places are whole numbers that a float32 would round.
        whole = _dtype(output) if result.is_integer and "int" in _dtype(output) else ""
        return known.write(result, whole).astype(_dtype(output))


class _Tile(ThreadTile):
    """Writes the outputs of one tile."""

    def __init__(
        self, outputs: Outputs, parts: Shared, tiling: Tiling, first: Any, number: int
    ) -> None:
        super().__init__(outputs.residence, outputs.place, tiling, first)
        self.outputs = outputs
        self.parts = parts
        self.number = number
        self.loaded = {
            each: self.buffer(each, f"again_{number}")
            for each in self.context.streams(self.context.emitted)
            if self.residence.kept(each) is None
        }
        kept = self.residence.buffers if self.residence.where == "registers" else {}
        self.copied = {each: self.buffer(each, f"packed_{number}", 1) for each in kept}

    def run(self) -> None:
        for stream, buffer in self.loaded.items():
            self.load(stream, partial(row_of, buffer))
        shape = (self.context.mapping.vector,)
        staged = {
            each.name: held(f"{each.name}_out_{self.number}", shape, _dtype(each), "local")
            for each in self.outputs.along
        }
        with self.each_step() as step:
            for stream, buffer in self.copied.items():
                self.residence.take(stream, self.at(step), buffer)
            with loop("lane", self.context.mapping.vector, "unroll") as lane:
                self.lane(step, lane, staged)
            for output in self.outputs.along:
                self.store(output, staged[output.name], step)

    def tiles(self, step: Any) -> dict[Stream, Tile]:
        place = self.at(step)
        found = {each: self.residence.element(each, place) for each in self.residence.buffers}
        found |= {each: row_of(buffer, 0) for each, buffer in self.copied.items()}
        return found | {each: row_of(buffer, step) for each, buffer in self.loaded.items()}

    def lane(self, step: Any, lane: Any, staged: Mapping[str, Any]) -> None:
        """Statements: compute the outputs of one element."""
        symbols = self.symbols(self.tiles(step), step, lane)
        for each in self.context.reused:
            symbols[each.kept] = self.residence.reused[each.slot][(*self.at(step), lane)]
        values = Definitions({**self.outputs.values.values, **symbols}, self.context.dtype)
        for output, each in zip(self.outputs.along, values.all(self.parts), strict=True):
            ir.script.buffer_store(staged[output.name], each.astype(_dtype(output)), [lane])

    def store(self, output: OutputSite, staged: Any, step: Any) -> None:
        """Statements: store a vector of outputs."""
        vector = self.context.mapping.vector
        lanes = min(vector, BYTES // item_bytes(_dtype(output)))
        with steps("part", vector // lanes, "unroll") as part:
            if lanes == 1:
                self.put(output, staged, step, part)
                return
            with loop("lane", lanes, "vectorized") as lane:
                self.put(output, staged, step, part * lanes + lane)

    def put(self, output: OutputSite, staged: Any, step: Any, number: Any) -> None:
        where = {**self.rows, self.context.site.axis: self.element(step, number)}
        indices = [at(each, where) for each in output.indices]
        ir.script.buffer_store(output.buffer, staged[number], indices)


def _dtype(output: OutputSite) -> str:
    return str(output.buffer.ty.dtype)
