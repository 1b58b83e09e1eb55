"""Writes the outputs of a tile of rows, over its finished state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import guarded, new, value
from crossfuse.cascade.rewrite.phases import hoisted, is_risky, moderate
from crossfuse.cascade.rewrite.scripting import place_symbol
from crossfuse.cascade.rewrite.tiled.base_two import rebuilt
from crossfuse.cascade.rewrite.tiled.block_builder import Local
from crossfuse.cascade.rewrite.tiled.operands import Extent
from crossfuse.cascade.rewrite.tiled.state import State
from crossfuse.cascade.rewrite.tiled.steps import is_linear
from crossfuse.cascade.rewrite.tiled.tile_context import COLUMNS, PARTS, whole
from crossfuse.cascade.rewrite.tiles import tiles_refused
from crossfuse.cascade.site import OutputSite


class Results:
    """Writes the outputs of a tile, whose place is as in `extents_of`."""

    def __init__(self, state: State, place: dict[str, Any]) -> None:
        self.state = state
        self.builder = state.builder
        self.context = state.context
        self.place = place

    def write(self) -> None:
        """Write all outputs."""
        derivation = self.context.derivation
        expressions = {**derivation.results, **derivation.rows}
        self.state.finish({each for one in expressions.values() for each in one.free_symbols})
        for number, output in enumerate(self.context.site.outputs):
            along = output.name in derivation.rows
            if along and (self.context.count > 1 or self.context.tiles.cluster > 1):
                raise tiles_refused(
                    f"output {output.name}",
                    f"numbers of each element, in {self.context.count} tiles of the axis",
                    "one tile, which is still there when the state is finished",
                    f"pass elements={self.context.length}, or write it as a stream of threads",
                )
            self._output(output, expressions[output.name], number, along)

    def _output(self, output: OutputSite, expression: sympy.Expr, number: int, along: bool) -> None:
        over = [*self.context.site.rows, *([self.context.site.axis] if along else [])]
        for var in output.columns:
            if var not in self.builder.extents:
                extent = int(self.context.site.extents[var])
                self.builder.extents[var] = Extent("c", extent, extent, whole(0))
            over.append(var)
        expression = self._unguarded(expression)
        ranked = self._ranked(expression)
        if ranked:
            # Of one element there is no loop over ranks.
            self._rank(ranked, output.columns[-1] if output.columns else whole(0))
        left = expression if along or ranked else self._scaled(expression, f"out{number}_scale")
        name = f"{output.name}_store"
        with self.builder.block(name, over, stores=self._first(output)) as at:
            dtype = str(output.buffer.ty.dtype)
            made = self.builder.write(left, at, dtype if "int" in dtype else "")
            if str(made.ty) != dtype:
                made = made.astype(dtype)
            ir.script.buffer_store(
                output.buffer, made, [self.builder.read(each, at) for each in output.indices]
            )

    def _first(self, output: OutputSite) -> list[Any]:
        """Conditions on tile and slice: only the first ones store outputs without columns."""
        context, found = self.context, []
        for var, name in ((context.column, COLUMNS), (context.sliced, PARTS)):
            own = var is not None and any(each.same_as(var) for each in output.columns)
            if name in self.place and not own and (var is not None or name == PARTS):
                found.append(ir.tirx.EQ(self.place[name], 0))
        return found

    def _unguarded(self, expression: sympy.Expr) -> sympy.Expr:
        """Expand what stands in for elements of selections: each element has its own."""
        images = {
            guarded(each.name): rebuilt(each.guard, {new(each.name): value(each.name)}.get)
            for each in self.context.slots
            if each.name in self.state.selections and each.guard is not None
        }
        return rebuilt(expression, images.get)

    def _ranked(self, expression: sympy.Expr) -> list[str]:
        """Selections that an expression uses."""
        found = []
        for slot in self.context.slots:
            own = {value(slot.name), place_symbol(slot)}
            if slot.name in self.state.selections and expression.free_symbols & own:
                found.append(slot.name)
        return found

    def _rank(self, names: Sequence[str], var: Any) -> None:
        """Point the symbols of selections at the rank that the last column of an output counts."""
        for name in names:
            selection = self.state.selections[name]
            over = self.state.places_of(selection.slot)
            rank = var if selection.slot.monoid.k else whole(0)
            for symbol, local in (
                (value(name), selection.values),
                (place_symbol(selection.slot), selection.places),
            ):
                self.builder.symbols[symbol] = Local(local.buffer, (*over, rank))

    def _scaled(self, expression: sympy.Expr, name: str) -> sympy.Expr:
        """Hoist the parts of an output that are the same for a row."""
        columned = [each for each in self.context.slots if self.context.columns_of(each)]
        changing = {value(each.name) for each in columned} | self.context.columned
        own = [value(e.name) for e in columned if value(e.name) in expression.free_symbols]
        if not own:
            return expression
        slots = self.context.derivation.slots
        factor = expression
        risky = any(is_risky(each, moderate(slots)) for each in expression.atoms(sympy.Pow))
        linear = len(own) == 1 and is_linear(expression, own[0]) and not risky
        if linear:
            factor = rebuilt(expression, lambda each: sympy.S.One if each == own[0] else None)
        fixed, left = hoisted(factor, changing, slots)
        for place, (symbol, each) in enumerate(fixed):
            self._once(symbol, each, f"{name}{place}")
        return own[0] * left if linear else left

    def _once(self, symbol: sympy.Symbol, expression: sympy.Expr, name: str) -> None:
        rows = self.context.site.rows
        local = self.builder.local(name, rows, self.context.dtype)
        with self.builder.block(f"{name}_make", rows) as at:
            local.store(at, self.builder.write(expression, at))
        self.builder.symbols[symbol] = local
