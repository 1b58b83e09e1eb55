"""Counts the bytes and operations of a cascade with products, for the planner's estimates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import sympy

from crossfuse.cascade.rewrite.passes import item_bytes

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.rewrite.tiled.frame import TileFrame
    from crossfuse.cascade.site import Site

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


def tile_work_of(site: Site, derivation: Derivation) -> TileWork:
    """Count the bytes and operations of a cascade with products; refused without a tile form."""
    from crossfuse import _tvm as ir
    from crossfuse.cascade.rewrite.tiled.frame import frame_of
    from crossfuse.cascade.rewrite.tiled.sizes import CascadeTiles

    frame = frame_of(site, derivation, CascadeTiles())
    made = frame.products
    loads = ir.buffer_loads
    elements = [each for each in site.cascade.elements if each in site.reads]
    columned = [each for each in elements if each in frame.columned]
    own = [load for each in elements if each not in columned for load in loads(site.reads[each])]
    values = [load for each in columned for load in loads(site.reads[each])]
    lefts, rights = [each.left for each in made], [each.right for each in made]
    value = _item(values)
    rows = prod(int(site.extents[each]) for each in site.rows)
    return TileWork(
        groups=rows // frame.rows.extent,
        rows=frame.rows.extent,
        length=frame.length,
        depth=max((each.extents[0] for each in made), default=0),
        columns=frame.widest,
        left=_item(lefts or own),
        right=_item(rights),
        value=value,
        result=_results(site),
        inputs=_inputs([*lefts, *rights, *own, *values], site),
        item=value if values else _item(lefts),
        same=any(one.source.same_as(other.source) for one in rights for other in values),
        **_arithmetic(frame),
        spans=_spans(frame),
        slots=sum(not frame.columns_of(each) for each in frame.slots),
    )


def _item(found: Iterable[Any]) -> int:
    """Bytes of the widest of some loads; 2, as is usual, without any."""
    return max((item_bytes(str(each.ty)) for each in found), default=2)


def _inputs(found: Iterable[Any], site: Site) -> int:
    """Bytes of those tensors that are parameters of the function, each once."""
    tensors: list[Any] = []
    for load in found:
        known = any(load.source.same_as(each) for each in tensors)
        if load.source in set(site.function.params) and not known:
            tensors.append(load.source)
    return sum(
        prod(int(e) for e in each.ty.shape) * item_bytes(str(each.ty.dtype)) for each in tensors
    )


def _results(site: Site) -> int:
    found = 0
    for each in site.outputs:
        size = item_bytes(str(each.buffer.ty.dtype))
        found += size * prod(int(site.extents[column]) for column in each.columns)
    return found


def _arithmetic(frame: TileFrame) -> dict[str, int]:
    """Instructions of an element, counted in the statements of a step."""
    from crossfuse.cascade.rewrite.counting import exponentials, operations
    from crossfuse.cascade.rewrite.tiled.steps import Multiply, Reduce, Tile

    moving = set(frame.site.cascade.elements)
    written, plain = [], 0
    for each in frame.steps:
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


def _spans(frame: TileFrame) -> tuple[tuple[int, int, int], ...]:
    """Elements that some rows need, by the bounds of masks on the axis."""
    from crossfuse.cascade.rewrite.tiled.skipping import span

    rows, length = frame.rows.extent, frame.length
    symbols = {
        symbol
        for symbol in frame.site.cascade.invariants
        if symbol.is_integer
        and getattr(frame.read(symbol), "same_as", lambda other: False)(frame.rows.var)
    }
    found = span(frame.slots, frame.index, {each: (each, each) for each in symbols})
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
