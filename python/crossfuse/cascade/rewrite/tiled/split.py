"""Splits the axis of a tile over several CTAs: partial states in slabs, and their merge.

Each CTA streams through a part of the axis and leaves its state in its slab, a part of a buffer
whose first dimension is the CTA. In a cluster slabs are in scope ``shared.dsm``, and each CTA
merges all slabs for a slice of the columns; a number of the row is merged by all of them. Else they
are in scope ``global``, and a second kernel merges them.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import left, right
from crossfuse.cascade.rewrite.scripting import held, loop
from crossfuse.cascade.rewrite.tiled.block_builder import BlockBuilder, Local
from crossfuse.cascade.rewrite.tiled.operands import Extent
from crossfuse.cascade.rewrite.tiled.state import State, width
from crossfuse.cascade.rewrite.tiled.steps import Combine, Factor, merge_steps
from crossfuse.cascade.rewrite.tiled.tile_context import TileContext, whole
from crossfuse.markers import DSM_SCOPE


class Slabs:
    """Partial states of CTAs that share an axis."""

    def __init__(self, context: TileContext, extents: dict[Any, Extent]) -> None:
        self.cta = ir.Var("cta", "int32")
        self.scope = "global" if context.tiles.in_memory else DSM_SCOPE
        # A tile may have more rows than its group, which would be those of the next group. In a
        # cluster nobody else has its slabs.
        group = context.rows.group if context.tiles.in_memory else None
        self.group: tuple[Any, ...] = () if group is None else (group,)
        self.values: dict[str, Local] = {}
        self.places: dict[str, Local] = {}
        for slot in context.slots:
            over = (*self.group, *context.site.rows, *context.columns_of(slot))
            shape = [context.tiles.cluster, *(extents[each].domain for each in over)]
            indices: tuple[Any, ...] = (self.cta, *over)
            if slot.merge is None:
                shape.append(width(slot))
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
                with loop("p", width(slot)) as p:
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
