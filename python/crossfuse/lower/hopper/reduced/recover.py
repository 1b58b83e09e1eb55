"""Reads products whose rows are reduced off a scheduled function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place, Store, Tile, TileNest, tile_nest
from crossfuse.lower.hopper.program.tile_program import Contraction, TileProgram
from crossfuse.lower.hopper.recover.contraction import check_reduction, read_contraction
from crossfuse.lower.hopper.recover.store import Loops, outer_loops, places_of
from crossfuse.lower.hopper.stream.program import Axis, Best, Kind, Output, RowReductions, Step
from crossfuse.lower.hopper.stream.recover.function import only_stream
from crossfuse.lower.hopper.stream.recover.statements import (
    Roles,
    Statement,
    copied,
    read_output,
    refuse_stream,
)
from crossfuse.lower.hopper.stream.recover.steps import Names, read_steps
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
