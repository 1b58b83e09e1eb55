"""Writes blocks of a tile: their loops, their loads, their registers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.loads import mentions
from crossfuse.cascade.expressions.tir import to_tir
from crossfuse.cascade.rewrite.scripting import held, loop, named, zero
from crossfuse.cascade.rewrite.tiled.tile_context import Extent, TileContext

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
