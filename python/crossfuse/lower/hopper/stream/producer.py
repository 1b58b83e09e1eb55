"""The loading roles: a thread for queries and keys, and one for values."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.statements import run, when
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.plan.operands import Operand, dimensions
from crossfuse.lower.hopper.sync import mbarrier
from crossfuse.lower.hopper.sync.ring import Cursor
from crossfuse.lower.hopper.tma import load_name


def emit_loading(body: StreamBody) -> None:
    """Write the warpgroup that loads."""
    with when(body.where.thread == 0):
        _emit_keys(body)
    if not body.plan.program.shares_tile:
        with when(body.where.thread == WARP):
            _emit_values(body)


def _emit_keys(body: StreamBody) -> None:
    """Queries of each tile, and its keys."""
    plan = body.plan
    queries, keys = Cursor(body.queries), Cursor(body.keys)
    tiles = body.tiles()
    with ir.script.While(tiles.is_left):
        tiles.take()
        # Nobody waits for the queries of a part without keys.
        with nullcontext() if plan.program.split is None else when(tiles.has_block):
            _load(body, "queries", plan.queries, queries, tiles.values)
        with ir.script.While(tiles.has_block):
            _load(body, "keys", plan.keys, keys, tiles.values)
            tiles.block.set(tiles.block.value + 1)


def _emit_values(body: StreamBody) -> None:
    """Values of each tile."""
    plan = body.plan
    values = Cursor(body.values)
    tiles = body.tiles()
    with ir.script.While(tiles.is_left):
        tiles.take()
        with ir.script.While(tiles.has_block):
            _load(body, "values", plan.values, values, tiles.values)
            tiles.block.set(tiles.block.value + 1)


def _load(
    body: StreamBody, name: str, operand: Operand, cursor: Cursor, values: dict[Any, Any]
) -> None:
    """Fill a stage when it is empty."""
    cursor.wait_empty()
    full = cursor.ring.full(cursor.stage)
    mbarrier.expect(full, operand.size)
    region, descriptor = body.region(name), ir.script.address_of(body.maps[operand.map.name])
    row, *matrix = coordinates(operand, values)
    suffix, more, inside = "", [], 0
    if operand.parts > 1:
        part = body.where.rank * operand.map.box[1]
        row, inside = row + part, part * operand.map.swizzle
        suffix, more = ".multicast::cluster", [ir.script.uint16((1 << operand.parts) - 1)]
    for copy in range(operand.copies):
        place = (copy * operand.map.box[0], row, *matrix)
        target = region(cursor.stage * operand.size + (copy * operand.pitch + inside))
        run(ir.script.ptx[load_name(len(place)) + suffix](target, descriptor, *place, full, *more))
    cursor.advance()


def coordinates(operand: Operand, values: dict[Any, Any]) -> list[Any]:
    """Coordinates of a box behind that of the columns."""
    box = operand.box
    return [at(box.origin[each], values).astype("int32") for each in dimensions(box)]
