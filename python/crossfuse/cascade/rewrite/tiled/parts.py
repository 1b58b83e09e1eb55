"""Splits the axis of a tile over several CTAs: partial states in slabs, and their merge.

Each CTA streams through a part of the axis and leaves its state in its slab, a part of a buffer
whose first dimension is the CTA. In a cluster slabs are in scope ``shared.dsm``, and each CTA
merges all slabs for a slice of the columns; a number of the row is merged by all of them. Else they
are in scope ``global``, and a second kernel merges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot, guarded, left, new, old, right
from crossfuse.cascade.rewrite.phases import share
from crossfuse.cascade.rewrite.scripting import held, loop
from crossfuse.cascade.rewrite.tiled.base_two import rebuilt
from crossfuse.cascade.rewrite.tiled.frame import TileFrame, whole
from crossfuse.cascade.rewrite.tiled.ground import Ground, Local
from crossfuse.cascade.rewrite.tiled.operands import Extent
from crossfuse.cascade.rewrite.tiled.state import State, width
from crossfuse.cascade.rewrite.tiled.steps import Factor, Guard, Keep
from crossfuse.markers import DSM_SCOPE

# Statements that merge two states; pure algebra.
#
# `left` is the state that is merged into, `right` the other one; `new` and `guarded` are of the
# merged state, `kept` is what a slot was before where it has changed already.


@dataclass(frozen=True)
class Combine:
    """A slot of the merged state; no expression for one that takes in elements one by one."""

    slot: Slot
    expression: sympy.Expr | None


def merge_steps(slots: Sequence[Slot]) -> tuple[Keep | Guard | Factor | Combine, ...]:
    """The statements of a merge, in order.

    Numbers that do not depend on a slot itself are computed before it, so that slots and columns
    share them.
    """
    found: list[Keep | Guard | Factor | Combine] = []
    known: dict[sympy.Symbol, sympy.Symbol] = {
        guarded(each.name): new(each.name) for each in slots if each.guard is None
    }
    factors: dict[sympy.Expr, sympy.Symbol] = {}
    for place, slot in enumerate(slots):
        after = [each.merge for each in slots[place + 1 :] if each.merge is not None]
        if any(left(slot.name) in each.free_symbols for each in after):
            found.append(Keep(slot))
        if slot.merge is None:
            found.append(Combine(slot, None))
        else:
            merge = _put(slot.merge, known)
            found.append(Combine(slot, _once(merge, slot, slots, factors, found)))
        known[left(slot.name)] = old(slot.name)
        if slot.guard is not None and any(
            guarded(slot.name) in each.free_symbols for each in after
        ):
            found.append(Guard(slot))
    return tuple(found)


def _once(
    merge: sympy.Expr,
    slot: Slot,
    slots: Sequence[Slot],
    factors: dict[sympy.Expr, sympy.Symbol],
    found: list[Keep | Guard | Factor | Combine],
) -> sympy.Expr:
    """A merge over numbers that are computed before; appends the statements that compute them."""
    parts = share([merge], [left(slot.name), right(slot.name)], slots)
    (expression,) = parts.expressions
    for symbol, each in reversed(parts.definitions):
        expression = expression.xreplace({symbol: each})
    named: dict[sympy.Symbol, sympy.Symbol] = {}
    for symbol, fixed in parts.fixed:
        each = fixed.xreplace(named)
        if each not in factors:
            factors[each] = sympy.Symbol(f"merge{len(factors)}", real=True)
            found.append(Factor(factors[each], each))
        named[symbol] = factors[each]
        expression = expression.xreplace({symbol: factors[each]})
    return expression


def _put(expression: sympy.Expr, images: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    return rebuilt(expression, lambda each: images.get(each) if each.is_Symbol else None)


class Slabs:
    """Partial states of CTAs that share an axis."""

    def __init__(self, frame: TileFrame, extents: dict[Any, Extent]) -> None:
        self.cta = ir.Var("cta", "int32")
        self.scope = "global" if frame.tiles.in_memory else DSM_SCOPE
        # A tile may have more rows than its group, which would be those of the next group. In a
        # cluster nobody else has its slabs.
        group = frame.rows.group if frame.tiles.in_memory else None
        self.group: tuple[Any, ...] = () if group is None else (group,)
        self.values: dict[str, Local] = {}
        self.places: dict[str, Local] = {}
        for slot in frame.slots:
            over = (*self.group, *frame.site.rows, *frame.columns_of(slot))
            shape = [frame.tiles.cluster, *(extents[each].domain for each in over)]
            indices: tuple[Any, ...] = (self.cta, *over)
            if slot.merge is None:
                shape.append(width(slot))
                self.places[slot.name] = self._slab(f"{slot.name}_index", shape, "int32", indices)
            self.values[slot.name] = self._slab(slot.name, shape, frame.dtype, indices)

    def _slab(self, name: str, shape: list[int], dtype: str, indices: tuple[Any, ...]) -> Local:
        return Local(held(f"{name}_slab", tuple(shape), dtype, self.scope), indices)

    def at(self, ground: Ground, cta: Any, count: int) -> None:
        """Select the CTA whose slab blocks access."""
        ground.extents[self.cta] = Extent("cta", count, 0, cta)

    def fill(self, state: State, cta: Any) -> None:
        """Store a CTA's state to its slab."""
        self.at(state.ground, cta, state.frame.tiles.cluster)
        for slot in state.frame.slots:
            over = [self.cta, *self.group, *state.places_of(slot)]
            with state.ground.block(f"{slot.name}_slab", over) as at:
                if slot.name not in self.places:
                    self.values[slot.name].store(at, state.state[slot.name].load(at))
                    continue
                with loop("p", width(slot)) as p:
                    value, place = state.selections[slot.name].load(at, p)
                    for slab, each in ((self.values, value), (self.places, place)):
                        local = slab[slot.name]
                        ir.script.buffer_store(local.buffer, each, [*local.at(at), p])


class Merge(State):
    """Merges the partial states of all CTAs to one; columns are those of the CTA's slice."""

    def __init__(self, ground: Ground, slabs: Slabs) -> None:
        super().__init__(ground)
        self.slabs = slabs
        for slot in self.frame.slots:
            ground.symbols[left(slot.name)] = self.state[slot.name]
            ground.symbols[right(slot.name)] = slabs.values[slot.name]
        self.steps = merge_steps(self.frame.slots)

    def run(self) -> None:
        """Merge slab after slab."""
        self.begin()
        count = self.frame.tiles.cluster
        with loop("cta", count) as cta:
            self.slabs.at(self.ground, cta, count)
            for each in self.steps:
                if isinstance(each, Keep):
                    self.keep(each)
                elif isinstance(each, Guard):
                    self.guard(each)
                elif isinstance(each, Factor):
                    more = [self.slabs.cta, *self.slabs.group]
                    self.define(each, self.rows, each.symbol.name, more)
                else:
                    self._combine(each)

    def _combine(self, statement: Combine) -> None:
        slot = statement.slot
        over, name = (*self.slabs.group, *self.places_of(slot)), slot.name
        with self.ground.block(f"{name}_merge", over, [self.slabs.cta]) as at:
            if statement.expression is not None:
                self.state[name].store(at, self.ground.write(statement.expression, at))
                return
            with loop("q", width(slot)) as q:
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
