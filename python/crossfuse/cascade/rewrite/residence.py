"""Holds elements between the stream and outputs over the axis, in registers or shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.context import Reused, StreamContext, at
from crossfuse.cascade.rewrite.scripting import held, loop, steps, zero
from crossfuse.cascade.rewrite.streams import Stream

#: The element of a tile at a place in it.
Tile = Callable[[Any], Any]


class Residence:
    """Buffers that hold elements; they are allocated while the function is written."""

    def __init__(self, context: StreamContext) -> None:
        self.context = context
        self.where = context.tiles.resident if context.derivation.rows else "none"
        self.buffers: dict[Stream, Any] = {}
        #: Contributions that outputs use again, by slot.
        self.reused = {each.slot: self._contributions(each) for each in context.reused}
        if self.where == "none":
            return
        for stream in context.streams(context.swept):
            if any(stream.same(each) for each in context.streams(context.emitted)):
                self.buffers[stream] = self._buffer(stream)

    def _buffer(self, stream: Stream) -> Any:
        mapping, tiles = self.context.mapping, self.context.tiles
        width = mapping.vector * stream.width
        dtype = str(stream.buffer.ty.dtype)
        if self.where == "registers":
            shape = (self.context.row_count, tiles.cluster, mapping.threads, mapping.held, width)
        else:
            shape = (tiles.cluster, self.context.row_count, mapping.held, mapping.threads, width)
        return held(f"{stream.name}_kept", shape, dtype)

    def _contributions(self, reused: Reused) -> Any:
        mapping = self.context.mapping
        shape = (
            self.context.row_count,
            mapping.cluster,
            mapping.threads,
            mapping.held,
            mapping.vector,
        )
        return held(f"{reused.kept.name}", shape, self.context.dtype)

    def registers(self, stream: Stream) -> Any:
        """The buffer of a stream that stays in registers, or None."""
        kept = self.kept(stream) if self.where == "registers" else None
        return None if kept is None else self.buffers[kept]

    def kept(self, stream: Stream) -> Any:
        """The held stream of the same loads, or None."""
        return next((each for each in self.buffers if stream.same(each)), None)

    def keep(self, stream: Stream, place: Sequence[Any], tile: Tile) -> None:
        """Statements: store a vector of a tile to shared memory, if its stream is held there."""
        kept = self.kept(stream) if self.where == "shared" else None
        if kept is None:
            return
        for_lanes(self.context, stream, lambda i: self._move(kept, place, i, tile(i)))

    def _move(self, stream: Stream, place: Sequence[Any], number: Any, what: Any) -> None:
        ir.script.buffer_store(self.buffers[stream], what, self._shared(place, number))

    @staticmethod
    def _shared(place: Sequence[Any], number: Any) -> list[Any]:
        row, cta, thread, step = place
        return [cta, row, step, thread, number]

    def take(self, stream: Stream, place: Sequence[Any], into: Any) -> None:
        """Statements: copy a vector of elements that stayed in registers, as it was loaded.

        Else nvcc holds the numbers that one sweep made of them for the next: twice as many
        registers, and half as many CTAs. See `crossfuse.lower.pack_registers`.
        """
        kept = self.element(self.kept(stream), place)
        for_lanes(self.context, stream, lambda i: ir.script.buffer_store(into, kept(i), [0, i]))

    def element(self, stream: Stream, place: Sequence[Any]) -> Tile:
        """Elements of a held stream at a step."""
        buffer = self.buffers[stream]
        if self.where == "registers":
            return lambda number: buffer[(*place, number)]
        return lambda number: buffer[tuple(self._shared(place, number))]


def for_lanes(context: StreamContext, stream: Stream, move: Callable[[Any], None]) -> None:
    """Statements for every element of a vector, as many at a time as one access takes."""
    width = context.mapping.vector * stream.width
    with steps("part", width // stream.lanes, "unroll") as part:
        if stream.lanes == 1:
            move(part)
            return
        with loop("lane", stream.lanes, "vectorized") as lane:
            move(part * stream.lanes + lane)


def load(context: StreamContext, stream: Stream, place: Sequence[Any], tile: Tile) -> None:
    """Statements: load a vector of a stream from global memory into its tile."""
    row, cta, thread, step = place
    first = context.mapping.element(cta, thread, step)
    rows = context.at_row(row)

    def move(number: Any) -> None:
        indices = [at(each, rows) for each in stream.indices(first, number, context.site.axis)]
        target = tile(number)
        value = stream.buffer[tuple(indices)]
        inside = stream.inside(indices)
        if inside:
            value = ir.tirx.if_then_else(ir.conjunction(inside), value, zero(str(value.ty)))
        ir.script.buffer_store(target.source, value, list(target.indices))

    for_lanes(context, stream, move)
