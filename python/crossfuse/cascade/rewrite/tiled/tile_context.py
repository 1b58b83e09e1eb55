"""Shared by all blocks of a tile form: sizes, loops, operands, the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Derivation, Slot, guarded, new, value
from crossfuse.cascade.rewrite.context import Context
from crossfuse.cascade.rewrite.tiled.base_two import base_two
from crossfuse.cascade.rewrite.tiled.operands import (
    Extent,
    Product,
    Rows,
    column_variables,
    columned,
    find_rows,
    mentions,
    products,
)
from crossfuse.cascade.rewrite.tiled.skipping import limited
from crossfuse.cascade.rewrite.tiled.steps import Statement, operands, steps
from crossfuse.cascade.rewrite.tiles import CascadeTiles, tiles_refused
from crossfuse.cascade.site import Site

#: Names of the loops over tiles: of rows, of columns, of the axis, of the depth of its elements.
ROWS, COLUMNS, STEPS, DEPTH = "row_tile", "column_tile", "t", "k"
#: Name of the loop over the CTAs of a cluster, each of which takes a part of the axis.
PARTS = "part"
#: Types of fewer bits have too small a range for numbers that are not scaled.
FEW_BITS = 16


@dataclass(frozen=True, eq=False)
class TileContext(Context):
    """A cascade that is cut into tiles.

    Its derivation is to the base of two; contributions beyond the axis change nothing.
    """

    #: Sizes, all chosen.
    tiles: CascadeTiles
    #: Rows of a tile.
    rows: Rows
    #: Products that make elements.
    products: tuple[Product, ...]
    #: The axis's index, which bounds of the last tile are written with.
    index: sympy.Symbol

    @property
    def count(self) -> int:
        """Tiles of the axis."""
        return -(-self.length // self.tiles.elements)

    @property
    def one_product_of_whole_rows(self) -> bool:
        """Whether a pipelined product makes whole rows, and nothing is multiplied after it."""
        return self.tiles.makes_whole_rows(self.length)

    @property
    def row_tiles(self) -> int:
        """Tiles of the rows (of a group)."""
        return -(-self.rows.extent // self.tiles.rows)

    @property
    def places(self) -> int:
        """Tiles of all rows and columns: CTAs, if none share an axis."""
        return self.row_count // self.rows.extent * self.row_tiles * self.column_tiles

    @property
    def column(self) -> Any:
        """The loop over columns that tiles divide; None if each tile has all of them."""
        found = self.columns
        if not found or self.widest <= self.tiles.columns:
            return None
        return max(found, key=lambda each: int(self.site.extents[each]))

    @property
    def column_tiles(self) -> int:
        """Tiles of the columns."""
        return 1 if self.column is None else -(-self.widest // self.tiles.columns)

    @property
    def sliced(self) -> Any:
        """The loop over columns of which each CTA of a cluster merges a slice; None without any."""
        if self.tiles.cluster == 1 or self.tiles.in_memory or not self.columns:
            return None
        return max(self.columns, key=lambda each: int(self.site.extents[each]))

    @property
    def widest(self) -> int:
        """Columns of the widest result."""
        return max((int(self.site.extents[each]) for each in self.columns), default=0)

    @cached_property
    def columns(self) -> tuple[Any, ...]:
        """Loops over columns."""
        return column_variables(self.site)

    @cached_property
    def columned(self) -> frozenset[sympy.Symbol]:
        """Elements and invariants that change from column to column."""
        return columned(self.site)

    @cached_property
    def steps(self) -> tuple[Statement, ...]:
        """Statements of a tile on the state."""
        return steps(self.slots, self.columned & set(self.site.cascade.elements))

    def columns_of(self, slot: Slot) -> tuple[Any, ...]:
        """Loops over the columns of a slot."""
        read = [self.site.reads[s] for s in slot.contribution.free_symbols if s in self.site.reads]
        return tuple(each for each in self.columns if mentions(read, each))

    def cast(self, slot: Slot, right: str) -> str:
        """Type that the left operand of a slot is rounded to; `right` if the function has none."""
        stages = {f.slot: step.stage for step in self.derivation.steps for f in step.factors}
        name = stages.get(slot.name, slot.name)
        casts = {each.name: each.cast for each in self.site.cascade.stages}
        return casts.get(name, "") or right

    def read(self, symbol: sympy.Symbol) -> Any:
        """The expression of a symbol over the site's variables; None for symbols of the state."""
        return self.site.axis if symbol == self.index else self.site.reads.get(symbol)


def tile_context(site: Site, derivation: Derivation, tiles: CascadeTiles) -> TileContext:
    """Analyse a cascade for tiles, and choose the sizes that `tiles` leaves open.

    Refused are a cascade without products, and sizes that do not fit.
    """
    made = products(site)
    columns = columned(site) & set(site.cascade.elements)
    rows = find_rows(site, _right_operands(site, made, columns))
    widest = max((int(site.extents[each]) for each in column_variables(site)), default=0)
    depth = max((each.extents[0] for each in made), default=0)
    length = int(site.extents[site.axis])
    sizes = tiles.complete(rows.extent, length, widest, depth)
    index = site.cascade.index or sympy.Symbol("position", integer=True, nonnegative=True)
    told = base_two(derivation)
    slots = _ordered(told.slots, columns)
    if length % sizes.elements:
        zeros = [
            e for e in site.cascade.elements if e in site.reads and ir.buffer_loads(site.reads[e])
        ]
        slots = limited(slots, index < length, zeros)
    context = TileContext(site, replace(told, slots=slots), sizes, rows, made, index)
    if context.column is not None and len(context.columns) > 1:
        raise tiles_refused(
            "tiles, columns",
            f"{sizes.columns} of {widest}, where results have different columns",
            "all columns in a tile",
            f"pass columns={widest}",
        )
    for slot in slots:
        if context.columns_of(slot):
            _check_rounding(context, slot)
    return context


def _right_operands(
    site: Site, made: tuple[Product, ...], columns: frozenset[sympy.Symbol]
) -> list[Any]:
    """Right operands of products; refused if there are none, or no rows."""
    right = [each.right for each in made]
    right += [load for symbol in _sorted(columns) for load in ir.buffer_loads(site.reads[symbol])]
    if not right:
        raise tiles_refused(
            "function",
            "a cascade without products",
            "elements that a product makes, or results with columns",
            "write it as a stream of threads (crossfuse.cascade.rewrite.streaming)",
        )
    if not site.rows:
        raise tiles_refused(
            "function",
            "results of a single row, without a loop over rows",
            "at least one loop that all reductions have",
            "keep a loop over one row, or leave the function to a stream of threads",
        )
    return right


def _check_rounding(context: TileContext, slot: Slot) -> None:
    """Refuse to round to few bits what has more, unless the state scales it so that it fits."""
    left, right = operands(slot, context.columned & set(context.site.cascade.elements))
    read = context.read(left) if left.is_Symbol else None
    dtype = context.cast(slot, str(ir.buffer_loads(context.read(right))[0].ty))
    known = read is not None and str(read.ty) == dtype
    state = {form(each.name) for each in context.slots for form in (value, new, guarded)}
    if int(ir.tvm.DataType(dtype).bits) < FEW_BITS and not known and not left.free_symbols & state:
        raise tiles_refused(
            f"slot {slot.name}",
            f"{left} rounded to {dtype}",
            "numbers that the state so far scales, such as by the largest magnitude",
            "keep the scale in the term, or multiply in a wider type",
        )


def _ordered(slots: tuple[Slot, ...], columns: frozenset[sympy.Symbol]) -> tuple[Slot, ...]:
    """Sort slots, those of rows first: no slot depends on those with columns."""
    return tuple(sorted(slots, key=lambda each: bool(each.contribution.free_symbols & columns)))


def _sorted(symbols: frozenset[sympy.Symbol]) -> list[sympy.Symbol]:
    return sorted(symbols, key=lambda each: each.name)


def extents_of(context: TileContext, place: Mapping[str, Any]) -> dict[Any, Extent]:
    """How blocks of a tile iterate over loops of the site, but the axis and depths.

    The place of the tile maps names to values: row loops, `ROWS` and `COLUMNS` for which tile of
    rows and columns it is, and `PARTS` for the CTA that has a slice of columns.
    """
    rows, size = context.rows, context.tiles.rows
    found: dict[Any, Extent] = {}
    for var in context.site.rows:
        if not var.same_as(rows.var):
            found[var] = Extent(var.name, int(context.site.extents[var]), 0, place[var.name])
    base: Any = whole(0) if context.row_tiles == 1 else place[ROWS] * size
    limit: Any = rows.extent
    if rows.group is not None:
        group = place[rows.group.name]
        found[rows.group] = Extent(rows.group.name, rows.groups, 0, group)
        base, limit = group * rows.extent + base, group * rows.extent + rows.extent
    domain = (rows.groups - 1) * rows.extent + context.row_tiles * size
    ragged = rows.extent % size
    found[rows.var] = Extent("i", domain, size, base, limit if ragged else None)
    for var in context.columns:
        found[var] = _column(context, var, place)
    return found


def _column(context: TileContext, var: Any, place: Mapping[str, Any]) -> Extent:
    """How blocks iterate over columns: a slice of them if the place has `PARTS`."""
    extent = int(context.site.extents[var])
    tiled = context.column is not None and var.same_as(context.column)
    size = context.tiles.columns if tiled else extent
    first = place[COLUMNS] * size if tiled else whole(0)
    domain = context.column_tiles * size if tiled else extent
    ragged = domain != extent
    if context.sliced is None or not var.same_as(context.sliced):
        return Extent("c", domain, size, first, extent if ragged else None)
    width = context.tiles.slice_of(size)
    # Slices of the last tile may reach beyond it, and so may the slabs that they are merged of.
    domain += width * context.tiles.cluster - size
    if PARTS not in place:
        return Extent("c", domain, size, first, extent if ragged else None)
    ends = [first + size] if width * context.tiles.cluster != size else []
    ends += [whole(extent)] if ragged else []
    limit = None if not ends else ir.tirx.min(*ends) if len(ends) > 1 else ends[0]
    return Extent("c", domain, width, first + place[PARTS] * width, limit)


def whole(number: int) -> Any:
    """An integer as an index."""
    return ir.tirx.const(number, "int32")
