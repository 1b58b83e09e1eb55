"""Writes the block of a thread's segment: tile after tile, the state in registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot, guarded, new, value
from crossfuse.cascade.rewrite.context import StreamContext
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
from crossfuse.cascade.rewrite.residence import (
    Place,
    Residence,
    ThreadTile,
    Tile,
    each_tile,
    row_of,
)
from crossfuse.cascade.rewrite.scripting import (
    PLACE,
    Scratch,
    is_chosen,
    loop,
    nothing,
    numbers,
    pairs,
)
from crossfuse.cascade.rewrite.streams import Stream
from crossfuse.cascade.rewrite.thread_mapping import Tiling


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
        each_tile(self.residence, lambda *tile: _Tile(self, fresh, *tile).run())
        for _, number in self.numbers:
            kept = self.state[number.name].value
            ir.script.buffer_store(into[number.name], kept, list(self.place))


class _Tile(ThreadTile):
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
