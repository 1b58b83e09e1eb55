"""What a stream loads, multiplies and stores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, WARPGROUP_ROWS
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.epilogue.elements import as_float, round_pair, scatter
from crossfuse.lower.hopper.pipeline import Cursor, load_name, store_name
from crossfuse.lower.hopper.plan.tiles import GROUP, GROUP_REGISTERS
from crossfuse.lower.hopper.statements import Variable, at, let, registers, run, when
from crossfuse.lower.hopper.stream.body import Lanes, StreamBody
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan, instruction_sums
from crossfuse.lower.hopper.stream.plan.memory import BOX, Operand, dimensions
from crossfuse.lower.hopper.stream.tiles import Tiles
from crossfuse.lower.hopper.stream.values import Elements, RowState, Values
from crossfuse.lower.hopper.wgmma import (
    K_BYTES,
    await_batches,
    batch,
    clear,
    hold,
    multiply,
    swizzled,
    words,
)
from crossfuse.planner.kernels.memory import BOX_COLUMNS

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


# The two products of a stream, as one warpgroup issues them.


#: Rows of values that one wgmma multiplies, in bytes of a box.
_GROUP_BYTES = GROUP * ROW_BYTES


class ScoreProduct:
    """One warpgroup's first product: 64 rows of the queries by keys.

    `warpgroup` is its index among those that have rows of their own.
    """

    def __init__(self, body: StreamBody, warpgroup: Any, elements: Elements) -> None:
        self.plan = body.plan
        self.elements = elements
        share = warpgroup * (WARPGROUP_ROWS * ROW_BYTES)
        self._queries = swizzled("queries", body.memory.region("queries")(share))
        self._keys = swizzled("keys", body.memory.region("keys")(0))

    def score(self, slot: Any, stage: Any) -> None:
        """Issue the product of queries and keys."""
        self.hold_scores()
        scores = [self.elements.scores[each] for each in range(self.plan.scores)]
        left, right = self.plan.queries, self.plan.keys
        with batch():
            queries = let("queries_tile", self._queries.value + words(slot * left.size))
            keys = let("keys_tile", self._keys.value + words(stage * right.size))
            for part in range(self.plan.program.queries.columns // GROUP):
                box, inside = divmod(part * K_BYTES, ROW_BYTES)
                first, second = (_words(box * each.pitch + inside) for each in (left, right))
                operands = [queries + first], keys + second
                types = (self.plan.program.dtype,) * 2
                multiply(types, scores, *operands, ir.script.uint32(part > 0))

    def hold_scores(self) -> None:
        """Keep the compiler from moving scores across this place."""
        hold(self.elements.scores, self.plan.scores)


class Sums:
    """Registers of a thread for the second product."""

    def __init__(self, body: StreamBody) -> None:
        self.plan = body.plan
        self.sums = registers("sums", self.plan.sums, "float32")

    def clear(self) -> None:
        """Give the sums a value: nobody reads it, but they are in use from here on."""
        clear(self.sums, self.plan.sums)


class Multiplier(Sums, ScoreProduct):
    """One warpgroup's products: 64 rows of the queries by keys, and of weights by values."""

    def __init__(self, body: StreamBody, warpgroup: Any, elements: Elements) -> None:
        Sums.__init__(self, body)
        ScoreProduct.__init__(self, body, warpgroup, elements)
        self._values = of_values(body, 0)

    def add(self, stage: Any, keep: Any) -> None:
        """Issue the product of weights and values; `keep` is 0 for the first tile of keys."""
        self.hold_sums()

        def left(part: int) -> list[Any]:
            words = range(part * GROUP_REGISTERS, (part + 1) * GROUP_REGISTERS)
            return [self.elements.words[each] for each in words]

        _add(self.plan, self.sums, left, self._values.value, stage, keep, self.plan.sums)

    def hold_sums(self) -> None:
        """Keep the compiler from moving sums, and weights, across this place."""
        hold(self.sums, self.plan.sums)
        hold(self.elements.words, self.plan.words)


class SumProduct(Sums):
    """The second product of some columns, with weights in shared memory.

    `group` is the index of the warpgroup among those that share columns.
    """

    def __init__(self, body: StreamBody, group: Any) -> None:
        super().__init__(body)
        self._width = instruction_sums(self.plan.sums, self.plan.threads)
        boxes = self.plan.columns // BOX_COLUMNS  # the first column begins a box
        self._weights = swizzled("weights", body.memory.region("passed")(0))
        self._values = of_values(body, group * (boxes * self.plan.values.pitch))

    def add(self, stage: Any, keep: Any) -> None:
        """Multiply weights and values, and wait; `keep` is 0 for the first tile of keys."""
        hold(self.sums, self.plan.sums)

        def left(part: int) -> list[Any]:
            box, inside = divmod(part * K_BYTES, ROW_BYTES)
            return [self._weights.value + _words(box * BOX + inside)]

        _add(self.plan, self.sums, left, self._values.value, stage, keep, self._width)
        await_batches(0)
        hold(self.sums, self.plan.sums)


def _add(
    plan: StreamPlan,
    sums: Any,
    left: Callable[[int], list[Any]],
    values: Any,
    stage: Any,
    keep: Any,
    width: int,
) -> None:
    """Issue the product of weights and a stage of values, by wgmma of `width` sums each.

    `left` gives the operand of each group of keys.
    """
    types = (plan.program.dtype,) * 2
    with batch():
        values = let("values_tile", values + words(stage * plan.values.size))
        for part in range(plan.program.tile[1] // GROUP):
            right = values + _words(part * _GROUP_BYTES)
            kept = keep if part == 0 else ir.script.uint32(1)
            operand = left(part)
            for first in range(0, plan.sums, width):
                several = [sums[each] for each in range(first, min(first + width, plan.sums))]
                there = right + _words(2 * first // BOX_COLUMNS * plan.values.pitch)
                multiply(types, several, operand, there, kept, transposed=True)


def of_values(body: StreamBody, offset: Any) -> Variable:
    """Descriptor of values from a column on.

    They repeat every 8 keys and, by the leading offset, with every box.
    """
    name = "keys" if body.plan.program.shares_tile else "values"
    return swizzled("values", body.memory.region(name)(offset), body.plan.values.pitch)


def _words(offset: int) -> Any:
    """A constant offset in bytes in a descriptor's units."""
    return ir.script.uint64(offset // 16)
