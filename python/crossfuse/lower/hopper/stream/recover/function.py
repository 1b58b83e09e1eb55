"""Reads the programs of streams off a scheduled function."""

from __future__ import annotations

from itertools import product
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.recover.contraction import is_zero
from crossfuse.lower.hopper.recover.store import Loops, is_bound, outer_loops, places_of
from crossfuse.lower.hopper.stream.program import Axis, Box, Stream, StreamProgram
from crossfuse.lower.hopper.stream.recover.merging import (
    read_end,
    read_merge,
    split_nests,
    stored_nests,
)
from crossfuse.lower.hopper.stream.recover.statements import (
    Roles,
    Statement,
    read_load,
    read_statements,
    refuse_stream,
)
from crossfuse.lower.hopper.stream.recover.steps import (
    Names,
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
    known = ir.sym.Analyzer()
    both = zip((each.var for each in moving), indices, strict=True)
    values = {var: ir.tirx.IntImm(str(var.ty), index) for var, index in both}
    first, count = (
        ir.constant(known.simplify(ir.substitute(each, values))) for each in (loop.min, loop.extent)
    )
    assert first is not None and count is not None
    return first, count


def has_stream(loop: Any) -> bool:
    """Whether a loop goes through tiles of keys."""
    return STREAM in loop.annotations


def holds_stream(node: Any) -> bool:
    """Whether a statement has a loop that streams tiles."""
    return any(map(has_stream, ir.nodes(node, ir.For)))


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
    nests = ir.sequence(func.body.block.body)
    made = list(filter(ir.is_global, func.body.block.alloc_buffers))
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
    return tuple(recover_stream(each, tuple(func.params)) for each in nests)


def recover_stream(node: Any, parameters: tuple[Any, ...]) -> StreamProgram:
    """Read the program of one nest.

    `parameters` are those of the function; where other nests multiply what this one stores, also
    intermediates in global memory.
    """
    outer, parts = outer_loops(node)
    if len(parts) == 2 and all(map(is_bound, parts)):
        # Two nests over the CTAs of a cluster: a stream of each one's keys, and the merge.
        (loop, own), (_, merging) = split_nests(parts)
        return _recover_parts(outer, loop, own, merging, parameters)
    streams = _streams(parts)
    if len(streams) != 1:
        raise refuse_stream(
            "function", f"{len(streams)} streams in a nest", "one loop over tiles of keys"
        )
    program = _recover(outer, parts, streams[0], parameters)
    _check_cluster(program, f"loop '{streams[0].loop_var.name}'")
    return program


def _streams(parts: list[Any]) -> list[Any]:
    return [each for each in parts if isinstance(each, ir.For) and has_stream(each)]


def _check_cluster(program: StreamProgram, where: str) -> None:
    """Refuse CTAs of a cluster that go through different keys and values, and do not merge."""
    keys, values, stream = program.keys, program.values, program.stream
    same = (*keys.origin, *values.origin, stream.first, stream.count)
    inside = [each.var for each in program.places if each.in_cluster]
    if len(inside) > 1 or any(ir.occurs(var, each) for var in inside for each in same):
        raise refuse_stream(
            where,
            "a stream in a cluster",
            "loops over the grid alone, one loop over CTAs that go through the same keys and "
            "values, or two nests over a cluster, of which the second merges",
        )


def _recover_parts(
    outer: Loops, loop: Any, parts: list[Any], merging: list[Any], parameters: tuple[Any, ...]
) -> StreamProgram:
    """A stream of the keys of each CTA of a loop, and the merge of their states."""
    streams = _streams(parts)
    if len(streams) != 1 or any(each.in_cluster for each in places_of(outer)):
        raise refuse_stream(
            f"loop '{loop.loop_var.name}'",
            f"{len(streams)} streams in a cluster of {len(places_of(outer))} loops",
            "one stream, and one loop over the CTAs that share keys",
        )
    return _recover((*outer, loop), parts, streams[0], parameters, merging)


def _recover(
    outer: Loops,
    parts: list[Any],
    loop: Any,
    parameters: tuple[Any, ...],
    merging: list[Any] | None = None,
) -> StreamProgram:
    """The program of a stream; `merging` are the nests that merge the states of its parts."""
    number = next(number for number, each in enumerate(parts) if each.same_as(loop))
    places = places_of(outer)
    stream, ranged = stream_of(loop, places, merging is not None)
    around = (*outer, ranged)
    before = read_statements(parts[:number], outer)
    within = read_statements(ir.sequence(loop.body), around)
    after = read_statements(parts[number + 1 :], outer)
    roles = Roles(analyzer(around))
    products = find_products(before, within, roles)
    roles.spread((*before, *within, *after))
    names = Names(roles)
    if merging is None:
        end = read_end(after, names)
    else:
        end = read_merge(names, after, places[-1], merging, outer)
    loads = {each.buffer: each for each in (*before, *within) if _is_load(each)}

    def load(buffer: Any, axis: Axis) -> Box:
        return read_load(loads[buffer], roles, axis, end.output.rows)

    queries, keys = load(products.queries, Axis.ROW), load(products.keys, Axis.KEY)
    values = keys if products.shares_tile else load(products.values, Axis.KEY)
    sums = products.second.buffer
    body = [each for each in within if not _is_load(each) and each not in products.both]
    steps = [each for each in body if not each.buffer.same_as(sums)]
    weights = next(each for each in steps if each.buffer.same_as(products.weights))
    carries = [each for each in body if each.buffer.same_as(sums)]
    check_order(within, products, carries)
    started = [each for each in before if not _is_load(each)]
    rows = [each for each in started if not each.buffer.same_as(sums)]
    zeros = [each for each in started if each not in rows]
    if len(zeros) != 1 or not is_zero(zeros[0].body.value):
        raise refuse_stream(
            f"buffer '{sums.name}'",
            f"{len(zeros)} first values of the sums, or another than zero",
            "one block before the stream that sets them to zero",
        )
    if len(loads) != (2 if products.shares_tile else 3):
        raise refuse_stream(
            "function",
            f"{len(loads)} tiles in shared memory",
            "those of queries, keys and values",
        )
    return StreamProgram(
        places=places,
        parameters=parameters,
        stream=stream,
        **names.variables,
        queries=queries,
        keys=keys,
        values=values,
        scores=products.first.buffer,
        weights=read_steps([weights], names)[0],
        sums=sums,
        before=read_steps(rows, names),
        steps=read_steps([each for each in steps if each is not weights], names),
        carries=read_steps(carries, names),
        **vars(end),
    )


def _is_load(statement: Statement) -> bool:
    return str(statement.buffer.scope()).startswith("shared")
