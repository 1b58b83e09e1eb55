"""Counts what a cascade moves, holds and computes, fused and unfused, for the planner's estimates.

Functions load TVM when they are called: the planner imports the numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import sympy

if TYPE_CHECKING:
    from crossfuse.cascade.rewrite.tiled.tile_context import TileContext
    from crossfuse.cascade.spec import Derivation, Site

# Bytes, and the arithmetic of an element of the axis.

#: Functions that take more than one instruction of the special-function units.
_SEVERAL = {sympy.tanh: 2}
#: Functions that these units compute, beside powers that are no products.
_SPECIAL = (sympy.exp, sympy.log, sympy.tanh, sympy.sin, sympy.cos)


def item_bytes(dtype: str) -> int:
    """Bytes of an element in memory."""
    from crossfuse import _tvm as ir

    return ir.item_bytes(dtype)


def _item(loads: Iterable[Any], otherwise: int) -> int:
    """Bytes of the widest of some loads; without any another number."""
    return max((item_bytes(str(each.ty)) for each in loads), default=otherwise)


def _bytes(buffer: Any) -> int:
    return prod(int(each) for each in buffer.ty.shape) * item_bytes(str(buffer.ty.dtype))


def _sources(loads: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for load in loads:
        if not any(load.source.same_as(each) for each in found):
            found.append(load.source)
    return found


def exponentials(expressions: Iterable[sympy.Expr], elements: Iterable[sympy.Symbol]) -> int:
    """Instructions of the special-function units for each element, each value computed once.

    `elements` change along the axis; anything else is computed once a row and is not counted.
    """
    moving = set(elements)
    found = {each for each in _parts(expressions, moving) if _is_special(each)}
    return sum(_SEVERAL.get(each.func, 1) for each in found)


def operations(expressions: Iterable[sympy.Expr], elements: Iterable[sympy.Symbol]) -> int:
    """Additions, products and comparisons of each element; a multiply-add counts as one.

    Conditions of masks are not counted.
    """
    moving = set(elements)
    return sum(_count(each, moving) for each in set(_parts(expressions, moving)))


def chooses(expressions: Iterable[sympy.Expr], elements: Iterable[sympy.Symbol]) -> bool:
    """Whether each element is told from others by a condition, such as a label."""
    return any(isinstance(each, sympy.Piecewise) for each in _parts(expressions, set(elements)))


def _parts(expressions: Iterable[sympy.Expr], moving: set[sympy.Symbol]) -> list[sympy.Basic]:
    """Parts of expressions that change along the axis, but for conditions."""
    found: list[sympy.Basic] = []

    def visit(part: sympy.Basic) -> None:
        if not part.free_symbols & moving:
            return
        found.append(part)
        inner = [each for each, _ in part.args] if isinstance(part, sympy.Piecewise) else part.args
        for each in inner:
            visit(each)

    for each in expressions:
        visit(each)
    return found


def _is_special(part: sympy.Basic) -> bool:
    if isinstance(part, sympy.Pow):
        return not (part.exp.is_Integer and part.exp > 0)
    return isinstance(part, _SPECIAL)


def _count(part: sympy.Basic, moving: set[sympy.Symbol]) -> int:
    if isinstance(part, sympy.Pow):
        return int(part.exp) - 1 if part.exp.is_Integer and part.exp > 0 else 0
    if not isinstance(part, sympy.Add | sympy.Mul | sympy.Max | sympy.Min):
        return 0
    changing = [each for each in part.args if each.free_symbols & moving]
    # What does not change is one number; a sign is part of the instruction.
    fixed = [each for each in part.args if each not in changing and each != -1]
    terms = len(changing) + bool(fixed) - 1
    if isinstance(part, sympy.Add):
        products = sum(isinstance(_chosen(each), sympy.Mul) for each in changing)
        # A product of two that is added is one instruction, which `_count` of it has counted.
        return max(0, terms - products)
    return terms


def _chosen(part: sympy.Basic) -> sympy.Basic:
    return part.args[0][0] if isinstance(part, sympy.Piecewise) else part


# A stream of threads.

#: Bytes of a register.
_REGISTER = 4
#: The type of which `crossfuse.lower.buffers` packs two into a register.
_PACKED = "bfloat16"


@dataclass(frozen=True)
class Work:
    """A cascade in numbers; bytes and registers are those of its streams along the axis."""

    #: Rows of the cascade.
    rows: int
    #: Elements of a row.
    length: int
    #: Elements that a thread takes in side by side.
    vector: int
    #: Bytes of an element that no other row reads, of all that the state takes in.
    read: int
    #: Bytes of an element that outputs over the axis need again.
    kept: int = 0
    #: Bytes of an element that only outputs need, and no other row reads.
    late: int = 0
    #: Bytes of an element that outputs over the axis write.
    written: int = 0
    #: Bytes of a vector that the state takes in.
    fetched: int = 16
    #: Registers that a vector takes while the state takes it in.
    swept: int = 4
    #: Registers of a vector that outputs need again.
    held: int = 0
    #: Registers of a vector of everything that outputs need.
    emitted: int = 0
    #: Whether registers hold two elements each, which takes as many again to compute with.
    unpacked: bool = False
    #: Registers of a vector of contributions that outputs use again; see
    #: `crossfuse.cascade.rewrite.context.reusing`.
    reused: int = 0
    #: Operations of an element that these spare.
    spared: int = 0
    #: Whether outputs over the axis choose by element.
    chosen: bool = False
    #: Registers of a vector of what is added up over rows, from one row to the next.
    summed: int = 0
    #: Numbers of the state.
    slots: int = 2
    #: Instructions of an element on the special-function units.
    exponentials: int = 0
    #: Other instructions of an element.
    operations: int = 0

    @property
    def outputs(self) -> bool:
        """Whether there are outputs over the axis, stored or added up."""
        return self.written > 0 or self.summed > 0


def work_of(site: Site, derivation: Derivation) -> Work:
    """Count the bytes, registers and operations of a cascade as a stream."""
    from crossfuse.cascade.rewrite.context import reusing, stream_context
    from crossfuse.cascade.rewrite.scripting import numbers
    from crossfuse.cascade.rewrite.tiles import StreamTiles
    from crossfuse.cascade.spec import value

    context = stream_context(site, derivation, StreamTiles())
    swept, emitted = context.swept, context.emitted
    again = [each for each in emitted if any(each.same(other) for other in swept)]
    late = [each for each in emitted if each not in again]
    vector = context.mapping.vector
    elements = site.cascade.elements
    # An element's distance from the mean so far, of that mean alone, hides behind loads: on an H200
    # seven streams took at most 1 % longer with it (benchmarks/results/means-h200.txt).
    taken = [each.contribution.xreplace({value(each.name): 0}) for each in derivation.slots]
    given = list(derivation.rows.values())
    shorter, reused = reusing(derivation)
    left = operations(list(shorter.rows.values()), (*elements, *reused.values()))
    along = [each for each in site.stored if each.name in derivation.rows]
    return Work(
        context.row_count,
        context.length,
        vector,
        read=_moved(each for each in swept if _of_row(each, site)),
        kept=_moved(again),
        late=_moved(each for each in late if _of_row(each, site)),
        written=sum(item_bytes(each.dtype) for each in along),
        fetched=_moved(swept) * vector,
        swept=_registers(swept),
        held=_registers(again),
        emitted=_registers(emitted),
        unpacked=any(_is_packed(each) for each in swept),
        reused=vector * len(reused),
        spared=max(0, operations(given, elements) - left),
        chosen=chooses(given, elements),
        summed=vector * (len(site.outputs) - len(site.stored)),
        slots=sum(len(numbers(each, context.dtype)) for each in derivation.slots),
        # What outputs compute again is computed in a second sweep.
        exponentials=exponentials(taken, elements) + exponentials(given, elements),
        operations=len(taken) + operations(taken, elements) + operations(given, elements),
    )


def _moved(streams: Iterable[Any]) -> int:
    return sum(item_bytes(each.dtype) * each.width for each in streams)


def _is_packed(stream: Any) -> bool:
    return stream.dtype == _PACKED and stream.lanes > 1


def _registers(streams: Iterable[Any]) -> int:
    """Registers of a vector; an element takes one at least, unless two are packed."""
    found = 0
    for each in streams:
        whole = each.elements * max(1, item_bytes(each.dtype) // _REGISTER)
        found += whole // 2 if _is_packed(each) else whole
    return found


def _of_row(stream: Any, site: Any) -> bool:
    """Whether a stream depends on the row; scales of a norm do not, and stay in L2."""
    from crossfuse.cascade.detect.loads import mentions

    return any(mentions(load.indices, row) for load in stream.loads for row in site.rows)


# A stream over tiles.

#: Rows at which bounds of the axis are sampled; the planner interpolates between them.
_SAMPLES = 65
#: Instructions to compare and exchange an element with each of the best so far.
_CHOICE = 3


@dataclass(frozen=True)
class TileWork:
    """A cascade with products in numbers."""

    #: Sets of rows that share right operands.
    groups: int
    #: Rows of each group.
    rows: int
    #: Elements of the axis.
    length: int
    #: Elements that the product that makes the axis's elements sums; 0 where these are loaded.
    depth: int = 0
    #: Columns of the widest result; 0 without a second product.
    columns: int = 0
    #: Bytes of an element of the left operand (or of a loaded element).
    left: int = 2
    #: Bytes of an element of the right operand.
    right: int = 2
    #: Bytes of an element of the second product's right operand.
    value: int = 2
    #: Bytes of all results of a row.
    result: int = 0
    #: Bytes of all tensors that are read, each once.
    inputs: int = 0
    #: Bytes of an element in the second product; in the first where there is none.
    item: int = 2
    #: Whether the right operands of both products are one tensor.
    same: bool = False
    #: Instructions of an element on the special-function units.
    exponentials: int = 0
    #: Other instructions of an element.
    operations: int = 0
    #: Conditions of an element; where they bound the axis, of tiles that are not all needed.
    masks: int = 0
    #: Rows of a group, ascending, with the first element that each needs and the one behind the
    #: last; none where all are needed.
    spans: tuple[tuple[int, int, int], ...] = ()
    #: Numbers of the state of a row without columns.
    slots: int = 2
    #: Arrays of registers for elements of a tile, of scores and of what is made of them.
    arrays: int = 1


def tile_work_of(site: Site, derivation: Derivation) -> TileWork:
    """Count the bytes and operations of a cascade with products; refused without a tile form."""
    from crossfuse import _tvm as ir
    from crossfuse.cascade.rewrite.tiled.tile_context import tile_context
    from crossfuse.cascade.rewrite.tiles import CascadeTiles

    context = tile_context(site, derivation, CascadeTiles())
    made = context.products
    loads = ir.buffer_loads
    elements = [each for each in site.cascade.elements if each in site.reads]
    columned = [each for each in elements if each in context.columned]
    own = [load for each in elements if each not in columned for load in loads(site.reads[each])]
    values = [load for each in columned for load in loads(site.reads[each])]
    lefts, rights = [each.left for each in made], [each.right for each in made]
    value = _item(values, 2)
    rows = prod(int(site.extents[each]) for each in site.rows)
    read, parameters = _sources([*lefts, *rights, *own, *values]), set(site.function.params)
    return TileWork(
        groups=rows // context.rows.extent,
        rows=context.rows.extent,
        length=context.length,
        depth=max((each.extents[0] for each in made), default=0),
        columns=context.widest,
        left=_item(lefts or own, 2),
        right=_item(rights, 2),
        value=value,
        result=sum(
            item_bytes(each.dtype) * prod(int(site.extents[column]) for column in each.columns)
            for each in site.outputs
        ),
        inputs=sum(_bytes(each) for each in read if each in parameters),
        item=value if values else _item(lefts, 2),
        same=any(one.source.same_as(other.source) for one in rights for other in values),
        **_arithmetic(context),
        spans=_spans(context),
        slots=sum(not context.columns_of(each) for each in context.slots),
        arrays=_arrays(context),
    )


def _arrays(context: TileContext) -> int:
    """Arrays of the tiles that the statements of a step make of the product's elements."""
    from crossfuse.cascade.rewrite.tiled.steps import Multiply, Tile
    from crossfuse.cascade.rewrite.tiles import arrays_of

    tiles = {each.symbol: 0 for each in context.products}
    found = []
    for each in context.steps:
        expression = each.left if isinstance(each, Multiply) else getattr(each, "expression", None)
        symbols = set() if expression is None else expression.free_symbols
        reads = frozenset(tiles[symbol] for symbol in symbols if symbol in tiles)
        made = tiles.setdefault(each.symbol, len(tiles)) if isinstance(each, Tile) else None
        found.append((made, reads))
    return 1 + max(arrays_of(found).values())


def _arithmetic(context: TileContext) -> dict[str, int]:
    from crossfuse.cascade.rewrite.tiled.steps import Multiply, Reduce, Tile

    moving = set(context.site.cascade.elements)
    written, plain = [], 0
    for each in context.steps:
        if isinstance(each, Tile):
            moving |= {each.symbol}
        if isinstance(each, Tile | Reduce):
            written.append(each.expression)
        if isinstance(each, Reduce):
            plain += 1 + _CHOICE * each.slot.monoid.k
        # What is multiplied is rounded first.
        plain += isinstance(each, Multiply)
    conditions = {part for each in written for part in each.atoms(sympy.core.relational.Relational)}
    return {
        "exponentials": exponentials(written, moving),
        "operations": plain + operations(written, moving),
        "masks": sum(bool(each.free_symbols & moving) for each in conditions),
    }


def _spans(context: TileContext) -> tuple[tuple[int, int, int], ...]:
    """Elements that some rows need, by the bounds of masks on the axis."""
    from crossfuse.cascade.rewrite.tiled.skipping import span

    rows, length = context.rows.extent, context.length
    symbols = {
        symbol
        for symbol in context.site.cascade.invariants
        if symbol.is_integer
        and getattr(context.read(symbol), "same_as", lambda other: False)(context.rows.var)
    }
    found = span(context.slots, context.index, {each: (each, each) for each in symbols})
    if not found.lower and not found.upper:
        return ()
    places = sorted({round(i * (rows - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)})

    def at(bound: sympy.Expr, row: int) -> int:
        return int(bound.subs(dict.fromkeys(symbols, row)))

    return tuple(
        (
            row,
            max(0, *(at(each, row) for each in found.lower), 0),
            min(length, *(at(each, row) + 1 for each in found.upper), length),
        )
        for row in places
    )


# Separate kernels.


@dataclass(frozen=True)
class Pass:
    """One kernel of a cascade as written, one reduction after another."""

    #: Of its result.
    name: str
    #: Bytes, as those written.
    read: int
    written: int
    #: Multiplications and additions of its matrix product.
    flops: int = 0


def passes_of(site: Site) -> tuple[Pass, ...]:
    """List the kernels of a cascade that is not fused, in order.

    A product that makes elements is a kernel. Independent reductions share one; each other one
    waits for those that it uses. The left operand of a result with columns is written before it is
    multiplied. Outputs over the axis are the last kernel.
    """
    return tuple(_Counter(site).run())


class _Counter:
    def __init__(self, site: Site) -> None:
        from crossfuse.cascade.rewrite.tiled.tile_context import products

        self.site = site
        self.rows = prod(int(site.extents[each]) for each in site.rows)
        self.length = int(site.extents[site.axis])
        self.products = {each.symbol: each for each in products(site)}

    def run(self) -> list[Pass]:
        found = [self._made(symbol) for symbol in self.site.producers]
        levels: dict[int, list[str]] = {}
        depth: dict[str, int] = {}
        for stage in self.site.cascade.stages:
            names = {each.name for each in stage.term.free_symbols}
            depth[stage.name] = 1 + max((depth[each] for each in names & depth.keys()), default=0)
            levels.setdefault(depth[stage.name], []).append(stage.name)
        for level in sorted(levels):
            plain = [each for each in levels[level] if not self.site.stages[each].columns]
            found += [self._reduced(plain)] if plain else []
            for name in levels[level]:
                if name not in plain:
                    found += self._multiplied(name)
        return found + self._outputs() + self._sums()

    def _made(self, symbol: sympy.Symbol) -> Pass:
        """The product that makes an element; its result has the type of its operands."""
        made, item = self.products[symbol], self._item_of(symbol)
        count = self.rows * self.length
        read = sum(_bytes(each.source) for each in (made.left, made.right))
        return Pass(self.site.producers[symbol], read, count * item, 2 * count * made.extents[0])

    def _reduced(self, names: list[str]) -> Pass:
        stages = map(self.site.cascade.stage, names)
        used = set().union(*(each.term.free_symbols for each in stages))
        return Pass(", ".join(names), self._read(used), 4 * self.rows * len(names))

    def _multiplied(self, name: str) -> list[Pass]:
        """The kernel of the left operand, and the product."""
        from crossfuse.cascade.rewrite.tiled.tile_context import columned_by

        over = self.site.stages[name].columns
        used = self.site.cascade.stage(name).term.free_symbols
        columned = used & columned_by(self.site, over)
        columns = prod(int(self.site.extents[each]) for each in over)
        item = min((self._item_of(each) for each in columned), default=4)
        operand = self.rows * self.length * item
        right = self._read(columned)
        product = Pass(
            name,
            operand + right,
            self.rows * columns * item,
            2 * self.rows * self.length * columns,
        )
        return [Pass(f"operand of {name}", self._read(used - columned), operand), product]

    def _outputs(self) -> list[Pass]:
        rows = self.site.cascade.rows
        along = [each for each in self.site.stored if each.name in rows]
        if not along:
            return []
        used = set().union(*(rows[each.name].free_symbols for each in along))
        written = sum(_bytes(each.buffer) for each in along)
        return [Pass(", ".join(each.name for each in along), self._read(used), written)]

    def _sums(self) -> list[Pass]:
        """The kernel that adds up over rows."""
        if self.site.sums is None:
            return []
        rows = self.site.cascade.rows
        used = set().union(*(rows[name].free_symbols for name in self.site.sums.terms))
        made = self.site.sums.sums
        written = 4 * self.length * len(made)
        return [Pass(", ".join(str(e.buffer.name) for e in made), self._read(used), written)]

    def _read(self, symbols: Iterable[sympy.Symbol]) -> int:
        """Bytes of the tensors that symbols are read from, each once."""
        ordered = sorted(symbols, key=lambda each: each.name)
        made = [each for each in ordered if each in self.site.producers]
        loads = [load for each in ordered if each not in made for load in self._loads(each)]
        count = self.rows * self.length
        return sum(count * self._item_of(each) for each in made) + sum(map(_bytes, _sources(loads)))

    def _loads(self, symbol: sympy.Symbol) -> list[Any]:
        from crossfuse import _tvm as ir

        return ir.buffer_loads(self.site.reads[symbol]) if symbol in self.site.reads else []

    def _item_of(self, symbol: sympy.Symbol) -> int:
        if symbol in self.products:
            return item_bytes(str(self.products[symbol].left.ty))
        return _item(self._loads(symbol), 4)
