"""Writes the block of outputs: results of a row, and results of every element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import old, value
from crossfuse.cascade.rewrite.context import StreamContext, at, finished, row_of, tile_of
from crossfuse.cascade.rewrite.phases import Definitions, Shared, share
from crossfuse.cascade.rewrite.residence import Residence, load
from crossfuse.cascade.rewrite.scripting import held, loop, numbers, place_symbol, steps, when
from crossfuse.cascade.rewrite.segments import Place
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
            for number, tiling in enumerate(self.context.mapping.tilings):
                kind = "unroll" if self.residence.where == "registers" else "serial"
                with steps(f"tile_{number}", tiling.count, kind) as tile:
                    first = tiling.first + tile * tiling.steps
                    _Tile(self, tiling, first, f"{number}", parts).run()

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


class _Tile:
    """Writes the outputs of one tile."""

    def __init__(
        self, outputs: Outputs, tiling: Tiling, first: Any, suffix: str, parts: Shared
    ) -> None:
        self.outputs = outputs
        self.context = outputs.context
        self.tiling = tiling
        self.first = first
        self.suffix = suffix
        self.parts = parts
        self.loaded: dict[Stream, Any] = {}
        for stream in self.context.streams(self.context.emitted):
            if outputs.residence.kept(stream) is None:
                name = f"{stream.name}_again_{suffix}"
                self.loaded[stream] = tile_of(stream, self.context, tiling.steps, name)
        residence = outputs.residence
        kept = residence.buffers if residence.where == "registers" else {}
        self.copied = {
            each: tile_of(each, self.context, 1, f"{each.name}_packed_{suffix}") for each in kept
        }

    def run(self) -> None:
        for stream, buffer in self.loaded.items():
            with loop("step", self.tiling.steps, "unroll") as step, when(self.inside(step)):
                place = (*self.outputs.place, self.first + step)
                load(self.context, stream, place, row_of(buffer, step))
        staged = {
            output.name: held(
                f"{output.name}_out_{self.suffix}",
                (self.context.mapping.vector,),
                _dtype(output),
                "local",
            )
            for output in self.outputs.along
        }
        with loop("step", self.tiling.steps, "unroll") as step, when(self.inside(step)):
            place = (*self.outputs.place, self.first + step)
            for stream, buffer in self.copied.items():
                self.outputs.residence.take(stream, place, buffer)
            with loop("lane", self.context.mapping.vector, "unroll") as lane:
                self.lane(step, lane, staged)
            for output in self.outputs.along:
                self.store(output, staged[output.name], step)

    def inside(self, step: Any) -> Any:
        return self.context.mapping.inside(self.tiling, self.outputs.place, self.first, step)

    def tiles(self, step: Any) -> dict[Stream, Callable[[Any], Any]]:
        residence = self.outputs.residence
        place = (*self.outputs.place, self.first + step)
        found = {each: residence.element(each, place) for each in residence.buffers}
        found |= {each: row_of(buffer, 0) for each, buffer in self.copied.items()}
        return found | {each: row_of(buffer, step) for each, buffer in self.loaded.items()}

    def lane(self, step: Any, lane: Any, staged: Mapping[str, Any]) -> None:
        """Statements: compute the outputs of one element."""
        _, cta, thread = self.outputs.place
        element = self.context.mapping.element(cta, thread, self.first + step, lane)
        where = {**self.outputs.rows, self.context.site.axis: element}
        symbols = self.context.symbols(where, self.tiles(step), lane)
        for each in self.context.reused:
            kept = self.outputs.residence.reused[each.slot]
            symbols[each.kept] = kept[(*self.outputs.place, self.first + step, lane)]
        values = Definitions({**self.outputs.values.values, **symbols}, self.context.dtype)
        for output, each in zip(self.outputs.along, values.all(self.parts), strict=True):
            ir.script.buffer_store(staged[output.name], each.astype(_dtype(output)), [lane])

    def store(self, output: OutputSite, staged: Any, step: Any) -> None:
        """Statements: store a vector of outputs."""
        mapping = self.context.mapping
        _, cta, thread = self.outputs.place
        size = item_bytes(_dtype(output))
        lanes = min(mapping.vector, BYTES // size)
        with steps("part", mapping.vector // lanes, "unroll") as part:
            if lanes == 1:
                self.put(
                    output, staged, mapping.element(cta, thread, self.first + step, part), part
                )
                return
            with loop("lane", lanes, "vectorized") as lane:
                number = part * lanes + lane
                element = mapping.element(cta, thread, self.first + step, number)
                self.put(output, staged, element, number)

    def put(self, output: OutputSite, staged: Any, element: Any, number: Any) -> None:
        where = {**self.outputs.rows, self.context.site.axis: element}
        indices = [at(each, where) for each in output.indices]
        ir.script.buffer_store(output.buffer, staged[number], indices)


def _dtype(output: OutputSite) -> str:
    return str(output.buffer.ty.dtype)
