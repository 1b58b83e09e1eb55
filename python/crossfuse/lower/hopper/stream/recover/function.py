"""Reads the programs of streams off a scheduled function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.recover.contraction import is_zero
from crossfuse.lower.hopper.recover.store import Loops, is_bound, outer_loops, places_of
from crossfuse.lower.hopper.stream.program import (
    Axis,
    Box,
    Kind,
    Split,
    Step,
    Stream,
    StreamProgram,
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
    check_order,
    find_products,
    read_steps,
)
from crossfuse.lower.tree import analyzer, coordinate, open_blocks
from crossfuse.markers import DSM_SCOPE, STREAM, has_stream, holds_stream

# How CTAs merge what a stream's parts make of a tile of rows: in a cluster, or later.


@dataclass(frozen=True)
class End:
    """What follows a stream."""

    #: Where results go.
    output: Box
    #: What is made of the state of rows.
    after: tuple[Step, ...]
    #: Expression of an element of the output.
    result: Any
    #: How parts are merged; None if there are none.
    split: Split | None = None


def read_end(after: tuple[Statement, ...], names: Names) -> End:
    """Read what follows a stream whose state is not handed over."""
    store = only_store(after)
    return End(
        read_output(store, names.roles),
        read_steps([each for each in after if each is not store], names),
        names.placed(store, store.body.value),
    )


def split_nests(nests: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """Loop and body of both nests, in the variable of the first.

    Refuses nests over different CTAs.
    """
    found = [outer_loops(each) for each in nests]
    if any(len(loops) != 1 for loops, _ in found):
        raise refuse_stream("function", "a cluster of several loops", "one loop over its CTAs")
    ((loop,), parts), ((other,), merging) = found
    extents = [ir.constant(each.extent) for each in (loop, other)]
    if extents[0] != extents[1]:
        raise refuse_stream(
            f"loop '{other.loop_var.name}'",
            f"{extents[1]} CTAs that merge what {extents[0]} hand over",
            "the same cluster",
        )
    own = {other.loop_var: loop.loop_var}
    return [(loop, parts), (other, [ir.substitute(each, own) for each in merging])]


def stored_nests(nests: Sequence[Any], slabs: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Loops over tiles, the loop over CTAs that share one, and the bodies of both kernels.

    The second nest is the merge, in a grid of its own, which must be that of the stream without the
    CTAs that share a tile. `slabs` are in global memory; in what is returned they are of the scope
    of those of a cluster: a place for states, which no expression loads from memory.
    """
    own = {
        each: ir.tirx.decl_buffer(
            each.ty.shape, str(each.ty.dtype), str(each.name), scope=DSM_SCOPE
        )
        for each in slabs
    }
    found = [outer_loops(ir.substitute(each, own)) for each in nests]
    (outer, parts), (others, merging) = found
    left = {coordinate(each): each for each in outer}
    same = {}
    for each in others:
        mine = left.pop(coordinate(each), None)
        if mine is None or ir.constant(mine.extent) != ir.constant(each.extent):
            raise refuse_stream(
                f"loop '{each.loop_var.name}'",
                f"{each.extent} iterations along {coordinate(each)}, which the stream has not",
                "the grid of the stream without the loop over CTAs that share keys",
            )
        same[each.loop_var] = mine.loop_var
    if len(left) != 1:
        raise refuse_stream(
            "function",
            f"{len(left)} loops over the grid that the merge has not",
            "one: that over CTAs that share keys",
        )
    (part,) = left.values()
    body = [ir.substitute(each, same) for each in merging]
    return tuple(each for each in outer if not each.same_as(part)), part, parts, body


def read_merge(
    handed: Names,
    slabs: tuple[Statement, ...],
    place: Place,
    parts: list[Any],
    around: tuple[Any, ...],
) -> End:
    """Read the nest that merges: first values, a loop over the CTAs, and what is made of the end.

    `handed` are the variables of the stream's steps, `slabs` its stores to slabs, and `place` tells
    which CTA it is. Refuses slabs that are not merged one after another, and CTAs that store other
    columns than they merge: those of a slice in a cluster, all in a kernel of its own.
    """
    turns = [each for each in parts if isinstance(each, ir.For) and len(ir.sequence(each.body)) > 1]
    size = place.extent
    if len(turns) != 1 or ir.constant(turns[0].extent) != size:
        raise refuse_stream(
            "function", f"{len(turns)} loops that merge", f"one loop over the {size} CTAs"
        )
    (loop,) = turns
    number = next(each for each, part in enumerate(parts) if part.same_as(loop))
    begun = read_statements(parts[:number], around)
    inside = read_statements(ir.sequence(loop.body), (*around, loop))
    after = read_statements(parts[number + 1 :], around)
    roles = Roles(analyzer((*around, loop)))
    # Their axes, not their origins: other parts of them are accessed.
    roles.buffers |= {each.buffer: handed.roles.buffers[each.buffer] for each in slabs}
    roles.spread((*inside, *begun, *after))
    names = replace(handed, roles=roles)
    widths = _columns(inside, roles)
    if len(widths) != 1:
        raise refuse_stream(
            inside[0].where, f"slices of {sorted(widths)} columns", "one slice of columns a CTA"
        )
    (columns,) = widths
    _check_slabs(handed.roles, slabs, place, inside, loop, columns)
    store = only_store(after)
    output = read_output(store, roles, columns, max(_columns(slabs, handed.roles)))
    first = store.target.origin[-1] - _first(place, columns)
    # Of rows that hold several tiles side by side, slices make up one.
    known, width = roles.known, output.width
    begins = ir.tirx.floormod(first, width) if width else first
    if not known.can_prove_equal(begins, 0) or width not in (0, size * columns):
        raise refuse_stream(
            store.where, f"columns from {store.target.origin[-1]}", "those that the CTA merges"
        )
    split = Split(
        place,
        read_steps(slabs, handed, "shared.dsm"),
        read_steps(begun, names),
        read_steps(inside, names),
        columns,
    )
    steps = read_steps([each for each in after if each is not store], names)
    for step in (*split.before, *split.steps, *steps):
        if step.kind not in (Kind.ROW, Kind.CARRY):
            raise refuse_stream(
                f"block '{step.name}'", step.kind.value, "values of rows, and of rows and columns"
            )
    return End(output, steps, names.placed(store, store.body.value), split)


def _columns(statements: tuple[Statement, ...], roles: Roles) -> set[int]:
    """Numbers of columns that statements go through."""
    return {
        int(loop.extent)
        for each in statements
        for loop in each.nest.loops
        if roles.loops.get(loop.loop_var) is Axis.COLUMN
    }


def _first(place: Place, columns: int) -> Any:
    return place.var * columns if place.in_cluster else ir.tirx.const(0, "int32")


def _check_slabs(
    handed: Roles,
    slabs: tuple[Statement, ...],
    place: Place,
    inside: tuple[Statement, ...],
    loop: Any,
    columns: int,
) -> None:
    """Refuse a merge that does not go through a slab part by part, in the CTA's own columns."""
    merging = analyzer((loop,))
    filled = {each.buffer: each.target for each in slabs}
    for statement in inside:
        for access in statement.loads:
            if access.buffer not in filled:
                continue
            (by, *rows), (of, *read) = filled[access.buffer].origin, access.origin
            axes = handed.buffers[access.buffer][1:]
            right = all(
                handed.known.can_prove_equal(
                    mine + (_first(place, columns) if axis is Axis.COLUMN else 0), theirs
                )
                for axis, mine, theirs in zip(axes, rows, read, strict=True)
            )
            of_rank = merging.can_prove_equal(of, loop.loop_var)
            if not (right and of_rank and handed.known.can_prove_equal(by, place.var)):
                raise refuse_stream(
                    f"{statement.where}, buffer '{access.buffer.name}'",
                    "another part than the CTA of that rank has filled",
                    "slabs whose first dimension is the rank, and slices of columns in the order "
                    "of ranks",
                )


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
    stream = only_stream(parts)
    program = _recover(outer, parts, stream, parameters)
    _check_cluster(program, f"loop '{stream.loop_var.name}'")
    return program


def streams_of(parts: list[Any]) -> list[Any]:
    """Loops over tiles of keys among the parts of a nest."""
    return [each for each in parts if isinstance(each, ir.For) and has_stream(each)]


def only_stream(parts: list[Any]) -> Any:
    """The loop over tiles of keys of a nest, which must be the only one."""
    streams = streams_of(parts)
    if len(streams) != 1:
        raise refuse_stream(
            "function", f"{len(streams)} streams in a nest", "one loop over tiles of keys"
        )
    return streams[0]


def _check_cluster(program: StreamProgram, where: str) -> None:
    """Refuse CTAs of a cluster that go through different keys and values, and do not merge."""
    keys, values, stream = program.keys, program.values, program.stream
    same = (*keys.origin, *values.origin, stream.first, stream.count)
    inside = [each.var for each in program.places if each.in_cluster]
    if len(inside) > 1 or any(ir.mentions(each, var) for var in inside for each in same):
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
    streams = streams_of(parts)
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
