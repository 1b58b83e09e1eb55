"""Reads how CTAs merge what a stream's parts make of a tile of rows: in a cluster, or later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.recover.store import outer_loops
from crossfuse.lower.hopper.stream.program import Axis, Box, Kind, Split, Step
from crossfuse.lower.hopper.stream.recover.statements import (
    Roles,
    Statement,
    only_store,
    read_output,
    read_statements,
    refuse_stream,
)
from crossfuse.lower.hopper.stream.recover.steps import Names, read_steps
from crossfuse.lower.tree import analyzer, coordinate
from crossfuse.markers import DSM_SCOPE


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
