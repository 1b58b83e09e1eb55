"""Shared by all blocks of a streaming function: sizes, parameters, symbols, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Derivation, guarded, new, value
from crossfuse.cascade.rewrite.cover import Cover
from crossfuse.cascade.rewrite.phases import Definitions
from crossfuse.cascade.rewrite.reuse import Reused, can_reuse, reusing
from crossfuse.cascade.rewrite.scripting import Scratch, held, is_chosen, numbers
from crossfuse.cascade.rewrite.streams import Stream, streams, vector_of, with_tiles
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.site import Site


@dataclass(frozen=True, eq=False)
class Frame:
    """A cascade in its function, and how its axis is divided."""

    #: Over the parameters of the streaming function.
    site: Site
    derivation: Derivation
    tiles: StreamTiles
    cover: Cover
    #: Type of the state and of all arithmetic.
    dtype: str
    #: Contributions that outputs use again.
    reused: tuple[Reused, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows of the cascade."""
        return prod(int(self.site.extents[each]) for each in self.site.rows)

    @property
    def swept(self) -> tuple[sympy.Symbol, ...]:
        """Elements that the state takes in."""
        used = set().union(*(each.contribution.free_symbols for each in self.derivation.slots))
        return tuple(each for each in self.site.cascade.elements if each in used)

    @property
    def moving(self) -> tuple[sympy.Symbol, ...]:
        """Symbols that change along the axis."""
        return (*self.site.cascade.elements, *(each.kept for each in self.reused))

    @property
    def emitted(self) -> tuple[sympy.Symbol, ...]:
        """Elements that outputs over the axis use."""
        used = set().union(*(each.free_symbols for each in self.derivation.rows.values()))
        return tuple(each for each in self.site.cascade.elements if each in used)

    def streams(self, symbols: Iterable[sympy.Symbol]) -> tuple[Stream, ...]:
        """Streams that symbols are loaded from along the axis."""
        return streams(self.site, symbols, self.cover.vector, self.cover.vector)

    def at_row(self, row: Any) -> dict[Any, Any]:
        """Variables of the rows at a row's number."""
        found: dict[Any, Any] = {}
        below = self.rows
        for each in self.site.rows:
            extent = int(self.site.extents[each])
            below //= extent
            number = ir.tirx.floordiv(row, below) if below > 1 else row
            found[each] = ir.tirx.floormod(number, extent) if below * extent < self.rows else number
        return found

    def symbols(self, place: Mapping[Any, Any], tiles: Mapping[Stream, Any], lane: Any) -> Any:
        """Values of elements and invariants at a row and an element of the axis."""
        cascade = self.site.cascade
        return {
            symbol: at(with_tiles(self.site, symbol, tiles, lane), place)
            for symbol in (*cascade.elements, *cascade.invariants)
            if symbol in self.site.reads
        }

    def invariants(self, place: Mapping[Any, Any]) -> dict[sympy.Symbol, Any]:
        """Values of invariants at a row."""
        return {
            symbol: at(self.site.reads[symbol], place)
            for symbol in self.site.cascade.invariants
            if symbol in self.site.reads
        }


def at(expression: Any, place: Mapping[Any, Any]) -> Any:
    """Substitute a place in an expression of the site; integers get the variables' types."""

    def replace(var: Any) -> Any:
        for each, now in place.items():
            if each.same_as(var):
                return now if not isinstance(now, int) else ir.tirx.const(now, str(var.ty))
        return var

    return ir.substitute(expression, replace)


def frame_of(site: Site, derivation: Derivation, tiles: StreamTiles) -> Frame:
    """Choose the sizes that `tiles` leaves open."""
    dtypes = {each.dtype for each in site.stages.values()}
    dtype = "float64" if "float64" in dtypes else "float32"
    length = int(site.extents[site.axis])
    vector = vector_of(site, site.cascade.elements)
    if tiles.vector:
        vector = tiles.vector if length % tiles.vector == 0 else 1
    cover = Cover(length, tiles.threads, vector, tiles.unroll, tiles.cluster)
    reused: tuple[Reused, ...] = ()
    if can_reuse(cover, tiles.resident):
        derivation, reused = reusing(derivation)
    return Frame(site, derivation, tiles, cover, dtype, reused)


def finished(
    frame: Frame, values: dict[sympy.Symbol, Any], state: Mapping[str, Any]
) -> Definitions:
    """Define the finished state, and what stands in for its values, in registers."""
    made = Definitions(values, frame.dtype)
    for slot in frame.derivation.slots:
        kept = [
            Scratch(f"{each.name}_final", each.dtype, state[each.name]).value
            for each in numbers(slot, frame.dtype)
        ]
        known = kept[0]
        made.values[value(slot.name)] = made.values[guarded(slot.name)] = known
        if is_chosen(slot):
            made.chosen[slot.name] = kept
        if slot.guard is not None:
            inside = {**made.values, new(slot.name): known}
            stand_in = Definitions(inside, frame.dtype).write(slot.guard)
            made.values[guarded(slot.name)] = Scratch(
                f"{slot.name}_usable", frame.dtype, stand_in
            ).value
    return made


def tile_of(stream: Stream, frame: Frame, steps: int, name: str) -> Any:
    """Allocate a tile of a stream in registers: a vector for each step."""
    width = frame.cover.vector * stream.width
    return held(name, (steps, width), str(stream.buffer.ty.dtype), "local")


def row_of(buffer: Any, step: Any) -> Callable[[Any], Any]:
    """Elements of a tile at a step."""
    return lambda number: buffer[step, number]
