"""Reads the programs of streams off a scheduled function."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.recover_contraction import is_zero
from crossfuse.lower.hopper.recover_places import outer_loops, places_of
from crossfuse.lower.hopper.stream.bounds import stream_of
from crossfuse.lower.hopper.stream.boxes import read_load, read_output
from crossfuse.lower.hopper.stream.products import Products, find_products
from crossfuse.lower.hopper.stream.program import Axis, StreamProgram
from crossfuse.lower.hopper.stream.statements import Roles, Statement, refuse_stream
from crossfuse.lower.hopper.stream.steps import Names, check_order, read_steps
from crossfuse.lower.hopper.tile_nest import tile_nest
from crossfuse.lower.open_blocks import open_blocks
from crossfuse.lower.tree import analyzer
from crossfuse.schedule.markers import STREAM


def has_stream(loop: Any) -> bool:
    """Whether a loop goes through tiles of keys."""
    return STREAM in loop.annotations


def is_stream(func: Any) -> bool:
    """Whether a schedule asks for the lowering of streams."""
    found: list[Any] = []
    ir.walk(func.body, (ir.For, lambda loop: found.append(loop) if has_stream(loop) else None))
    return bool(found)


def recover_streams(func: Any) -> tuple[StreamProgram, ...]:
    """Read the programs of a scheduled function.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Nests one after another, each of loops over places. Inside them: the load of the queries,
        initial values of rows and of the sums, the stream, values of rows, and the store. The
        stream's body: loads of keys and of values, the product of queries and keys, statements on
        rows and on elements of the tile, and a product of what they make and the values.

    Returns
    -------
    tuple[StreamProgram, ...]
        One for each nest, each a kernel.

    Raises
    ------
    LoweringRefused
        Naming the block or loop that has another form.
    """
    func = open_blocks(func)
    body = func.body.block.body
    nests = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    made = [each for each in func.body.block.alloc_buffers if str(each.scope()) == "global"]
    if made:
        raise refuse_stream(
            f"buffer '{made[0].name}'",
            "an intermediate in global memory",
            "streams that take and store parameters of the function",
            "lower the nests as functions of their own",
        )
    return tuple(_recover_nest(each, tuple(func.params)) for each in nests)


def _recover_nest(node: Any, parameters: tuple[Any, ...]) -> StreamProgram:
    outer, parts = outer_loops(node)
    streams = [each for each in parts if isinstance(each, ir.For) and has_stream(each)]
    if len(streams) != 1:
        raise refuse_stream(
            "function", f"{len(streams)} streams in a nest", "one loop over tiles of keys"
        )
    inside = next(number for number, each in enumerate(parts) if each.same_as(streams[0]))
    (loop,) = streams
    places = places_of(outer)
    if any(each.in_cluster for each in places):
        raise refuse_stream(
            f"loop '{loop.loop_var.name}'", "a stream in a cluster", "loops over the grid alone"
        )
    stream, ranged = stream_of(loop, places)
    around = (*outer, ranged)
    before = _statements(parts[:inside], outer)
    within = _statements(
        list(loop.body.seq) if isinstance(loop.body, ir.SeqStmt) else [loop.body], around
    )
    after = _statements(parts[inside + 1 :], outer)
    reader = _Reader(places, parameters, stream, analyzer(around))
    return reader.program(before, within, after)


def _statements(parts: list[Any], around: tuple[Any, ...]) -> tuple[Statement, ...]:
    statements = tuple(Statement(tile_nest(each, around)) for each in parts)
    for each in statements:
        if not isinstance(each.body, ir.BufferStore):
            raise refuse_stream(each.where, "a body of another kind", "the store of one element")
        if str(each.buffer.scope()) != "global":
            each.nest.check_predicate(each.buffer)
    return statements


class _Reader:
    """What is known of a nest while its parts are read."""

    def __init__(
        self, places: tuple[Any, ...], parameters: tuple[Any, ...], stream: Any, known: Any
    ) -> None:
        self.places = places
        self.parameters = parameters
        self.stream = stream
        self.roles = Roles(known)

    def program(
        self,
        before: tuple[Statement, ...],
        within: tuple[Statement, ...],
        after: tuple[Statement, ...],
    ) -> StreamProgram:
        """The program that statements before, in and behind the stream make."""
        products = find_products(before, within, self.roles)
        self.roles.spread((*before, *within, *after))
        names = Names(self.roles)
        sums = products.second.buffer
        loads = {each.buffer: each for each in (*before, *within) if _is_load(each)}
        store = self._store(after)
        output = read_output(store, self.roles)
        queries, keys, values = (
            read_load(loads[buffer], self.roles, axis, output.rows)
            for buffer, axis in (
                (products.queries, Axis.ROW),
                (products.keys, Axis.KEY),
                (products.values, Axis.KEY),
            )
        )
        body = [each for each in within if not _is_load(each) and each not in products.both]
        steps = [each for each in body if not each.buffer.same_as(sums)]
        weights = next(each for each in steps if each.buffer.same_as(products.weights))
        carries = [each for each in body if each.buffer.same_as(sums)]
        check_order(within, products, carries)
        started = [each for each in before if not _is_load(each)]
        rows = [each for each in started if not each.buffer.same_as(sums)]
        self._check_sums(products, [each for each in started if each not in rows])
        self._check_loads(loads, (queries, keys, values))
        return StreamProgram(
            self.places,
            self.parameters,
            self.stream,
            *(names.row, names.key, names.column),
            *(queries, keys, values),
            output,
            products.first.buffer,
            read_steps([weights], names)[0],
            sums,
            read_steps(rows, names),
            read_steps([each for each in steps if each is not weights], names),
            read_steps(carries, names),
            read_steps([each for each in after if each is not store], names),
            names.placed(store, store.body.value),
        )

    def _store(self, after: tuple[Statement, ...]) -> Statement:
        stores = [each for each in after if str(each.buffer.scope()) == "global"]
        if len(stores) != 1 or stores[0] is not after[-1]:
            raise refuse_stream(
                "function", f"{len(stores)} stores behind the stream", "one store, at the end"
            )
        return stores[0]

    def _check_sums(self, products: Products, started: list[Statement]) -> None:
        zero = len(started) == 1 and is_zero(started[0].body.value)
        if not zero:
            raise refuse_stream(
                f"buffer '{products.second.buffer.name}'",
                f"{len(started)} first values of the sums, or another than zero",
                "one block before the stream that sets them to zero",
            )

    def _check_loads(self, loads: dict[Any, Statement], boxes: tuple[Any, ...]) -> None:
        if len(loads) != len(boxes):
            raise refuse_stream(
                "function",
                f"{len(loads)} tiles in shared memory",
                "those of queries, keys and values",
            )


def _is_load(statement: Statement) -> bool:
    return str(statement.buffer.scope()).startswith("shared")
