"""Writes the state of a tile of rows, and merges those of CTAs that share an axis.

Each of these streams through a part of the axis and leaves its state in its slab, a part of a
buffer whose first dimension is the CTA. In a cluster slabs are in scope ``shared.dsm``, and each
CTA merges all slabs for a slice of the columns; a number of the row is merged by all of them. Else
they are in scope ``global``, and a second kernel merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.scripting import (
    NOWHERE,
    PLACE,
    Scratch,
    held,
    loop,
    stands_before,
    when,
)
from crossfuse.cascade.rewrite.tiled.block_builder import At, BlockBuilder, Local
from crossfuse.cascade.rewrite.tiled.steps import (
    Combine,
    Factor,
    Guard,
    Keep,
    Statement,
    Tile,
    merge_steps,
)
from crossfuse.cascade.rewrite.tiled.tile_context import Extent, TileContext, whole
from crossfuse.cascade.spec import Slot, guarded, left, new, old, position, right, value
from crossfuse.markers import DSM_SCOPE

# Selections, the slots with places: top-k, argmax, argmin.


@dataclass(frozen=True, eq=False)
class Selection:
    """The best elements of each row, in order; of equal ones the lower index comes first."""

    slot: Slot
    #: Of each row; the last dimension counts the best, here and in `places`.
    values: Local
    places: Local

    def begin(self, at: At, init: Any) -> None:
        """Statements: empty the selection."""
        with loop("p", self.slot.monoid.count) as p:
            self._store(at, p, init, ir.tirx.const(NOWHERE, PLACE))

    def insert(self, at: At, value: Any, place: Any) -> None:
        """Statements: take in an element; the one that it displaces moves on down the row."""
        coming = Scratch(f"{self.slot.name}_coming", str(self.values.buffer.ty.dtype), value)
        from_ = Scratch(f"{self.slot.name}_from", "int32", place.astype("int32"))
        moved = Scratch(f"{self.slot.name}_moved", coming.buffer.ty.dtype)
        moved_from = Scratch(f"{self.slot.name}_moved_from", "int32")
        with loop("p", self.slot.monoid.count) as p:
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
        if not slot.monoid.keeps_places:
            return builder.local(slot.name, over, dtype)
        local = builder.local(slot.name, over, dtype, (slot.monoid.count,))
        places = builder.local(f"{slot.name}_index", over, "int32", (slot.monoid.count,))
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
                self.builder.symbols[position(slot.name)] = self.selections[slot.name].places
            elif slot.guard is not None and guarded(slot.name) in used:
                self.guard(Guard(slot))


class Slabs:
    """Partial states of CTAs that share an axis."""

    def __init__(self, context: TileContext, extents: dict[Any, Extent]) -> None:
        self.cta = ir.Var("cta", "int32")
        self.scope = "global" if context.tiles.in_memory else DSM_SCOPE
        # A tile may have more rows than its group, which would be those of the next group. In a
        # cluster nobody else has its slabs.
        self.group = context.groups if context.tiles.in_memory else ()
        self.values: dict[str, Local] = {}
        self.places: dict[str, Local] = {}
        for slot in context.slots:
            over = (*self.group, *context.site.rows, *context.columns_of(slot))
            shape = [context.tiles.cluster, *(extents[each].domain for each in over)]
            indices: tuple[Any, ...] = (self.cta, *over)
            if slot.merge is None:
                shape.append(slot.monoid.count)
                self.places[slot.name] = self._slab(f"{slot.name}_index", shape, "int32", indices)
            self.values[slot.name] = self._slab(slot.name, shape, context.dtype, indices)

    def _slab(self, name: str, shape: list[int], dtype: str, indices: tuple[Any, ...]) -> Local:
        return Local(held(f"{name}_slab", tuple(shape), dtype, self.scope), indices)

    def at(self, builder: BlockBuilder, cta: Any, count: int) -> None:
        """Select the CTA whose slab blocks access."""
        builder.extents[self.cta] = Extent("cta", count, 0, cta)

    def fill(self, state: State, cta: Any) -> None:
        """Store a CTA's state to its slab."""
        self.at(state.builder, cta, state.context.tiles.cluster)
        for slot in state.context.slots:
            over = [self.cta, *self.group, *state.places_of(slot)]
            with state.builder.block(f"{slot.name}_slab", over) as at:
                if slot.name not in self.places:
                    self.values[slot.name].store(at, state.state[slot.name].load(at))
                    continue
                with loop("p", slot.monoid.count) as p:
                    value, place = state.selections[slot.name].load(at, p)
                    for slab, each in ((self.values, value), (self.places, place)):
                        local = slab[slot.name]
                        ir.script.buffer_store(local.buffer, each, [*local.at(at), p])


class Merge(State):
    """Merges the partial states of all CTAs to one; columns are those of the CTA's slice."""

    def __init__(self, builder: BlockBuilder, slabs: Slabs) -> None:
        super().__init__(builder)
        self.slabs = slabs
        for slot in self.context.slots:
            builder.symbols[left(slot.name)] = self.state[slot.name]
            builder.symbols[right(slot.name)] = slabs.values[slot.name]

    def run(self) -> None:
        """Merge slab after slab."""
        self.begin()
        count = self.context.tiles.cluster
        with loop("cta", count) as cta:
            self.slabs.at(self.builder, cta, count)
            for each in merge_steps(self.context.slots):
                self.write(each)

    def factor(self, statement: Factor) -> None:
        """Write a number of a row anew for each slab."""
        more = [self.slabs.cta, *self.slabs.group]
        self.define(statement, self.rows, statement.symbol.name, more)

    def combine(self, statement: Combine) -> None:
        """Write ``s = merged s and s of the slab``."""
        slot = statement.slot
        over, name = (*self.slabs.group, *self.places_of(slot)), slot.name
        with self.builder.block(f"{name}_merge", over, [self.slabs.cta]) as at:
            if statement.expression is not None:
                self.state[name].store(at, self.builder.write(statement.expression, at))
                return
            with loop("q", slot.monoid.count) as q:
                value, place = (
                    each[name].buffer[(*each[name].at(at), q)]
                    for each in (self.slabs.values, self.slabs.places)
                )
                self.selections[name].insert(at, value, place)


def part_of(first: Any, count: Any, cta: Any, parts: int) -> tuple[Any, Any]:
    """The first tile of a CTA's part of the axis, and their number; the last may have fewer."""
    known = ir.sym.Analyzer()
    known.bind(cta, ir.tvm.ir.Range(0, parts))
    share = ir.tirx.floordiv(count + (parts - 1), parts)
    left_over = ir.tirx.max(ir.tirx.min(share, count - cta * share), whole(0))
    return known.simplify(first + cta * share), known.simplify(left_over)


def dealt_to(first: Any, count: Any, cta: Any, parts: int) -> tuple[Any, Any]:
    """The first of the tiles that a CTA has in turn with the others, and their number."""
    known = ir.sym.Analyzer()
    known.bind(cta, ir.tvm.ir.Range(0, parts))
    number = ir.tirx.floordiv(count + (parts - 1) - cta, parts)
    even = ir.constant(known.simplify(count))
    if even is not None and even % parts == 0:  # the analyzer does not see that it is the same
        number = whole(even // parts)
    return known.simplify(first + cta), known.simplify(number)
