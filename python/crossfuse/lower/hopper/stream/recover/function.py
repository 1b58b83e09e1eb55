"""Reads the programs of streams off a scheduled function."""

from __future__ import annotations

from itertools import product
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.recover.contraction import is_zero
from crossfuse.lower.hopper.recover.store import outer_loops, places_of
from crossfuse.lower.hopper.stream.program import Axis, Box, Stream, StreamProgram
from crossfuse.lower.hopper.stream.recover.merging import (
    End,
    Handed,
    is_split,
    read_merge,
    split_nests,
    stored_nests,
)
from crossfuse.lower.hopper.stream.recover.statements import (
    Roles,
    Statement,
    only_store,
    read_load,
    read_output,
    read_statements,
    refuse_stream,
)
from crossfuse.lower.hopper.stream.recover.steps import (
    Names,
    Products,
    check_order,
    find_products,
    read_steps,
)
from crossfuse.lower.tree import analyzer, open_blocks
from crossfuse.markers import STREAM

# How far a stream goes: its bounds for every place, by enumeration.


def stream_of(loop: Any, places: tuple[Place, ...], parted: bool = False) -> tuple[Stream, Any]:
    """Read the loop of a stream, and make a loop over all values that its variable takes anywhere.

    If CTAs share the keys (`parted`), one may have no part of them: its state is that of no keys.
    Else refuses a stream that is empty at some place; and bounds that are no functions of places.
    """
    used = {each for bound in (loop.min, loop.extent) for each in ir.variables(bound)}
    moving = [each for each in places if each.var in used]
    if len(moving) != len(used):
        raise refuse_stream(
            f"loop '{loop.loop_var.name}'",
            f"bounds {loop.min} and {loop.extent}",
            "functions of the coordinates of CTAs",
        )
    firsts, ends = [], []
    for indices in product(*(range(each.extent) for each in moving)):
        first, count = _bounds(loop, moving, indices)
        if count < 1 and not parted:
            where = ", ".join(
                f"{each.var.name} = {i}" for each, i in zip(moving, indices, strict=True)
            )
            raise refuse_stream(
                f"loop '{loop.loop_var.name}'",
                f"{count} tiles of keys for {where}",
                "one tile at least: a kernel multiplies the first one before it looks further",
                "let the loop go through one tile there, whose keys are all masked",
            )
        firsts.append(first)
        ends.append(first + count)
    stages = ir.constant(loop.annotations[STREAM]) or 0
    bounds = (min(firsts), max(ends))
    kind = str(loop.loop_var.ty)
    ranged = ir.for_like(
        loop,
        loop.body,
        min=ir.tirx.IntImm(kind, bounds[0]),
        extent=ir.tirx.IntImm(kind, bounds[1] - bounds[0]),
    )
    return Stream(loop.loop_var, loop.min, loop.extent, stages, bounds), ranged


def _bounds(loop: Any, moving: list[Place], indices: tuple[int, ...]) -> tuple[int, int]:
    """First value and number of iterations for one place."""
    values = dict(zip((each.var for each in moving), indices, strict=True))

    def value(var: Any) -> Any:
        return ir.tirx.IntImm(str(var.ty), values[var]) if var in values else var

    known = ir.sym.Analyzer()
    found = [
        ir.constant(known.simplify(ir.substitute(each, value))) for each in (loop.min, loop.extent)
    ]
    first, count = found
    assert first is not None and count is not None
    return first, count


def has_stream(loop: Any) -> bool:
    """Whether a loop goes through tiles of keys."""
    return STREAM in loop.annotations


def is_stream(func: Any) -> bool:
    """Whether a schedule asks for the lowering of streams."""
    return holds_stream(func.body)


def holds_stream(node: Any) -> bool:
    """Whether a statement has a loop that streams tiles."""
    found: list[Any] = []
    ir.walk(node, (ir.For, lambda loop: found.append(loop) if has_stream(loop) else None))
    return bool(found)


def recover_staged(node: Any, memory: tuple[Any, ...]) -> StreamProgram:
    """Read the program of a nest that stores the left operand of a product in the same kernel.

    `memory` are parameters of the function and intermediates in global memory.
    """
    return _recover_nest(node, memory)


def recover_streams(func: Any) -> tuple[StreamProgram, ...]:
    """Read the programs of a scheduled function: one for each nest, each a kernel.

    Nests stand one after another, each of loops over places. Inside them: the load of the queries,
    initial values of rows and of the sums, the stream, values of rows, and the store. The stream's
    body: loads of keys and of values, the product of queries and keys, statements on rows and on
    elements of the tile, and a product of what they make and the values. Of two nests with
    intermediates in global memory the second merges what parts of a stream make: both are one
    program, of the stream and the kernel that merges its parts. The block or loop that has another
    form is refused by name.
    """
    func = open_blocks(func)
    body = func.body.block.body
    nests = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    made = [each for each in func.body.block.alloc_buffers if str(each.scope()) == "global"]
    if made and [holds_stream(each) for each in nests] == [True, False]:
        return (_recover_parts(*stored_nests(nests, made), tuple(func.params)),)
    if made:
        raise refuse_stream(
            f"buffer '{made[0].name}'",
            "an intermediate in global memory",
            "streams that take and store parameters of the function, or one stream and the nest "
            "that merges its parts",
            "lower the nests as functions of their own",
        )
    return tuple(_recover_nest(each, tuple(func.params)) for each in nests)


def _recover_nest(node: Any, parameters: tuple[Any, ...]) -> StreamProgram:
    outer, parts = outer_loops(node)
    if is_split(parts):
        # Two nests over the CTAs of a cluster: a stream of each one's keys, and the merge.
        (loop, own), (_, merging) = split_nests(parts)
        return _recover_parts(outer, loop, own, merging, parameters)
    streams = [each for each in parts if isinstance(each, ir.For) and has_stream(each)]
    if len(streams) != 1:
        raise refuse_stream(
            "function", f"{len(streams)} streams in a nest", "one loop over tiles of keys"
        )
    reader, before, within, after = _read_stream(outer, parts, streams[0], parameters)
    program = reader.program(before, within, after)
    _check_cluster(program, f"loop '{streams[0].loop_var.name}'")
    return program


def _check_cluster(program: StreamProgram, where: str) -> None:
    """Refuse CTAs of a cluster that go through different keys and values, and do not merge."""
    keys, values, stream = program.keys, program.values, program.stream
    same = (*keys.origin, *values.origin, stream.first, stream.count)
    used = {var for each in same for var in ir.variables(each)}
    inside = [each for each in program.places if each.in_cluster]
    if len(inside) > 1 or any(each.var in used for each in inside):
        raise refuse_stream(
            where,
            "a stream in a cluster",
            "loops over the grid alone, one loop over CTAs that go through the same keys and "
            "values, or two nests over a cluster, of which the second merges",
        )


def _recover_parts(
    outer: tuple[Any, ...],
    loop: Any,
    parts: list[Any],
    merging: list[Any],
    parameters: tuple[Any, ...],
) -> StreamProgram:
    """A stream of the keys of each CTA of a loop, and the merge of their states."""
    around = (*outer, loop)
    streams = [each for each in parts if isinstance(each, ir.For) and has_stream(each)]
    if len(streams) != 1 or any(each.in_cluster for each in places_of(outer)):
        raise refuse_stream(
            f"loop '{loop.loop_var.name}'",
            f"{len(streams)} streams in a cluster of {len(places_of(outer))} loops",
            "one stream, and one loop over the CTAs that share keys",
        )
    read = _read_stream(around, parts, streams[0], parameters, parted=True)
    reader, before, within, slabs = read
    return reader.split_program(before, within, slabs, merging, around)


def _read_stream(
    outer: tuple[Any, ...],
    parts: list[Any],
    loop: Any,
    parameters: tuple[Any, ...],
    parted: bool = False,
) -> tuple[_Reader, tuple[Statement, ...], tuple[Statement, ...], tuple[Statement, ...]]:
    """Statements before a stream, in it and behind it, and a reader of them."""
    inside = next(number for number, each in enumerate(parts) if each.same_as(loop))
    places = places_of(outer)
    stream, ranged = stream_of(loop, places, parted)
    around = (*outer, ranged)
    before = read_statements(parts[:inside], outer)
    within = read_statements(
        list(loop.body.seq) if isinstance(loop.body, ir.SeqStmt) else [loop.body], around
    )
    after = read_statements(parts[inside + 1 :], outer)
    return _Reader(places, parameters, stream, analyzer(around)), before, within, after


class _Reader:
    """Collects what is known of a nest while its parts are read."""

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
        products, names = self._products(before, within, after)
        store = only_store(after)
        end = End(
            read_output(store, self.roles),
            read_steps([each for each in after if each is not store], names),
            names.placed(store, store.body.value),
        )
        return self._program(before, within, products, names, end)

    def split_program(
        self,
        before: tuple[Statement, ...],
        within: tuple[Statement, ...],
        slabs: tuple[Statement, ...],
        merging: list[Any],
        around: tuple[Any, ...],
    ) -> StreamProgram:
        """The program of a stream whose state is handed over and merged."""
        products, names = self._products(before, within, slabs)
        place = self.places[-1]
        end = read_merge(Handed(self.roles, names, slabs, place), merging, around)
        return self._program(before, within, products, names, end)

    def _products(
        self,
        before: tuple[Statement, ...],
        within: tuple[Statement, ...],
        after: tuple[Statement, ...],
    ) -> tuple[Products, Names]:
        products = find_products(before, within, self.roles)
        self.roles.spread((*before, *within, *after))
        return products, Names(self.roles)

    def _program(
        self,
        before: tuple[Statement, ...],
        within: tuple[Statement, ...],
        products: Products,
        names: Names,
        end: End,
    ) -> StreamProgram:
        sums = products.second.buffer
        loads = {each.buffer: each for each in (*before, *within) if _is_load(each)}

        def load(buffer: Any, axis: Axis) -> Box:
            return read_load(loads[buffer], self.roles, axis, end.output.rows)

        queries, keys = load(products.queries, Axis.ROW), load(products.keys, Axis.KEY)
        values = keys if products.shares_tile else load(products.values, Axis.KEY)
        body = [each for each in within if not _is_load(each) and each not in products.both]
        steps = [each for each in body if not each.buffer.same_as(sums)]
        weights = next(each for each in steps if each.buffer.same_as(products.weights))
        carries = [each for each in body if each.buffer.same_as(sums)]
        check_order(within, products, carries)
        started = [each for each in before if not _is_load(each)]
        rows = [each for each in started if not each.buffer.same_as(sums)]
        self._check_sums(products, [each for each in started if each not in rows])
        self._check_loads(loads, 2 if products.shares_tile else 3)
        return StreamProgram(
            self.places,
            self.parameters,
            self.stream,
            *(names.row, names.key, names.column),
            *(queries, keys, values),
            end.output,
            products.first.buffer,
            read_steps([weights], names)[0],
            sums,
            read_steps(rows, names),
            read_steps([each for each in steps if each is not weights], names),
            read_steps(carries, names),
            end.after,
            end.result,
            end.split,
        )

    def _check_sums(self, products: Products, started: list[Statement]) -> None:
        zero = len(started) == 1 and is_zero(started[0].body.value)
        if not zero:
            raise refuse_stream(
                f"buffer '{products.second.buffer.name}'",
                f"{len(started)} first values of the sums, or another than zero",
                "one block before the stream that sets them to zero",
            )

    def _check_loads(self, loads: dict[Any, Statement], count: int) -> None:
        if len(loads) != count:
            raise refuse_stream(
                "function",
                f"{len(loads)} tiles in shared memory",
                "those of queries, keys and values",
            )


def _is_load(statement: Statement) -> bool:
    return str(statement.buffer.scope()).startswith("shared")
