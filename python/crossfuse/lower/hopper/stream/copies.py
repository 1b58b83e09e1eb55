"""Copies of a stream: the loading roles, and what stores its results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP_ROWS
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.epilogue.elements import as_float, round_pair, scatter
from crossfuse.lower.hopper.pipeline import Cursor, load_name, store_name
from crossfuse.lower.hopper.statements import Variable, at, registers, run, when
from crossfuse.lower.hopper.stream.body import Lanes, StreamBody
from crossfuse.lower.hopper.stream.plan.memory import Operand, dimensions
from crossfuse.lower.hopper.stream.tiles import Tiles
from crossfuse.lower.hopper.stream.values import RowState, Values

# The loading roles: a thread for queries and keys, and one for values.


def emit_loading(body: StreamBody, warp: int = 0) -> None:
    """Write what two warps of the warpgroup that loads do, from number `warp` on."""
    of_keys, tiles_of_keys = body.loading(warp)
    with when(of_keys):
        _emit_keys(body, tiles_of_keys)
    if not body.plan.program.shares_tile:
        of_values, tiles_of_values = body.loading(warp + 1)
        with when(of_values):
            values, tiles = Cursor(body.values), tiles_of_values()
            with tiles.all(), tiles.blocks():
                _load(body, "values", body.plan.values, values, tiles)
                tiles.look_ahead()


def _emit_keys(body: StreamBody, tiles_of_keys: Callable[[], Tiles]) -> None:
    """Load the queries of each tile, and its keys."""
    plan = body.plan
    queries, keys = Cursor(body.queries), Cursor(body.keys)
    tiles = tiles_of_keys()
    asked = None if body.gate is None else Variable("tiles_of_keys", "int32", 0)
    with tiles.all():
        # Nobody waits for the queries of a part without keys.
        with nullcontext() if plan.program.split is None else when(tiles.has_block):
            _load(body, "queries", plan.queries, queries, tiles)
        with tiles.blocks():
            _load(body, "keys", plan.keys, keys, tiles)
            if asked is not None:
                asked.set(asked.value + 1)
                with tiles.one_thread(), when(asked.value == plan.stages):
                    mbarrier.arrive(body.gate)
            tiles.look_ahead()
    if asked is not None:  # of fewer keys than there are stages
        with tiles.one_thread(), when(asked.value < plan.stages):
            mbarrier.arrive(body.gate)


def _load(body: StreamBody, name: str, operand: Operand, cursor: Cursor, tiles: Tiles) -> None:
    """Fill a stage of the current tile once it is empty."""
    with tiles.one_thread():
        _fill(body, name, operand, cursor, tiles.values)
    cursor.advance()


def _fill(
    body: StreamBody, name: str, operand: Operand, cursor: Cursor, values: dict[Any, Any]
) -> None:
    """Await a stage and fill it; CTAs of a cluster that share a tile multicast a part each."""
    cursor.wait_empty()
    full = cursor.ring.full(cursor.stage)
    mbarrier.expect(full, operand.size)
    region, descriptor = body.memory.region(name), ir.script.address_of(body.maps[operand.map.name])
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


def coordinates(operand: Operand, values: dict[Any, Any]) -> list[Any]:
    """TMA coordinates of a box, those after the coordinate of the columns."""
    box = operand.box
    return [at(box.origin[each], values).astype("int32") for each in dimensions(box)]


# Results of a tile of rows leave registers: boxes in shared memory, stored by TMA.

#: Columns of four matrices of 8 x 8 (stmatrix .x4), two of them one below the other.
_SPAN = 16


class ResultStore:
    """Stores the results of one warpgroup, whose second product is in `sums`."""

    def __init__(self, body: StreamBody, warpgroup: Any, lanes: Lanes, sums: Any) -> None:
        self.body = body
        self.plan = body.plan
        self.warpgroup = warpgroup
        self.lanes = lanes
        self.sums = sums
        self.packed = registers("packed", _SPAN // 4, "uint32")

    def store(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Store what the sums and the state of rows make, of the tile at some places."""
        program = self.plan.program
        values = Values.of_sums(program, self.lanes, places, rows.register, self.sums)
        for buffer in self.plan.registers.deferred:
            rows.gather(buffer)
        for step in program.after:
            rows.run(step, values)
        self._open()
        self.leave(values, places)

    def leave(self, values: Values, places: dict[Any, Any]) -> None:
        """Store results; the boxes in shared memory must be free."""
        self._fill(values)
        run(ir.script.ptx.fence.proxy.async_.shared__cta())
        mbarrier.meet_warpgroup(self.warpgroup)
        with when(self.body.where.thread == 0):
            self._copy(places)
            if self.body.writer is not None:
                run(ir.script.ptx.cp.async_.bulk.wait_group(0))
                self.body.raise_flag(places)

    def finish(self) -> None:
        """Wait until all boxes have left shared memory."""
        mbarrier.await_copies(self.body.where.thread)

    def _open(self) -> None:
        """Wait until the boxes of the tile before have left shared memory."""
        mbarrier.await_copies(self.body.where.thread)
        mbarrier.meet_warpgroup(self.warpgroup)

    def _fill(self, values: Values) -> None:
        program = self.plan.program
        value = values.with_rows_named(as_float(program.result))
        for first in range(0, self.plan.columns, _SPAN):
            for number in range(_SPAN // 4):
                register = first // 2 + 2 * number
                low, high = (values.of_element(value, register + each) for each in range(2))
                round_pair(self.packed[number], program.output.dtype, low, high)
            box, column = divmod(first, self.plan.output.map.box[0])

            def address(inside: Any, box: int = box) -> Any:
                return self._address(box, inside)

            scatter(
                self.body.where,
                [self.packed[each] for each in range(_SPAN // 4)],
                self.plan.output.map.swizzle,
                column,
                address,
            )

    def _address(self, box: int, inside: Any = 0) -> Any:
        output = self.plan.output
        offset = self.warpgroup * output.size + (box * output.pitch + inside)
        return self.body.memory.region("boxes")(offset)

    def _corner(self) -> tuple[Any, Any]:
        """First row and column of the warpgroup in the tile."""
        return self.warpgroup * WARPGROUP_ROWS, 0

    @property
    def _boxes(self) -> int:
        """Number of boxes of the warpgroup."""
        return self.plan.output.copies // max(1, self.plan.adders)

    def _copy(self, places: dict[Any, Any]) -> None:
        output = self.plan.output
        descriptor = ir.script.address_of(self.body.maps[output.map.name])
        row, *matrix = coordinates(output, places)
        down, across = self._corner()
        row = row + down
        if output.box.width:
            across = at(output.box.origin[-1], places).astype("int32") + across
        for box in range(self._boxes):
            place = (across + box * output.map.box[0], row, *matrix)
            run(ir.script.ptx[store_name(len(place))](descriptor, *place, self._address(box)))
        run(ir.script.ptx.cp.async_.bulk.commit_group())


class ColumnStore(ResultStore):
    """Stores the results of one warpgroup of those that share columns, where queries were."""

    def _address(self, box: int, inside: Any = 0) -> Any:
        output = self.plan.output
        offset = self.warpgroup * (self._boxes * output.pitch) + (box * output.pitch + inside)
        return self.body.memory.region("queries")(offset)

    def _corner(self) -> tuple[Any, Any]:
        return 0, self.warpgroup * self.plan.columns
