"""Rows of a product's tile, reduced in registers: maxima, sums and the best elements.

The program is read off a function whose stream has one tile, which a pipelined loop multiplies; the
kernel is that of a product, with `RowEpilogue` behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.epilogue.elements import fast, fast_tanh
from crossfuse.lower.hopper.features.feature import ConsumerPart, Ending, Feature, TileSums
from crossfuse.lower.hopper.program.tile import Place, Store, Tile, TileNest, tile_nest
from crossfuse.lower.hopper.program.tile_program import Contraction, TileProgram
from crossfuse.lower.hopper.recover.contraction import check_reduction, read_contraction
from crossfuse.lower.hopper.recover.store import Loops, outer_loops, places_of
from crossfuse.lower.hopper.statements import Variable, Warmup, at, let, registers, when
from crossfuse.lower.hopper.stream.body import Lanes
from crossfuse.lower.hopper.stream.program import (
    Axis,
    Best,
    Kind,
    Output,
    RowReductions,
    Step,
    ranges,
)
from crossfuse.lower.hopper.stream.recover.function import only_stream
from crossfuse.lower.hopper.stream.recover.statements import (
    Roles,
    Statement,
    copied,
    read_output,
    refuse_stream,
)
from crossfuse.lower.hopper.stream.recover.steps import Names, read_steps
from crossfuse.lower.hopper.stream.values import RowState, Values, shuffled
from crossfuse.lower.tree import analyzer, open_blocks
from crossfuse.markers import has_stages

# Blocks that find the best elements of a row: an insertion into a sorted list.

#: The place of a rank that no element has taken yet: behind all elements.
NOWHERE = 2**31 - 1
_FORM = (
    "an insertion of each element into a list in descending order, of equal ones the lower key "
    "first"
)


@dataclass(frozen=True)
class Insertion:
    """A block that takes an element of the tile into the sorted list of its row."""

    nest: TileNest
    #: The list: elements and where they come from, [row, rank].
    values: Any
    places: Any
    #: Index of the row, in the block's variables.
    row: Any
    #: Number of ranks.
    count: int
    #: Makes the element that is inserted.
    coming: Statement
    #: Where that element comes from, in the block's variables.
    place: Any


@dataclass(frozen=True)
class Beginning:
    """A block that empties the lists of all rows: -inf everywhere, at place `NOWHERE`."""

    values: Any
    places: Any


def read_insertion(nest: TileNest) -> Insertion:
    """Read a block that inserts; refuses any other form than that of `_insert`."""
    block = nest.block
    parts = ir.sequence(block.body)
    scratch = list(block.alloc_buffers)
    if len(parts) != 3 or len(scratch) != 4 or not isinstance(parts[2], ir.For):
        raise _refused(nest)
    element, origin, loop = parts
    stores = ir.buffer_stores(loop.body)
    count = ir.constant(loop.extent)
    if count is None or ir.constant(loop.min) != 0 or len(stores) != 6:
        raise _refused(nest)
    values, places = stores[2], stores[3]
    buffers = [each.buffer for each in (element, origin, stores[0], stores[1])]
    known = all(ir.among(each, scratch) for each in buffers)
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
    """Read a block that empties lists; refuses a block that does anything else."""
    loop = nest.block.body
    stores = ir.buffer_stores(loop.body) if isinstance(loop, ir.For) else []
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


_Part = Statement | Insertion | Beginning
_KINDS = (Kind.ROW, Kind.TOP, Kind.SUM)


def recover_reduced(func: Any) -> tuple[tuple[TileProgram, ...], ...]:
    """Read the programs of a scheduled function: one for each nest, each a kernel.

    Nests stand one after another, each of loops over places. Inside them: first values of rows, a
    stream of one tile, values of rows, and stores. The stream's body: a pipelined loop that
    multiplies the tile, then maxima and sums over its columns, values of rows, and insertions of
    its elements into sorted lists. The block or loop that has another form is refused by name.
    """
    nests = ir.sequence(open_blocks(func).body.block.body)
    return tuple((_recover_nest(each, tuple(func.params)),) for each in nests)


def _recover_nest(node: Any, parameters: tuple[Any, ...]) -> TileProgram:
    outer, parts = outer_loops(node)
    stream = only_stream(parts)
    places = places_of(outer)
    if any(each.in_cluster for each in places):
        raise refuse_stream(
            f"loop '{stream.loop_var.name}'", "a stream in a cluster", "loops over the grid alone"
        )
    number = next(at for at, each in enumerate(parts) if each.same_as(stream))
    loop, *steps = _only_tile(stream)
    if not isinstance(loop, ir.For) or not has_stages(loop):
        raise refuse_stream(
            f"loop '{stream.loop_var.name}'",
            "another statement before the product",
            "a pipelined loop that multiplies the tile, then what is made of it",
        )
    contraction = read_contraction(_plain_copies(loop, outer), outer)
    check_reduction(contraction, None)
    reader = _Reader(places, contraction, outer)
    groups = (parts[:number], steps, parts[number + 1 :])
    reduced = reader.read(*([_part(each, outer) for each in group] for group in groups))
    return TileProgram(
        places, contraction, None, _sums(contraction, reduced), parameters, reduced=reduced
    )


def _only_tile(stream: Any) -> list[Any]:
    """The statements of a stream of one tile: registers have whole rows then."""
    if ir.constant(stream.extent) != 1:
        raise refuse_stream(
            f"loop '{stream.loop_var.name}'",
            f"{stream.extent} tiles that pipelined loops multiply",
            "one tile, whose rows are whole",
            "take tiles of all elements, at most 256",
        )

    return ir.sequence(ir.substitute(stream.body, {stream.loop_var: stream.min}))


def _plain_copies(loop: Any, outer: Loops) -> Any:
    """The loop with copies that are zero beyond their tensor, as TMA makes them, as plain ones."""
    made = [_plain_copy(each, (*outer, loop)) for each in ir.sequence(loop.body)]
    return ir.for_like(loop, ir.SeqStmt(made) if len(made) > 1 else made[0])


def _plain_copy(node: Any, around: Loops) -> Any:
    nest = tile_nest(node, around)
    store = nest.block.body
    loads = isinstance(store, ir.BufferStore) and str(store.buffer.scope()).startswith("shared")
    if not loads or isinstance(store.value, ir.TensorLoad):
        return node
    plain = ir.BufferStore(store.buffer, copied(Statement(nest)), store.indices)
    return ir.mutate(
        node, (ir.BufferStore, lambda each, _mutator: plain if each.same_as(store) else each)
    )


def _sums(contraction: Contraction, reduced: RowReductions) -> Store:
    """The store of the sums as they are: what reduces them is no expression of one element."""
    scores = reduced.scores
    tile = contraction.result(scores)
    row, column = (ir.tirx.Var(each, "int32") for each in ("i", "j"))
    return Store(Tile(scores, tile.origin, tile.shape), row, column, scores[row, column])


def _part(node: Any, outer: Loops) -> _Part:
    nest = tile_nest(node, outer)
    body = nest.block.body
    if isinstance(body, ir.BufferStore):
        statement = Statement(nest)
        nest.check_predicate(statement.buffer)
        return statement
    return read_beginning(nest) if isinstance(body, ir.For) else read_insertion(nest)


class _Reader:
    """Collects the roles of variables and buffers of a nest while its parts are read."""

    def __init__(self, places: tuple[Place, ...], contraction: Contraction, outer: Loops) -> None:
        self.places = places
        self.contraction = contraction
        self.roles = Roles(analyzer(outer))
        self.names = Names(self.roles)
        self.scores = contraction.products[0].accumulator
        self._place((self.scores,), (Axis.ROW, Axis.KEY), contraction.result(self.scores).origin)
        self.lists: set[Any] = set()

    def read(self, before: list[_Part], steps: list[_Part], after: list[_Part]) -> RowReductions:
        """The reductions that parts before, in and behind the stream make."""
        parts = [*before, *steps, *after]
        insertions = [each for each in parts if isinstance(each, Insertion)]
        for each in insertions:
            self._place_lists(each)
        self._check_beginnings(before, steps, after)
        plain = [each for each in parts if isinstance(each, Statement)]
        self.roles.spread((*plain, *(each.coming for each in insertions)))
        stores = [each for each in after if _is_stored(each)]
        if not stores or stores != after[-len(stores) :]:
            raise refuse_stream(
                "function", f"{len(stores)} stores, or statements behind them", "stores at the end"
            )
        return RowReductions(
            places=self.places,
            **self.names.variables,
            scores=self.scores,
            size=(self.contraction.rows, self.contraction.columns),
            before=tuple(self._step(e) for e in before if not isinstance(e, Beginning)),
            steps=tuple(map(self._step, steps)),
            after=tuple(map(self._step, after[: -len(stores)])),
            outputs=tuple(self._output(each) for each in stores),
        )

    def _place(self, buffers: tuple[Any, ...], axes: Any, origin: tuple[Any, ...]) -> None:
        """Set what the dimensions of buffers go through, and where their tiles begin."""
        for each in buffers:
            self.roles.buffers[each], self.roles.origins[each] = axes, origin

    def _place_lists(self, insertion: Insertion) -> None:
        """Give the lists of an insertion a row of ranks for each row of the tile."""
        first, loop = insertion.nest.along(insertion.values, insertion.row)
        if loop is not None:
            self.roles.loops[loop.loop_var] = Axis.ROW
        zero = ir.tirx.IntImm("int32", 0)
        rank = Axis.COLUMN if insertion.count > 1 else None
        lists = (insertion.values, insertion.places)
        self._place(lists, (Axis.ROW, rank), (first, zero))
        self.lists.update(lists)

    def _check_beginnings(self, *groups: list[_Part]) -> None:
        """Refuse a list that is not emptied before the stream, or not filled by one block of it."""
        before, steps, _ = groups
        begun = [e.values for e in before if isinstance(e, Beginning)]
        filled = [e.values for e in steps if isinstance(e, Insertion)]
        marked = [e for group in groups for e in group if not isinstance(e, Statement)]
        if set(begun) != set(filled) or len(marked) != 2 * len(set(filled)):
            raise refuse_stream(
                "function",
                f"{len(begun)} blocks that empty lists and {len(filled)} that fill them",
                "one before the stream and one in it for each list",
            )

    def _step(self, part: Any) -> Step:
        if isinstance(part, Insertion):
            return self._best(part)
        (step,) = read_steps([part], self.names)
        lists = [each.buffer for each in part.loads if each.buffer in self.lists]
        if lists:
            raise refuse_stream(
                part.where,
                f"a value of rows made of '{lists[0].name}'",
                "lists that outputs alone read, each rank for its own column",
            )
        if step.kind not in _KINDS:
            raise refuse_stream(
                part.where,
                f"'{step.target.name}', {step.kind.value}, kept beside the product",
                "values of rows: maxima, sums, sorted lists and what is made of them",
            )
        return step

    def _best(self, part: Insertion) -> Best:
        statement = part.coming
        place = ir.sym.Analyzer().simplify(self.names.placed(statement, part.place))
        if not place.same_as(self.names.key):
            raise refuse_stream(
                part.nest.where, f"elements from place {place}", "the element's column of the tile"
            )
        value = self.names.placed(statement, statement.body.value)
        return Best(
            part.nest.block.name_hint,
            Kind.BEST,
            part.values,
            value,
            places=part.places,
            count=part.count,
        )

    def _output(self, statement: Any) -> Output:
        if any(each.buffer.same_as(self.scores) for each in statement.loads):
            raise refuse_stream(
                statement.where,
                f"an output of '{self.scores.name}', element by element",
                "outputs of values of rows and of sorted lists",
            )
        return Output(
            read_output(statement, self.roles), self.names.placed(statement, statement.body.value)
        )


def _is_stored(part: _Part) -> bool:
    return isinstance(part, Statement) and ir.is_global(part.buffer)


# From the sums of a tile to what is stored of its rows, all in registers.

# The best elements of rows by repeated selection: the four threads of a row find each together.

#: Threads of a warp that share a row.
QUAD = 4
#: Most registers of a tile with which a thread goes through both of its rows side by side.
_SIDE_BY_SIDE = 64


class Selected:
    """Registers of the best elements of a thread's rows: of each four ranks a thread has one."""

    def __init__(self, step: Best) -> None:
        self.step = step
        self.groups = -(-step.count // QUAD)
        name = step.target.name
        self.values = registers(f"best_{name}", 2 * self.groups, "float32")
        self.places = registers(f"places_{name}", 2 * self.groups, "int32")

    def register(self, buffer: Any, half: int, group: int) -> Any:
        """The register of this thread's rank of a group of four; None for another buffer."""
        for mine, found in ((self.step.target, self.values), (self.step.places, self.places)):
            if buffer.same_as(mine):
                return found[half * self.groups + group]
        return None

    def run(self, values: Values, count: int, quarter: Any, warmup: Warmup) -> None:
        """Select from a tile of which a thread has `count` registers.

        The loop over ranks stays one: its code is fetched once.
        """
        together = [(0, 1)] if count <= _SIDE_BY_SIDE else [(0,), (1,)]
        for halves in together:
            rows = [_Row(self.step, values, count, half) for half in halves]
            with ir.script.serial(0, warmup.turns(self.step.count)) as rank:
                ir.IRBuilder.name("rank", rank)
                for row in rows:
                    row.find()
                    self._keep(row, rank, quarter)
                    row.take_out()

    def _keep(self, row: _Row, rank: Any, quarter: Any) -> None:
        """Store what has been found in the thread whose rank it is."""
        for group in range(self.groups):
            mine = ir.tirx.EQ(rank, quarter + group * QUAD)
            at = row.half * self.groups + group
            for kept, found in ((self.values, row.best), (self.places, row.place)):
                ir.script.buffer_store(kept, ir.script.Select(mine, found.value, kept[at]), [at])


class _Row:
    """One row of a thread: its elements that have not been selected yet."""

    def __init__(self, step: Best, values: Values, count: int, half: int) -> None:
        self.half = half
        self.column = values.lanes.column
        own = [each for each in range(count) if values.lanes.layout.row(each) == half]
        self.columns = [values.lanes.layout.column(each) for each in own]
        self.left = registers("left", len(own), "float32")
        for number, register in enumerate(own):
            element = values.of_element(step.value, register)
            ir.script.buffer_store(self.left, element, [number])
        self.best = Variable("best", "float32")
        self.place = Variable("place", "int32")

    def find(self) -> None:
        """Find the largest element of the row, the first of equal ones.

        A thread goes through its elements from the last one, so that an earlier one wins a tie.
        """
        self.best.set(ir.script.float32(-math.inf))
        self.place.set(NOWHERE - self.column)
        for number in reversed(range(len(self.columns))):
            element = self.left[number]
            ahead = let("ahead", element >= self.best.value)
            place = ir.tirx.IntImm("int32", self.columns[number])
            self.place.set(ir.script.Select(ahead, place, self.place.value))
            # No maximum waits for a comparison, and none takes what is no number.
            self.best.set(ir.script.max(element, self.best.value))
        self.place.set(self.place.value + self.column)
        for distance in (1, 2):
            best = let("other", shuffled(self.best.value, distance))
            place = let("other_place", shuffled(self.place.value, distance))
            first = ir.tirx.And(ir.tirx.EQ(best, self.best.value), place < self.place.value)
            ahead = let("ahead", ir.tirx.Or(best > self.best.value, first))
            self.place.set(ir.script.Select(ahead, place, self.place.value))
            self.best.set(ir.script.Select(ahead, best, self.best.value))

    def take_out(self) -> None:
        """Replace what has been found by NaN, which no comparison finds again."""
        place = let("own_place", self.place.value - self.column)
        nothing = ir.script.float32(math.nan)
        for number, column in enumerate(self.columns):
            is_found = ir.tirx.EQ(place, ir.tirx.IntImm("int32", column))
            element = ir.script.Select(is_found, nothing, self.left[number])
            ir.script.buffer_store(self.left, element, [number])


class RowEpilogue(Ending):
    """The epilogue that reduces rows, for one multiplying warpgroup.

    It takes the place of the epilogue that stores the tile. In the warm-up nothing is stored.
    """

    def __init__(self, sums: TileSums, program: RowReductions) -> None:
        super().__init__(sums)
        assert sums.writer is None, "a kernel of row reductions has one phase"
        # Outputs may be float32: they are made by exact functions, once for each of them.
        self.program = program.mapped(lambda value: fast(fast_tanh(value)))
        self.lanes = Lanes.of(self.where, self.warpgroup)
        self.quarter = let("quarter", self.where.lane % QUAD)
        self.rows = RowState(program.rows)
        self.best = {each.target: Selected(each) for each in program.best}

    def end(self, places: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
        """Reduce and store the tile at the coordinates of `places`."""
        self.leave(leave)
        values = Values(self.program, self.lanes, dict(places), self.rows.register, self._element)
        for step in self.program.before:
            self.rows.run(step, values)
        for step in self.program.steps:
            if isinstance(step, Best):
                self.best[step.target].run(
                    values, self.program.tile[1] // 2, self.quarter, self.warmup
                )
            elif step.kind is Kind.ROW:
                self.rows.run(step, values)
            else:
                self.rows.reduce(step, values, self.program.tile[1] // 2, deferred=False)
        for step in self.program.after:
            self.rows.run(step, values)
        for output in self.program.outputs:
            self._store(output, dict(places))

    def _element(self, buffer: Any, register: int) -> Any:
        assert buffer.same_as(self.program.scores), buffer
        return self.accumulators[register]

    def _store(self, output: Output, places: dict[Any, Any]) -> None:
        """Store an output: four neighbours of a row by the four threads that share the row."""
        for first in range(0, output.box.columns, QUAD):
            for half in range(2):
                ranked = partial(self._ranked, half, first // QUAD)
                values = Values(self.program, self.lanes, places, self.rows.register, ranked)
                column = self.quarter + first
                with when(ir.conjunction(self._conditions(output, places, half, first))):
                    value = values.of_column(output.value, half, column)
                    where = self._place(output, places, half, column)
                    ir.script.buffer_store(output.box.buffer, value, where)

    def _ranked(self, half: int, group: int, buffer: Any, _register: int) -> Any:
        """The register of the rank that this thread has of four."""
        for each in self.best.values():
            found = each.register(buffer, half, group)
            if found is not None:
                return found
        raise AssertionError(buffer)

    def _place(self, output: Output, places: dict[Any, Any], half: int, column: Any) -> list[Any]:
        box = output.box
        origin = [at(each, places) for each in box.origin]
        origin[box.axis] = origin[box.axis] + self.lanes.rows[half]
        origin[-1] = origin[-1] + column
        return origin

    def _conditions(
        self, output: Output, places: dict[Any, Any], half: int, first: int
    ) -> list[Any]:
        box = output.box
        conditions = self.warmup.conditions()
        if first + QUAD > box.columns:
            conditions.append(self.quarter < box.columns - first)
        rows = box.shape[box.axis]
        last = box.origin[box.axis] + (box.rows - 1)
        if not ranges(self.program).can_prove(last < rows):
            conditions.append(self._place(output, places, half, 0)[box.axis] < rows)
        return conditions


class _EpiloguePart(ConsumerPart):
    def ending(self, sums: TileSums) -> Ending | None:
        """The reductions of a phase's rows."""
        reduced = sums.phase.program.reduced
        return None if reduced is None else RowEpilogue(sums, reduced)


class RowsReduced(Feature):
    """Rows of the sums are reduced, and what they are reduced to is stored in place of them."""

    asked_by = "reduced"
    part = _EpiloguePart
    reads_early = True
