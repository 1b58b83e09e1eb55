"""Writes the state of a tile of rows: numbers of each row, and of each row and column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot, guarded, new, old, value
from crossfuse.cascade.rewrite.scripting import (
    NOWHERE,
    PLACE,
    Scratch,
    is_chosen,
    loop,
    place_symbol,
    stands_before,
    when,
)
from crossfuse.cascade.rewrite.tiled.block_builder import At, BlockBuilder, Local
from crossfuse.cascade.rewrite.tiled.steps import Factor, Guard, Keep, Statement, Tile

# Selections, the slots with places: top-k, argmax, argmin.


def width(slot: Slot) -> int:
    """Number of elements of a selection."""
    return max(1, slot.monoid.k)


@dataclass(frozen=True, eq=False)
class Selection:
    """The best elements of each row, in order; of equal ones the lower index comes first."""

    slot: Slot
    #: Of each row; the last dimension counts the best, here and in `places`.
    values: Local
    places: Local

    def begin(self, at: At, init: Any) -> None:
        """Statements: empty the selection."""
        with loop("p", width(self.slot)) as p:
            self._store(at, p, init, ir.tirx.const(NOWHERE, PLACE))

    def insert(self, at: At, value: Any, place: Any) -> None:
        """Statements: take in an element; the one that it displaces moves on down the row."""
        coming = Scratch(f"{self.slot.name}_coming", str(self.values.buffer.ty.dtype), value)
        from_ = Scratch(f"{self.slot.name}_from", "int32", place.astype("int32"))
        moved = Scratch(f"{self.slot.name}_moved", coming.buffer.ty.dtype)
        moved_from = Scratch(f"{self.slot.name}_moved_from", "int32")
        with loop("p", width(self.slot)) as p:
            own = self.load(at, p)
            with when(stands_before(self.slot.monoid, (coming.value, from_.value), own)):
                moved.set(own[0])
                moved_from.set(own[1])
                self._store(at, p, coming.value, from_.value)
                coming.set(moved.value)
                from_.set(moved_from.value)

    def load(self, at: At, p: Any) -> tuple[Any, Any]:
        """The value and the place of rank p."""
        read = (each.buffer[(*each.at(at), p)] for each in (self.values, self.places))
        value, place = read
        return value, place

    def _store(self, at: At, p: Any, value: Any, place: Any) -> None:
        for local, stored in ((self.values, value), (self.places, place)):
            ir.script.buffer_store(local.buffer, stored, [*local.at(at), p])


class State:
    """Writes the blocks of a state."""

    def __init__(self, builder: BlockBuilder) -> None:
        self.builder = builder
        self.context = builder.context
        self.rows = tuple(self.context.site.rows)
        self.selections: dict[str, Selection] = {}
        self.state = {each.name: self._state(each) for each in self.context.slots}
        for slot in self.context.slots:
            for symbol in (value(slot.name), new(slot.name)):
                builder.symbols[symbol] = self.state[slot.name]
            if slot.guard is None:
                builder.symbols[guarded(slot.name)] = self.state[slot.name]

    def _state(self, slot: Slot) -> Local:
        builder, dtype = self.builder, self.context.dtype
        over = self.places_of(slot)
        if not is_chosen(slot):
            return builder.local(slot.name, over, dtype)
        local = builder.local(slot.name, over, dtype, (width(slot),))
        places = builder.local(f"{slot.name}_index", over, "int32", (width(slot),))
        self.selections[slot.name] = Selection(slot, local, places)
        return local

    def places_of(self, slot: Slot) -> tuple[Any, ...]:
        """Rows, and columns of a slot."""
        return (*self.rows, *self.context.columns_of(slot))

    def begin(self) -> None:
        """Initialise the state."""
        for slot in self.context.slots:
            with self.builder.block(f"{slot.name}_init", self.places_of(slot)) as at:
                init = self.builder.write(slot.init, at)
                if slot.name in self.selections:
                    self.selections[slot.name].begin(at, init)
                else:
                    self.state[slot.name].store(at, init)

    def _row(self, name: str, over: Sequence[Any]) -> Local:
        return self.builder.local(name, over, self.context.dtype)

    def write(self, statement: Statement) -> None:
        """Write a statement, by the method of its name."""
        getattr(self, type(statement).__name__.lower())(statement)

    def keep(self, statement: Keep) -> None:
        """Write ``m_old = m``."""
        slot, over = statement.slot, self.places_of(statement.slot)
        local = self.builder.symbols[old(slot.name)] = self._row(f"{slot.name}_old", over)
        with self.builder.block(f"{slot.name}_keep", over) as at:
            local.store(at, self.state[slot.name].load(at))

    def guard(self, statement: Guard) -> None:
        """Write ``m_safe = select(m == -inf, 0, m)``."""
        slot, over = statement.slot, self.places_of(statement.slot)
        symbol = guarded(slot.name)
        if symbol not in self.builder.symbols:
            self.builder.symbols[symbol] = self._row(f"{slot.name}_safe", over)
        with self.builder.block(f"{slot.name}_guard", over) as at:
            assert slot.guard is not None
            self.builder.symbols[symbol].store(at, self.builder.write(slot.guard, at))

    def factor(self, statement: Factor) -> None:
        """Write ``c = exp2(m_old - m_safe)``."""
        self.define(statement, self.rows, statement.symbol.name)

    def define(
        self,
        statement: Factor | Tile,
        over: Sequence[Any],
        name: str,
        more: Sequence[Any] = (),
    ) -> None:
        """Compute and name a number of each place, once for all iterations of `more`."""
        local = self._row(name, over)
        with self.builder.block(f"{name}_make", [*more, *over]) as at:
            local.store(at, self.builder.write(statement.expression, at))
        self.builder.symbols[statement.symbol] = local

    def finish(self, used: set[sympy.Symbol]) -> None:
        """Write what stands in for values of the finished state, where results use it."""
        for slot in self.context.slots:
            if slot.name in self.selections:
                self.builder.symbols[place_symbol(slot)] = self.selections[slot.name].places
            elif slot.guard is not None and guarded(slot.name) in used:
                self.guard(Guard(slot))
