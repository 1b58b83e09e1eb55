"""Writes what a thread does with its elements of a row: it loads, reduces, keeps and stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot, guarded, new, old, value
from crossfuse.cascade.rewrite.context import Reused, StreamContext, Tiling, at, finished
from crossfuse.cascade.rewrite.merging import insert
from crossfuse.cascade.rewrite.phases import (
    Definitions,
    Phase,
    Shared,
    combined,
    phases,
    share,
    written,
)
from crossfuse.cascade.rewrite.scripting import (
    PLACE,
    Scratch,
    held,
    is_chosen,
    loop,
    nothing,
    numbers,
    pairs,
    place_symbol,
    steps,
    when,
    zero,
)
from crossfuse.cascade.rewrite.streams import BYTES, Stream
from crossfuse.cascade.rewrite.work import item_bytes
from crossfuse.cascade.site import OutputSite

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


class Segment:
    """Writes how one thread reduces its part of a row, at a place: row, CTA and thread."""

    def __init__(self, context: StreamContext, place: Place, residence: Residence) -> None:
        self.context = context
        self.place = place
        self.residence = residence
        self.slots = context.slots
        self.streams = context.streams(context.swept)
        self.phases = phases(self.slots)
        self.rows = context.at_row(place[0])
        self.numbers = [
            (slot, each) for slot in self.slots for each in numbers(slot, context.dtype)
        ]
        self.state = self._scratch("so_far")
        self.next = self._scratch("next")
        self.usable = {
            each.name: Scratch(f"{each.name}_usable_", context.dtype)
            for each in self.slots
            if each.guard is not None
        }

    def _scratch(self, name: str) -> dict[str, Scratch]:
        return {each.name: Scratch(f"{each.name}_{name}", each.dtype) for _, each in self.numbers}

    def run(self, into: Mapping[str, Any]) -> None:
        """Statements: take in all tiles, then store the state."""
        tilings = self.context.mapping.tilings
        fresh = len(tilings) == 1 and tilings[0].count == 1
        invariants = self.context.invariants(self.rows)
        for slot, number in self.numbers:
            start = nothing(number, slot, written(slot.init, invariants, self.context.dtype))
            self.state[number.name].set(start)
        each_tile(self.residence, lambda *tile: _SegmentTile(self, fresh, *tile).run())
        for _, number in self.numbers:
            kept = self.state[number.name].value
            ir.script.buffer_store(into[number.name], kept, list(self.place))


class _SegmentTile(ThreadTile):
    """Writes the reduction of one tile into the state."""

    def __init__(
        self, segment: Segment, fresh: bool, tiling: Tiling, first: Any, number: int
    ) -> None:
        super().__init__(segment.residence, segment.place, tiling, first)
        self.segment = segment
        self.number = number
        self.fresh = fresh
        self.tiles = {each: self.tile(each) for each in segment.streams}
        self.values = dict(self.context.invariants(self.rows))
        for slot in segment.slots:
            name = numbers(slot, self.context.dtype)[0].name
            self.values[value(slot.name)] = segment.state[name].value

    def tile(self, stream: Stream) -> Callable[[Any], Tile]:
        """Give the tile's elements for each step."""
        kept = self.residence.registers(stream)
        if kept is not None:
            return lambda step: lambda number: kept[(*self.at(step), number)]
        return partial(row_of, self.buffer(stream, f"tile_{self.number}"))

    def run(self) -> None:
        for stream, tile in self.tiles.items():
            self.load(stream, tile)
        for which, phase in enumerate(self.segment.phases):
            self.sweep(phase, which)
        for _, number in self.segment.numbers:
            self.segment.state[number.name].set(self.segment.next[number.name].value)

    def sweep(self, phase: Phase, number: int) -> None:
        """Statements: reduce the tile's contributions, then compute new values."""
        copied = self.copied(number) if number else {}
        totals = {
            slot.name: Scratch(
                f"{slot.name}_tile_{self.number}_",
                self.context.dtype,
                written(slot.monoid.identity, {}, self.context.dtype),
            )
            for slot in phase.slots
            if not is_chosen(slot)
        }
        for slot in phase.slots:
            self.begin(slot)
        parts, plain = self.contributions(phase)
        definitions = Definitions(self.values, self.context.dtype)
        definitions.define(parts.fixed)
        with self.each_step() as step:
            for slot in plain:
                times = self.context.mapping.vector if slot.monoid.name == "sum" else 1
                self.add(slot, totals, definitions.write(times * slot.contribution))
            moving = [each for each in phase.slots if each not in plain]
            if moving:
                tiles = {stream: tile(step) for stream, tile in self.tiles.items()}
                for stream, buffer in copied.items():
                    self.residence.take(stream, self.at(step), buffer)
                    tiles[stream] = row_of(buffer, 0)
                with loop("lane", self.context.mapping.vector, "unroll") as lane:
                    self.lane(moving, parts, definitions, totals, tiles, step, lane)
        for slot in phase.slots:
            if is_chosen(slot):
                self.known(slot, self.following(slot)[0])
            else:
                self.renew(slot, totals[slot.name].value, parts, definitions)

    def copied(self, number: int) -> dict[Stream, Any]:
        """Buffers of a vector for each stream in registers, for a later sweep."""
        kept = [each for each in self.tiles if self.residence.registers(each) is not None]
        return {each: self.buffer(each, f"packed_{self.number}_{number}", 1) for each in kept}

    def following(self, slot: Slot) -> list[Scratch]:
        """The slot's numbers after this tile."""
        return [self.segment.next[each.name] for each in numbers(slot, self.context.dtype)]

    def begin(self, slot: Slot) -> None:
        """Statements: a choice starts from the elements that it chose before."""
        if is_chosen(slot):
            for each in numbers(slot, self.context.dtype):
                self.segment.next[each.name].set(self.segment.state[each.name].value)

    def contributions(self, phase: Phase) -> tuple[Shared, list[Slot]]:
        """Contributions of elements, but for slots that all elements contribute the same to.

        These slots come apart, as the second value.
        """
        elements = set(self.context.site.cascade.elements)
        plain = [
            each
            for each in phase.slots
            if not each.contribution.free_symbols & elements
            and each.monoid.name in ("sum", "max", "min")
        ]
        moving = [each.contribution for each in phase.slots if each not in plain]
        return share(moving, elements, self.context.slots), plain

    def lane(
        self,
        slots: list[Slot],
        parts: Shared,
        fixed: Definitions,
        totals: Mapping[str, Scratch],
        tiles: Mapping[Stream, Callable[[Any], Any]],
        step: Any,
        lane: Any,
    ) -> None:
        """Statements: take in one element."""
        values = {**fixed.values, **self.symbols(tiles, step, lane)}
        brought = Definitions(values, self.context.dtype).all(parts)
        for slot, each in zip(slots, brought, strict=True):
            if is_chosen(slot):
                kept = pairs(slot, self.segment.next, self.context.dtype)
                place = ir.tirx.Cast(PLACE, self.element(step, lane))
                insert(slot.monoid, kept, (each, place), self.context.dtype)
            else:
                self.add(slot, totals, self.kept(slot, each, step, lane))

    def kept(self, slot: Slot, what: Any, step: Any, lane: Any) -> Any:
        """A contribution; statement: hold it for outputs that use it again."""
        buffer = self.residence.reused.get(slot.name)
        if buffer is None:
            return what
        index = [*self.at(step), lane]
        ir.script.buffer_store(buffer, what, index)
        return buffer[tuple(index)]

    def add(self, slot: Slot, totals: Mapping[str, Scratch], what: Any) -> None:
        total = totals[slot.name]
        total.set(combined(slot.monoid, total.value, what, self.context.dtype))

    def renew(self, slot: Slot, total: Any, parts: Shared, fixed: Definitions) -> None:
        """Statements: compute the slot's new value, and what stands in for it."""
        dtype = self.context.dtype
        result = total
        if not (self.fresh and slot.init == slot.monoid.identity):
            # A quotient takes many instructions; contributions have made these already.
            made = {each: symbol for symbol, each in parts.fixed if each.is_Pow}
            known = {**self.values, **{each: fixed.values[each] for each in made.values()}}
            carried = written(slot.carry.xreplace(made), known, dtype)
            result = combined(slot.monoid, carried, total, dtype)
        following = self.segment.next[slot.name]
        following.set(result)
        self.known(slot, following)

    def known(self, slot: Slot, following: Scratch) -> None:
        """Statements: register the slot's new value, and compute what stands in for it."""
        self.values[new(slot.name)] = self.values[guarded(slot.name)] = following.value
        if slot.guard is not None:
            usable = self.segment.usable[slot.name]
            usable.set(written(slot.guard, self.values, self.context.dtype))
            self.values[guarded(slot.name)] = usable.value


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
            each_tile(self.residence, lambda *tile: _OutputTile(self, parts, *tile).run())

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


class _OutputTile(ThreadTile):
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
