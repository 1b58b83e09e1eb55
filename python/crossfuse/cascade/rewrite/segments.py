"""Writes what a thread does with its elements of a row: loads, reduces, keeps and stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.context import (
    BYTES,
    Stream,
    StreamContext,
    Tiling,
    at,
    finished,
    read_by,
)
from crossfuse.cascade.rewrite.phases import (
    Definitions,
    Phase,
    Shared,
    combined,
    hoisted,
    insert,
    phases,
    share,
    written,
)
from crossfuse.cascade.rewrite.scripting import (
    PLACE,
    Scratch,
    held,
    loop,
    nothing,
    numbers,
    pairs,
    steps,
    when,
    zero,
)
from crossfuse.cascade.spec import OutputSite, Slot, guarded, new, old, position, value

#: The element of a tile at a place in it.
Tile = Callable[[Any], Any]


class Residence:
    """Buffers that hold elements for outputs; they are allocated while the function is written."""

    def __init__(self, context: StreamContext) -> None:
        self.context = context
        self.where = context.resident if context.derivation.rows else "none"
        mapping, rows = context.mapping, context.row_count
        ctas, threads, count = mapping.cluster, mapping.threads, mapping.held
        #: Contributions that outputs use again, by slot.
        self.reused = {
            slot: held(symbol.name, (rows, ctas, threads, count, mapping.vector), context.dtype)
            for slot, symbol in context.reused.items()
        }
        self.buffers: dict[Stream, Any] = {}
        again = context.emitted if self.where != "none" else ()
        for stream in context.swept:
            if any(stream.same(each) for each in again):
                shape = (ctas, rows, count, threads, stream.elements)
                if self.where == "registers":
                    shape = (rows, ctas, threads, count, stream.elements)
                self.buffers[stream] = held(f"{stream.name}_kept", shape, stream.dtype)

    def buffer(self, stream: Stream) -> Any:
        """The buffer of the same loads, or None."""
        return next((held for each, held in self.buffers.items() if stream.same(each)), None)

    def registers(self, stream: Stream) -> Any:
        """The buffer of a stream that stays in registers, or None."""
        return self.buffer(stream) if self.where == "registers" else None

    def element(self, stream: Stream, place: Sequence[Any]) -> Tile:
        """Elements of a held stream at a step."""
        buffer, (row, cta, thread, step) = self.buffer(stream), place
        shared = (cta, row, step, thread)
        index = (row, cta, thread, step) if self.where == "registers" else shared
        return lambda number: buffer[(*index, number)]

    def keep(self, stream: Stream, place: Sequence[Any], tile: Tile) -> None:
        """Statements: store a vector of a tile to shared memory, if its stream is held there."""
        if self.where == "shared" and self.buffer(stream) is not None:
            kept = self.element(stream, place)
            for_lanes(stream.elements, stream.lanes, lambda i: _assign(kept(i), tile(i)))

    def take(self, stream: Stream, place: Sequence[Any], into: Any) -> None:
        """Statements: copy a vector of elements that were held, as it was loaded.

        Else nvcc holds the numbers that one sweep made of registers for the next: twice as many
        registers, and half as many CTAs (see `crossfuse.lower.buffers`). From shared memory
        it loads 16-bit numbers one by one, 16 bytes apart, so that four threads of a warp meet in a
        bank: 32 turns of the memory for a vector that takes four.
        """
        kept = self.element(stream, place)
        packed = row_of(into, 0)
        for_lanes(stream.elements, stream.lanes, lambda i: _assign(packed(i), kept(i)))


def _assign(element: Any, value: Any) -> None:
    """Statement: store to the place that a load reads."""
    ir.script.buffer_store(element.source, value, list(element.indices))


def for_lanes(count: int, lanes: int, move: Callable[[Any], None]) -> None:
    """Statements for a number of elements, as many at a time as one access takes."""
    with steps("part", count // lanes, "unroll") as part:
        if lanes == 1:
            move(part)
            return
        with loop("lane", lanes, "vectorized") as lane:
            move(part * lanes + lane)


# Tiles of a thread.

#: Where a thread is: row, CTA of the cluster, thread.
Place = tuple[Any, Any, Any]


def each_tile(
    residence: Residence, write: Callable[[Tiling, Any, int], None], of_tile: bool = False
) -> None:
    """Statements for all tiles of a thread: `write` gets kind, first step, and number of kind.

    Loops are unrolled where registers are `of_tile`, one for each tile, as those of residence are.
    """
    kind = "unroll" if of_tile or residence.where == "registers" else "serial"
    for number, tiling in enumerate(residence.context.mapping.tilings):
        with steps(f"tile_{number}", tiling.count, kind) as tile:
            write(tiling, tiling.first + tile * tiling.steps, number)


class ThreadTile:
    """Elements of a tile of a thread, whose steps count from a first one."""

    def __init__(
        self, residence: Residence, place: Place, tiling: Tiling, first: Any, number: int
    ) -> None:
        self.residence = residence
        self.context = residence.context
        self.place = place
        self.rows = self.context.at_row(place[0])
        self.tiling = tiling
        self.first = first
        #: Of the kind of tiles, for the names of buffers.
        self.number = number

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
        shape = (count or self.tiling.steps, stream.elements)
        return held(f"{stream.name}_{name}", shape, stream.dtype, "local")

    def load(self, stream: Stream, tile: Callable[[Any], Tile]) -> None:
        """Statements: load a stream into its tile, and hold what is held in shared memory."""
        with self.each_step() as step:
            first, into = self.element(step), tile(step)

            def move(number: Any) -> None:
                places = stream.indices(first, number, self.context.site.axis)
                indices = [at(each, self.rows) for each in places]
                value = stream.buffer[tuple(indices)]
                inside = stream.inside(indices)
                if inside:
                    value = ir.tirx.if_then_else(ir.conjunction(inside), value, zero(str(value.ty)))
                _assign(into(number), value)

            for_lanes(stream.elements, stream.lanes, move)
            self.residence.keep(stream, self.at(step), into)


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
        self.streams = context.swept
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
    def __init__(self, segment: Segment, fresh: bool, *tile: Any) -> None:
        super().__init__(segment.residence, segment.place, *tile)
        self.segment = segment
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
        copied = self.copied(phase, number) if number else {}
        totals = {
            slot.name: Scratch(
                f"{slot.name}_tile_{self.number}_",
                self.context.dtype,
                written(slot.monoid.identity, {}, self.context.dtype),
            )
            for slot in phase
            if not slot.monoid.keeps_places
        }
        for slot in phase:
            # A choice starts from the elements that it chose before.
            for each in numbers(slot, self.context.dtype) if slot.monoid.keeps_places else ():
                self.segment.next[each.name].set(self.segment.state[each.name].value)
        parts, plain = self.contributions(phase)
        definitions = Definitions(self.values, self.context.dtype)
        definitions.define(parts.fixed)
        with self.each_step() as step:
            for slot in plain:
                times = self.context.mapping.vector if slot.monoid.name == "sum" else 1
                self.add(slot, totals, definitions.write(times * slot.contribution))
            moving = [each for each in phase if each not in plain]
            if moving:
                tiles = {stream: tile(step) for stream, tile in self.tiles.items()}
                for stream, buffer in copied.items():
                    self.residence.take(stream, self.at(step), buffer)
                    tiles[stream] = row_of(buffer, 0)
                with loop("lane", self.context.mapping.vector, "unroll") as lane:
                    self.lane(moving, parts, definitions, totals, tiles, step, lane)
        for slot in phase:
            if slot.monoid.keeps_places:
                self.known(slot, self.following(slot)[0])
            else:
                self.renew(slot, totals[slot.name].value, parts, definitions)

    def copied(self, phase: Phase, number: int) -> dict[Stream, Any]:
        """Buffers of a vector for each stream in registers that a later sweep reads."""
        site = self.context.site
        elements = set(site.cascade.elements)
        wanted = {each for slot in phase for each in slot.contribution.free_symbols & elements}
        kept = [each for each in self.tiles if self.residence.registers(each) is not None]
        kept = list(read_by(site, wanted, kept))
        return {each: self.buffer(each, f"packed_{self.number}_{number}", 1) for each in kept}

    def following(self, slot: Slot) -> list[Scratch]:
        return [self.segment.next[each.name] for each in numbers(slot, self.context.dtype)]

    def contributions(self, phase: Phase) -> tuple[Shared, list[Slot]]:
        """Contributions of elements, but for slots that all elements contribute the same to.

        These slots come apart, as the second value.
        """
        elements = set(self.context.site.cascade.elements)
        plain = [
            each
            for each in phase
            if not each.contribution.free_symbols & elements
            and each.monoid.name in ("sum", "max", "min")
        ]
        moving = [each.contribution for each in phase if each not in plain]
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
        values = {**fixed.values, **self.symbols(tiles, step, lane)}
        brought = Definitions(values, self.context.dtype).all(parts)
        for slot, each in zip(slots, brought, strict=True):
            if slot.monoid.keeps_places:
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
    needed where contributions are used again; `known` has invariants that were loaded before.
    Outputs over the axis that `terms` names go to these registers of the thread.
    """

    def __init__(
        self,
        context: StreamContext,
        place: Place,
        residence: Residence,
        state: Mapping[str, Any],
        before: Mapping[str, Any] = MappingProxyType({}),
        known: Mapping[sympy.Symbol, Any] = MappingProxyType({}),
        terms: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.context = context
        self.terms = terms
        self.place = place
        self.residence = residence
        self.rows = context.at_row(place[0])
        self.known = known
        self.values = finished(context, {**context.invariants(self.rows), **known}, state)
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
            of_tile = bool(self.terms)
            each_tile(self.residence, lambda *tile: _OutputTile(self, parts, *tile).run(), of_tile)

    def result(self, output: OutputSite) -> None:
        """Statements: store a result of a row; one for each rank if it has columns."""
        extents = [int(self.context.site.extents[each]) for each in output.columns]
        if not extents:
            indices = [at(each, self.rows) for each in output.indices]
            ir.script.buffer_store(output.buffer, self.written(output, 0), indices)
            return
        staged = held(f"{output.name}_ranks", (extents[-1],), output.dtype, "local")
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
                known.values[position(slot.name)] = kept[len(kept) // 2 + rank]
        result = self.context.derivation.results[output.name]
        if self.along:
            result = self._as_rows(result, known)
        # Places are whole numbers that a float32 would round.
        whole = output.dtype if result.is_integer and "int" in output.dtype else ""
        return known.write(result, whole).astype(output.dtype)

    def _as_rows(self, result: sympy.Expr, known: Definitions) -> sympy.Expr:
        """A result whose sums are multiplied as the elements of rows are, in the same order.

        Of a row in which one element is left a sum is that element, and so in floating point: what
        subtracts one from the other finds nothing.
        """
        sums = [each for each in self.context.slots if each.monoid.name == "sum"]
        symbols = {value(each.name) for each in sums}
        stands = {each: sympy.Dummy(each.name, **each.assumptions0) for each in symbols}

        def last(product: sympy.Expr) -> sympy.Expr:
            return product.func(*(stands.get(each, each) for each in product.args))

        held = result.replace(lambda each: isinstance(each, sympy.Mul), last)
        if held == result:
            return result
        known.values.update({dummy: known.values[each] for each, dummy in stands.items()})
        fixed, rest = hoisted(held, stands.values(), self.context.derivation.slots)
        known.define(fixed)
        return rest


class _OutputTile(ThreadTile):
    def __init__(self, outputs: Outputs, parts: Shared, *tile: Any) -> None:
        super().__init__(outputs.residence, outputs.place, *tile)
        self.outputs = outputs
        self.parts = parts
        self.loaded = {
            each: self.buffer(each, f"again_{self.number}")
            for each in self.context.emitted
            if self.residence.buffer(each) is None
        }
        self.copied = {
            each: self.buffer(each, f"packed_{self.number}", 1) for each in self.residence.buffers
        }

    def run(self) -> None:
        for stream, buffer in self.loaded.items():
            self.load(stream, partial(row_of, buffer))
        kept = self.outputs.terms
        made = [
            _Kept(self, kept[each.name]) if each.name in kept else _Stored(self, each)
            for each in self.outputs.along
        ]
        with self.each_step() as step:
            for stream, buffer in self.copied.items():
                self.residence.take(stream, self.at(step), buffer)
            with loop("lane", self.context.mapping.vector, "unroll") as lane:
                self.lane(step, lane, made)
            for each in made:
                each.store(step)

    def tiles(self, step: Any) -> dict[Stream, Tile]:
        found = {each: row_of(buffer, 0) for each, buffer in self.copied.items()}
        return found | {each: row_of(buffer, step) for each, buffer in self.loaded.items()}

    def lane(self, step: Any, lane: Any, made: Sequence[_Stored | _Kept]) -> None:
        symbols = {**self.symbols(self.tiles(step), step, lane), **self.outputs.known}
        for slot, symbol in self.context.reused.items():
            symbols[symbol] = self.residence.reused[slot][(*self.at(step), lane)]
        values = Definitions({**self.outputs.values.values, **symbols}, self.context.dtype)
        for output, each in zip(made, values.all(self.parts), strict=True):
            output.put(each, step, lane)


class _Stored:
    """An output along the axis that a tile stores: by vectors, from registers."""

    def __init__(self, tile: _OutputTile, output: OutputSite) -> None:
        self.tile = tile
        self.output = output
        shape = (tile.context.mapping.vector,)
        self.staged = held(f"{output.name}_out_{tile.number}", shape, output.dtype, "local")

    def put(self, value: Any, step: Any, lane: Any) -> None:
        ir.script.buffer_store(self.staged, value.astype(self.output.dtype), [lane])

    def store(self, step: Any) -> None:
        vector = self.tile.context.mapping.vector

        def put(number: Any) -> None:
            where = {**self.tile.rows, self.tile.context.site.axis: self.tile.element(step, number)}
            indices = [at(each, where) for each in self.output.indices]
            ir.script.buffer_store(self.output.buffer, self.staged[number], indices)

        for_lanes(vector, min(vector, BYTES // ir.item_bytes(self.output.dtype)), put)


class _Kept:
    """One that stays in registers of the thread, until rows are added up."""

    def __init__(self, tile: _OutputTile, buffer: Any) -> None:
        self.tile = tile
        self.buffer = buffer

    def put(self, value: Any, step: Any, lane: Any) -> None:
        ir.script.buffer_store(self.buffer, value, [*self.tile.at(step), lane])

    def store(self, step: Any) -> None:
        """Nothing: each element is where it stays."""
