"""Tiles of tensors in global memory: what a stream loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.recover.contraction import is_zero
from crossfuse.lower.hopper.stream.program.parts import Axis, Box
from crossfuse.lower.hopper.stream.recover.statements import Access, Roles, Statement, refuse_stream
from crossfuse.lower.stored_elements import implies
from crossfuse.lower.tree import bounds


def read_load(statement: Statement, roles: Roles, axis: Axis, stored: int) -> Box:
    """Read the load of a tile whose rows go along an axis; so many rows of a tile are stored.

    Raises
    ------
    LoweringRefused
        If it is no copy of whole rows of a tensor.
    """
    load = copied(
        statement, lambda each: axis is Axis.ROW and _has_rows(statement, each, roles, stored)
    )
    found = statement.nest.along
    places = [found(load.source, each) for each in load.indices]
    loops = tuple(None if loop is None else loop.loop_var for _, loop in places)
    access = Access(load.source, tuple(first for first, _ in places), loops)
    if _order(access, roles) != _order(statement.target, roles):
        raise refuse_stream(
            statement.where, "a tile that is transposed as it is loaded", "a copy of a box"
        )
    return _box(statement, access, roles, axis)


def read_output(statement: Statement, roles: Roles, columns: int = 0) -> Box:
    """Read the box that a store writes: all columns, or so many of a CTA's slice."""
    box = _box(statement, statement.target, roles, Axis.ROW, columns)
    nest, rows = statement.nest, box.rows
    loop = statement.target.loops[box.axis]
    for term in nest.further_conditions():
        found = _limit(nest.placed(term), loop, statement)
        if found is None:
            nest.check_predicate(box.buffer)
        else:
            rows = min(rows, found)
    return replace(box, rows=rows)


def _limit(term: Any, loop: Any, statement: Statement) -> int | None:
    """The number of rows for which a condition holds, the first ones; None for another one."""
    if not isinstance(term, ir.tirx.LT):
        return None
    return ir.constant(statement.nest.known.simplify(term.b - term.a + loop))


def _order(access: Access, roles: Roles) -> list[Axis | None]:
    return [roles.of_loop(each) for each in access.loops if each is not None]


def _box(statement: Statement, access: Access, roles: Roles, axis: Axis, columns: int = 0) -> Box:
    *outer, last = access.loops
    down = [number for number, each in enumerate(outer) if each is not None]
    extents = {each.loop_var: int(each.extent) for each in statement.nest.loops}
    shape = [int(each) for each in access.buffer.ty.shape]
    whole = (1 if last is None else extents[last]) == (columns or shape[-1])
    if len(down) != 1 or roles.of_loop(outer[down[0]]) is not axis or not whole:
        raise refuse_stream(
            f"{statement.where}, buffer '{access.buffer.name}'",
            f"a box of {len(down) + 1} dimensions, {extents.get(last)} of {shape[-1]} columns",
            f"{axis.value} with all their columns, which are the last dimension",
        )
    return Box(access.buffer, access.origin, down[0], extents[outer[down[0]]])


def copied(statement: Statement, harmless: Callable[[Any], bool] = lambda _: False) -> Any:
    """What a copy loads; one that is zero beyond its tensor, or by harmless conditions, too."""
    value = statement.body.value
    if not isinstance(value, ir.TensorLoad):
        condition, chosen, other = branches_of(value)
        if isinstance(chosen, ir.TensorLoad) and is_zero(_plain(other)):
            beyond = _beyond(statement, condition, chosen)
            rest = [each for each in beyond if not harmless(each)]
            if rest:
                raise refuse_stream(
                    statement.where, f"zeros unless {rest[0]}", "zeros beyond the tensor alone"
                )
            value = chosen
    if not isinstance(value, ir.TensorLoad) or str(value.source.scope()) != "global":
        raise refuse_stream(
            statement.where,
            f"a tile in shared memory of {statement.body.value}",
            "a copy of a parameter, zero beyond it",
        )
    return value


def branches_of(value: Any) -> tuple[Any, Any, Any]:
    """Condition and both values of a choice; None three times for another expression."""
    if isinstance(value, ir.tirx.Select):
        return value.condition, value.true_value, value.false_value
    is_call = isinstance(value, ir.Call) and isinstance(value.op, ir.Op)
    if is_call and value.op.name == ir.IF_THEN_ELSE:
        return tuple(value.args)
    return None, None, None


def _plain(value: Any) -> Any:
    """A constant without a cast."""
    if isinstance(value, ir.tirx.Cast):
        value = value.value
    if isinstance(value, ir.tirx.IntImm):
        return ir.tirx.FloatImm("float32", float(value.value))
    return value


def _beyond(statement: Statement, condition: Any, load: Any) -> list[Any]:
    """Terms of a condition that do not hold everywhere in the tensor."""
    nest = statement.nest
    loops = bounds((*nest.around, *nest.loops))
    inside = [
        nest.placed(index) < extent
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True)
    ]
    terms = map(nest.placed, ir.terms(condition))
    return [each for each in terms if not any(implies(known, each, loops) for known in inside)]


def _has_rows(statement: Statement, term: Any, roles: Roles, stored: int) -> bool:
    """Whether a condition leaves out rows that are not stored: what they hold does not matter."""
    (loop,) = (
        each.loop_var
        for each in statement.nest.loops
        if roles.of_loop(each.loop_var) is Axis.ROW and ir.constant(each.extent) != 1
    )
    limit = _limit(term, loop, statement)
    return limit is not None and limit >= stored
