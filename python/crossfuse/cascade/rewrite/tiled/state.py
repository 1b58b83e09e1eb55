"""Writes the state of a tile of rows, and merges those of CTAs that share an axis.

Each of these streams through a part of the axis and leaves its state in its slab, a part of a
buffer whose first dimension is the CTA. In a cluster slabs are in scope ``shared.dsm``, and each
CTA merges all slabs for a slice of the columns; a number of the row is merged by all of them. Else
they are in scope ``global``, and a second kernel merges them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.loads import mentions
from crossfuse.cascade.expressions.tir import to_tir
from crossfuse.cascade.rewrite.scripting import (
    NOWHERE,
    PLACE,
    Scratch,
    held,
    loop,
    named,
    stands_before,
    when,
    zero,
)
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


# Writes blocks of a tile: their loops, their loads, their registers.


#: The place of a block: the value of each of the site's variables.
At = Mapping[Any, Any]


@dataclass(frozen=True, eq=False)
class Local:
    """A buffer of a tile, in registers or shared memory, in coordinates of the site."""

    buffer: Any
    #: Of a place's element, over the site's variables.
    indices: tuple[Any, ...]

    def at(self, place: At) -> list[Any]:
        """Indices at a place."""
        return [put(each, place) for each in self.indices]

    def load(self, place: At) -> Any:
        """The element at a place."""
        return self.buffer[tuple(self.at(place))]

    def store(self, place: At, value: Any) -> None:
        """Statement: assign a value to the element at a place."""
        if str(value.ty) != str(self.buffer.ty.dtype):
            value = value.astype(str(self.buffer.ty.dtype))
        ir.script.buffer_store(self.buffer, value, self.at(place))


def put(expression: Any, place: At) -> Any:
    """An expression over the site's variables, at a place."""

    def replace(var: Any) -> Any:
        if var not in place:
            return var
        value = place[var]
        return value if str(value.ty) == str(var.ty) else value.astype(str(var.ty))

    return ir.substitute(expression, replace)


class BlockBuilder:
    """The context in which blocks of a tile are written.

    `extents` says how blocks iterate over loops of the site; `prefix` begins their names.
    """

    def __init__(
        self, context: TileContext, extents: Mapping[Any, Extent], prefix: str = ""
    ) -> None:
        self.context = context
        self.prefix = prefix
        self.extents = dict(extents)
        self.staged: list[tuple[Any, Local]] = []
        self.symbols: dict[sympy.Symbol, Local] = {}
        self.names: list[str] = []

    @contextmanager
    def block(
        self, name: str, spatial: Sequence[Any], reduced: Sequence[Any] = (), *, stores: Any = None
    ) -> Iterator[At]:
        """A block and the loops around it; yields its place.

        With `stores`, further conditions, it runs for valid places only.
        """
        with ExitStack() as stack:
            values: dict[Any, Any] = {}
            for var in (*spatial, *reduced):
                each = self.extents[var]
                values[var] = each.base
                if each.tile:
                    values[var] = each.base + stack.enter_context(loop(each.name, each.tile))
            stack.enter_context(ir.script.sblock(self._unique(name)))
            make = self._iterator
            kind = "spatial" if stores is None else "stored"
            place = {var: make(kind, var, values[var]) for var in spatial}
            place |= {var: make("reduce", var, values[var]) for var in reduced}
            if stores is not None:
                known = ir.sym.Analyzer()
                conditions = [*stores, *map(known.simplify, self.valid(values, spatial))]
                if conditions:
                    ir.script.where(ir.conjunction(conditions))
            yield place

    def _unique(self, name: str) -> str:
        self.names.append(name)
        number = self.names.count(name) - 1
        return f"{self.prefix}{name}_{number}" if number else f"{self.prefix}{name}"

    def _iterator(self, kind: str, var: Any, value: Any) -> Any:
        if kind == "stored":
            made = ir.script.axis.spatial(int(self.context.site.extents[var]), value)
        else:
            made = getattr(ir.script.axis, kind)(self.extents[var].domain, value)
        return named(f"v_{self.extents[var].name}", made)

    def valid(self, place: At, variables: Sequence[Any]) -> list[Any]:
        """Conditions that a place is no padding."""
        limits = [(place[each], self.extents[each].limit) for each in variables if each in place]
        return [value < limit for value, limit in limits if limit is not None]

    def local(
        self, name: str, variables: Sequence[Any], dtype: str, more: Sequence[int] = ()
    ) -> Local:
        """Allocate registers for a number of each place of some variables."""
        shape = (*(self.extents[each].domain for each in variables), *more)
        return Local(held(name, shape, dtype, "local"), tuple(variables))

    def read(self, expression: Any, place: At) -> Any:
        """An expression of the site at a place: staged elements from tiles, 0 beyond tensors."""

        def visit(load: Any, _: Any) -> Any:
            for original, tile in self.staged:
                if ir.tvm_ffi.structural_equal(original, load):
                    value = tile.load(place)
                    # Sums may be wider than the function keeps them; operators want its types.
                    same = load.same_as(expression) or value.ty == load.ty
                    return value if same else value.astype(str(load.ty))
            indices = [self.read(each, place) for each in load.indices]
            value = ir.tirx.BufferLoad(load.source, indices)
            used = [each for each in self.extents if mentions(load.indices, each)]
            conditions = self.valid(place, used)
            if not conditions:
                return value
            return ir.tirx.if_then_else(ir.conjunction(conditions), value, zero(str(value.ty)))

        return put(ir.mutate(expression, (ir.TensorLoad, visit)), place)

    def values(self, expression: sympy.Basic, place: At) -> dict[sympy.Symbol, Any]:
        """Values of all symbols of an expression at a place."""
        found: dict[sympy.Symbol, Any] = {}
        for symbol in expression.free_symbols:
            read = self.context.read(symbol)
            if symbol in self.symbols:
                found[symbol] = self.symbols[symbol].load(place)
            elif read is not None:
                found[symbol] = self.read(read, place)
        return found

    def write(self, expression: sympy.Basic, place: At, dtype: str = "") -> Any:
        """An expression of the derivation at a place."""
        return to_tir(expression, self.values(expression, place), dtype or self.context.dtype)
