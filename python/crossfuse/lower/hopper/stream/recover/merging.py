"""Reads how CTAs merge what a stream's parts make of a tile of rows: in a cluster, or later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.recover.store import is_bound, outer_loops
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


@dataclass(frozen=True)
class Handed:
    """What the parts of a stream hand over."""

    #: Axes of the stream's loops.
    roles: Roles
    #: Variables that steps are written in.
    names: Names
    #: Stores to slabs.
    slabs: tuple[Statement, ...]
    #: Which CTA it is.
    place: Place


def is_split(nests: Sequence[Any]) -> bool:
    """Whether nests are a stream of each CTA of a cluster, and the merge."""
    return len(nests) == 2 and all(map(is_bound, nests))


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

    def own(var: Any) -> Any:
        return loop.loop_var if var.same_as(other.loop_var) else var

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
    found = [outer_loops(ir.substitute(each, lambda var: own.get(var, var))) for each in nests]
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
    body = [ir.substitute(each, lambda var: same.get(var, var)) for each in merging]
    return tuple(each for each in outer if not each.same_as(part)), part, parts, body


def read_merge(handed: Handed, parts: list[Any], around: tuple[Any, ...]) -> End:
    """Read the nest that merges: first values, a loop over the CTAs, and what is made of the end.

    Refuses slabs that are not merged one after another, and CTAs that store other columns than they
    merge: those of a slice in a cluster, all in a kernel of its own.
    """
    turns = [each for each in parts if isinstance(each, ir.For) and _is_sequence(each.body)]
    size = handed.place.extent
    if len(turns) != 1 or ir.constant(turns[0].extent) != size:
        raise refuse_stream(
            "function", f"{len(turns)} loops that merge", f"one loop over the {size} CTAs"
        )
    (loop,) = turns
    number = next(each for each, part in enumerate(parts) if part.same_as(loop))
    begun = read_statements(parts[:number], around)
    inside = read_statements(list(loop.body.seq), (*around, loop))
    after = read_statements(parts[number + 1 :], around)
    roles = Roles(analyzer((*around, loop)))
    roles.adopt(handed.roles, [each.buffer for each in handed.slabs])
    roles.spread((*inside, *begun, *after))
    names = handed.names.of(roles)
    columns = _slice(inside, roles)
    _check_slabs(handed, inside, loop, columns)
    store = only_store(after)
    output = read_output(store, roles, columns, _whole(handed))
    first = store.target.origin[-1] - _first(handed.place, columns)
    # Of rows that hold several tiles side by side, slices make up one.
    known, width = roles.known, output.width
    begins = ir.tirx.floormod(first, width) if width else first
    if not known.can_prove_equal(begins, 0) or width not in (0, size * columns):
        raise refuse_stream(
            store.where, f"columns from {store.target.origin[-1]}", "those that the CTA merges"
        )
    split = Split(
        handed.place,
        read_steps(list(handed.slabs), handed.names, "shared.dsm"),
        read_steps(list(begun), names),
        read_steps(list(inside), names),
        columns,
    )
    steps = read_steps([each for each in after if each is not store], names)
    _check_kinds((*split.before, *split.steps, *steps))
    return End(output, steps, names.placed(store, store.body.value), split)


def _is_sequence(node: Any) -> bool:
    return isinstance(node, ir.SeqStmt)


def _check_kinds(steps: tuple[Step, ...]) -> None:
    for each in steps:
        if each.kind not in (Kind.ROW, Kind.CARRY):
            raise refuse_stream(
                f"block '{each.name}'", each.kind.value, "values of rows, and of rows and columns"
            )


def _slice(inside: tuple[Statement, ...], roles: Roles) -> int:
    """Columns that a CTA merges."""
    found = {
        int(loop.extent)
        for each in inside
        for loop in each.nest.loops
        if roles.of_loop(loop.loop_var) is Axis.COLUMN
    }
    if len(found) != 1:
        raise refuse_stream(
            inside[0].where, f"slices of {sorted(found)} columns", "one slice of columns a CTA"
        )
    return found.pop()


def _whole(handed: Handed) -> int:
    """Columns of all slices: those of the sums that are handed over."""
    return max(
        int(loop.extent)
        for each in handed.slabs
        for loop in each.nest.loops
        if handed.roles.of_loop(loop.loop_var) is Axis.COLUMN
    )


def _first(place: Place, columns: int) -> Any:
    return place.var * columns if place.in_cluster else ir.tirx.const(0, "int32")


def _check_slabs(handed: Handed, inside: tuple[Statement, ...], loop: Any, columns: int) -> None:
    """Refuse a merge that does not go through a slab part by part, in the CTA's own columns."""
    roles = Roles(analyzer((loop,)))
    filled = {each.buffer: each.target for each in handed.slabs}
    known = handed.roles.known
    for statement in inside:
        for access in statement.loads:
            if access.buffer not in filled:
                continue
            target = filled[access.buffer]
            (by, *rows), (of, *read) = target.origin, access.origin
            axes = handed.roles.dimensions(access.buffer)[1:]
            for axis, mine, theirs in zip(axes, rows, read, strict=True):
                first = _first(handed.place, columns) if axis is Axis.COLUMN else 0
                right = known.can_prove_equal(mine + first, theirs)
                _check(right, statement, access.buffer)
            right = roles.known.can_prove_equal(of, loop.loop_var)
            right = right and known.can_prove_equal(by, handed.place.var)
            _check(right, statement, access.buffer)


def _check(right: bool, statement: Statement, buffer: Any) -> None:
    if not right:
        raise refuse_stream(
            f"{statement.where}, buffer '{buffer.name}'",
            "another part than the CTA of that rank has filled",
            "slabs whose first dimension is the rank, and slices of columns in the order of ranks",
        )
