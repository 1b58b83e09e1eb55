"""Shared by all blocks of a tile form: its products, its loops over tiles, sizes, the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.loads import mentions
from crossfuse.cascade.detect.program import Program, read_program
from crossfuse.cascade.rewrite.context import Context
from crossfuse.cascade.rewrite.tiled.skipping import limited, masks_by
from crossfuse.cascade.rewrite.tiled.steps import Statement, base_two, operands, steps
from crossfuse.cascade.rewrite.tiles import CascadeTiles, tiles_refused
from crossfuse.cascade.spec import Derivation, Site, Slot, guarded, new, value


@dataclass(frozen=True, eq=False)
class Product:
    """A product over another axis that makes an element."""

    #: The element.
    symbol: sympy.Symbol
    #: Where the cascade reads it, over variables of the site.
    result: Any
    #: Operand of the row, over variables of the site and `depth`.
    left: Any
    #: Operand of the axis, over the same.
    right: Any
    #: Loops that are summed.
    depth: tuple[Any, ...]
    #: Of `depth`.
    extents: tuple[int, ...]


@lru_cache(maxsize=64)  # sites are told apart as objects, and asked for with one size after another
def products(site: Site) -> tuple[Product, ...]:
    """The products that make elements of a cascade.

    Refused is a block that is no sum of products of two inputs, one of the row and one of the axis.
    """
    if not site.producers:
        return ()
    program = read_program(site.function)
    return tuple(_product(site, program, symbol) for symbol in site.producers)


def _product(site: Site, program: Program, symbol: sympy.Symbol) -> Product:
    made = [(each, program.reduction(each.source)) for each in ir.buffer_loads(site.reads[symbol])]
    result, block = next((each, block) for each, block in made if block is not None)
    bound = dict(zip(block.coordinates, result.indices, strict=True))
    value = ir.substitute(program.value(block), lambda var: bound.get(var, var))
    factors = [_stripped(each) for each in _factors(value)]
    inputs = set(site.function.params)
    plain = all(isinstance(each, ir.TensorLoad) and each.source in inputs for each in factors)
    right = [e for e in factors if mentions(getattr(e, "indices", ()), site.axis)]
    left = [each for each in factors if not any(each is other for other in right)]
    if block.combine != "sum" or not plain or len(left) != 1 or len(right) != 1:
        raise tiles_refused(
            f"block '{block.name}'",
            f"a {block.combine} of {value}",
            "a sum of products of two inputs: one of the row, one of the axis",
            "compute what is multiplied before, and scales of the result after",
        )
    extents = tuple(block.domain[each] for each in block.summed)
    return Product(symbol, result, left[0], right[0], block.summed, extents)


def _factors(value: Any) -> list[Any]:
    value = _stripped(value)
    if isinstance(value, ir.tirx.Mul):
        return _factors(value.a) + _factors(value.b)
    return [value]


def _stripped(value: Any) -> Any:
    """An expression without conversions around it."""
    return _stripped(value.value) if isinstance(value, ir.tirx.Cast) else value


def column_variables(site: Site) -> tuple[Any, ...]:
    """Loops over columns of stages, each once."""
    found: list[Any] = []
    for stage in site.stages.values():
        found += [each for each in stage.columns if not any(each.same_as(o) for o in found)]
    return tuple(found)


def columned_by(site: Site, columns: Sequence[Any]) -> frozenset[sympy.Symbol]:
    """Elements and invariants that change from column to column."""
    return frozenset(
        symbol
        for symbol, read in site.reads.items()
        if any(mentions([read], each) for each in columns)
    )


# Geometry of tiles: rows that share the right operands, and loops cut into tiles.


@dataclass(frozen=True, eq=False)
class Rows:
    """The loop whose iterations are the rows of a tile: they share all right operands."""

    #: A row loop of the site.
    var: Any
    #: Rows that share right operands, which tiles divide.
    extent: int
    #: Counts groups where only groups of rows share: the heads of queries of one head of keys. None
    #: where all do.
    group: Any
    #: Number of groups.
    groups: int

    def shared(self, expression: Any) -> Any:
        """An index of a right operand, rewritten so that it is the same for all rows of a group."""
        if self.group is None:
            return expression
        first = self.group * self.extent

        def put(var: Any) -> Any:
            return first if var.same_as(self.var) else var

        known = ir.sym.Analyzer()
        known.bind(self.group, ir.tvm.ir.Range(0, self.groups))
        return known.simplify(ir.substitute(expression, put))


@dataclass(frozen=True, eq=False)
class Extent:
    """How blocks iterate over a loop of the site."""

    #: Of the loop over a tile.
    name: str
    #: Number of values that the loop may have, those beyond the valid ones included.
    domain: int
    #: Iterations of a tile; 0 for one value.
    tile: int
    #: The tile's first value.
    base: Any
    #: Values from here on are not valid; None if all of a tile's are.
    limit: Any = None


def find_rows(site: Site, right: Sequence[Any]) -> Rows:
    """Choose the loop whose iterations are the rows of a tile.

    Of the loops whose rows share all right operands it is the one with most rows, of equals the
    innermost.
    """
    found = [_rows(var, site, right) for var in reversed(site.rows)]
    return max(found, key=lambda each: each.extent)


def _rows(var: Any, site: Site, right: Sequence[Any]) -> Rows:
    extent = int(site.extents[var])
    indices = [index for load in right for index in load.indices]
    if not mentions(indices, var):
        return Rows(var, extent, None, 1)
    divisors: set[int] = set()

    def visit(node: Any, mutator: Any) -> Any:
        by = ir.constant(node.b)
        if node.a.same_as(var) and by is not None:
            divisors.add(by)
            return ir.tirx.const(0, str(node.ty))
        return mutator.default_mutate(node)

    without = [ir.mutate(each, (ir.tirx.FloorDiv, visit)) for each in indices]
    share = divisors.pop() if len(divisors) == 1 and not mentions(without, var) else 1
    share = share if extent % share == 0 else 1
    return Rows(var, share, ir.Var(f"{var.name}_group", str(var.ty)), extent // share)


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
    def groups(self) -> tuple[Any, ...]:
        """The loop over groups of rows, if not all rows share right operands."""
        return () if self.rows.group is None else (self.rows.group,)

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
        return columned_by(self.site, self.columns)

    @cached_property
    def steps(self) -> tuple[Statement, ...]:
        """Statements of a tile on the state."""
        return steps(self.slots, self.columned & set(self.site.cascade.elements))

    @cached_property
    def masks_by_key(self) -> bool:
        """Whether memory says of elements, whatever the row of a tile, that they are masked."""

        def reads(symbols: Set[sympy.Symbol]) -> bool:
            found = [self.read(each) for each in symbols]
            if any(each is None or not ir.buffer_loads(each) for each in found):
                return False
            loads = [load for each in found for load in ir.buffer_loads(each)]
            along = any(mentions([each], self.site.axis) for each in loads)
            return along and not any(mentions([each], self.rows.var) for each in loads)

        return masks_by(self.slots, reads)

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
    columns = columned_by(site, column_variables(site)) & set(site.cascade.elements)
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
