"""Reads blocks that keep the best elements of a row: an insertion into a sorted list."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile_nest import TileNest
from crossfuse.lower.hopper.stream.recover.statements import Statement, refuse_stream

#: Where places stand that no element has taken: behind all elements.
NOWHERE = 2**31 - 1
_FORM = (
    "an insertion of each element into a list in descending order, of equal ones the lower key "
    "first"
)


@dataclass(frozen=True)
class Insertion:
    """A block that takes an element of the tile into the list of its row.

    Attributes
    ----------
    nest : TileNest
        The block.
    values, places : Any
        The list: elements and where they come from, [row, rank].
    row : Any
        Index of the row, in the block's variables.
    count : int
        Ranks.
    coming : Statement
        Makes the element.
    place : Any
        Where it comes from, in the block's variables.
    """

    nest: TileNest
    values: Any
    places: Any
    row: Any
    count: int
    coming: Statement
    place: Any


@dataclass(frozen=True)
class Beginning:
    """A block that empties the lists of all rows.

    Attributes
    ----------
    values, places : Any
        The list.
    """

    values: Any
    places: Any


def read_insertion(nest: TileNest) -> Insertion:
    """Read a block that inserts.

    Raises
    ------
    LoweringRefused
        If it does anything else.
    """
    block = nest.block
    parts = list(block.body.seq) if isinstance(block.body, ir.SeqStmt) else []
    scratch = list(block.alloc_buffers)
    if len(parts) != 3 or len(scratch) != 4 or not isinstance(parts[2], ir.For):
        raise _refused(nest)
    element, origin, loop = parts
    stores: list[Any] = []
    ir.walk(loop.body, (ir.BufferStore, stores.append))
    count = ir.constant(loop.extent)
    if count is None or ir.constant(loop.min) != 0 or len(stores) != 6:
        raise _refused(nest)
    values, places = stores[2], stores[3]
    buffers = [each.buffer for each in (element, origin, stores[0], stores[1])]
    known = all(any(each.same_as(own) for own in scratch) for each in buffers)
    if not known or len(set(buffers)) != 4 or len(values.indices) != 2:
        raise _refused(nest)
    row = values.indices[0]
    wanted = _insert(values.buffer, places.buffer, [row, loop.loop_var], buffers)
    if not ir.tvm_ffi.structural_equal(loop.body, wanted):
        raise _refused(nest)
    _check_types(nest, values.buffer, places.buffer, count)
    return Insertion(
        nest,
        values.buffer,
        places.buffer,
        row,
        count,
        Statement(_with_body(nest, element)),
        origin.value,
    )


def read_beginning(nest: TileNest) -> Beginning:
    """Read a block that empties lists.

    Raises
    ------
    LoweringRefused
        If it does anything else.
    """
    loop = nest.block.body
    stores: list[Any] = []
    if isinstance(loop, ir.For):
        ir.walk(loop.body, (ir.BufferStore, stores.append))
    if len(stores) != 2 or ir.constant(loop.extent) != int(stores[0].buffer.ty.shape[-1]):
        raise _refused(nest, "a list that is emptied in a loop over all its ranks")
    values, places = stores
    least = getattr(values.value, "value", None)
    if least != -math.inf or ir.constant(places.value) != NOWHERE:
        raise _refused(nest, f"a list of -inf, from places {NOWHERE}")
    return Beginning(values.buffer, places.buffer)


def _insert(values: Any, places: Any, at: list[Any], scratch: list[Any]) -> Any:
    """The statements of a rank: what is less than the coming element moves on."""
    coming, origin, moved, moved_from = scratch
    zero = ir.tirx.IntImm("int32", 0)
    here, here_from = values[tuple(at)], places[tuple(at)]
    new, new_from = coming[zero], origin[zero]
    first = ir.tirx.And(ir.tirx.EQ(new, here), new_from < here_from)
    steps = [
        ir.BufferStore(moved, here, [zero]),
        ir.BufferStore(moved_from, here_from, [zero]),
        ir.BufferStore(values, new, at),
        ir.BufferStore(places, new_from, at),
        ir.BufferStore(coming, moved[zero], [zero]),
        ir.BufferStore(origin, moved_from[zero], [zero]),
    ]
    return ir.IfThenElse(ir.tirx.Or(new > here, first), ir.SeqStmt(steps), None)


def _with_body(nest: TileNest, body: Any) -> TileNest:
    realize = nest.realize
    block = ir.block_like(nest.block, body=body)
    made = ir.SBlockRealize(realize.iter_values, realize.predicate, block)
    return TileNest(nest.around, nest.loops, made)


def _check_types(nest: TileNest, values: Any, places: Any, count: int) -> None:
    for buffer, dtype in ((values, "float32"), (places, "int32")):
        found = (str(buffer.scope()), str(buffer.ty.dtype), int(buffer.ty.shape[-1]))
        if found != ("local", dtype, count):
            raise refuse_stream(
                f"{nest.where}, buffer '{buffer.name}'",
                f"{found[2]} ranks of {found[1]} in scope {found[0]}",
                f"{count} ranks of {dtype} in scope local",
            )


def _refused(nest: TileNest, limit: str = _FORM) -> Exception:
    return refuse_stream(nest.where, "several statements", limit)
