"""Loads elements into tiles of a thread, and holds them between the stream and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.context import Reused, StreamContext, at
from crossfuse.cascade.rewrite.scripting import held, loop, steps, when, zero
from crossfuse.cascade.rewrite.streams import Stream
from crossfuse.cascade.rewrite.thread_mapping import Tiling

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


# Tiles of a thread.

#: Where a thread is: row, CTA of the cluster, thread.
Place = tuple[Any, Any, Any]


def each_tile(residence: Residence, write: Callable[[Tiling, Any, int], None]) -> None:
    """Statements for all tiles of a thread: `write` gets kind, first step, and number of kind."""
    kind = "unroll" if residence.where == "registers" else "serial"
    for number, tiling in enumerate(residence.context.mapping.tilings):
        with steps(f"tile_{number}", tiling.count, kind) as tile:
            write(tiling, tiling.first + tile * tiling.steps, number)


class ThreadTile:
    """Elements of a tile of a thread, whose steps count from a first one."""

    def __init__(self, residence: Residence, place: Place, tiling: Tiling, first: Any) -> None:
        self.residence = residence
        self.context = residence.context
        self.place = place
        self.rows = self.context.at_row(place[0])
        self.tiling = tiling
        self.first = first

    def at(self, step: Any) -> tuple[Any, Any, Any, Any]:
        """Place of a step."""
        return (*self.place, self.first + step)

    def element(self, step: Any, lane: Any = 0) -> Any:
        """Index along the axis."""
        _, cta, thread = self.place
        return self.context.mapping.element(cta, thread, self.first + step, lane)

    def symbols(self, tiles: Mapping[Stream, Tile], step: Any, lane: Any) -> Any:
        """Values of elements and invariants, loads along the axis from tiles of the step."""
        where = {**self.rows, self.context.site.axis: self.element(step, lane)}
        return self.context.symbols(where, tiles, lane)

    @contextmanager
    def each_step(self) -> Iterator[Any]:
        """Statements for each step that lies within the axis."""
        with loop("step", self.tiling.steps, "unroll") as step:
            inside = self.context.mapping.inside(self.tiling, self.place, self.first, step)
            with when(inside):
                yield step

    def buffer(self, stream: Stream, name: str, count: int = 0) -> Any:
        """Allocate registers: a vector for each step, or for some."""
        shape = (count or self.tiling.steps, self.context.mapping.vector * stream.width)
        return held(f"{stream.name}_{name}", shape, str(stream.buffer.ty.dtype), "local")

    def load(self, stream: Stream, tile: Callable[[Any], Tile]) -> None:
        """Statements: load a stream into its tile, and hold what is held in shared memory."""
        with self.each_step() as step:
            load(self.context, stream, self.at(step), tile(step))
            self.residence.keep(stream, self.at(step), tile(step))


def row_of(buffer: Any, step: Any) -> Tile:
    """Elements of a tile at a step."""
    return lambda number: buffer[step, number]
