"""Statements of a stream as steps, in the variables of a program."""

from __future__ import annotations

from copy import copy
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.stream.program.parts import Axis, Kind, Step
from crossfuse.lower.hopper.stream.recover.products import Products
from crossfuse.lower.hopper.stream.recover.statements import Roles, Statement, refuse_stream

#: What a statement does, by the axes of its loops and those of its target.
_ROWS, _TILE, _SUMS = {Axis.ROW}, {Axis.ROW, Axis.KEY}, {Axis.ROW, Axis.COLUMN}


class Names:
    """Variables that steps are written in.

    Parameters
    ----------
    roles : Roles
        What loops go through.
    """

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.row, self.key, self.column = (
            ir.tirx.Var(name, "int32") for name in ("row", "key", "column")
        )
        self._of = {Axis.ROW: self.row, Axis.KEY: self.key, Axis.COLUMN: self.column}

    def of(self, roles: Roles) -> Names:
        """The same variables, for loops of another nest."""
        names = copy(self)
        names.roles = roles
        return names

    def placed(self, statement: Statement, expression: Any) -> Any:
        """An expression of a block in these variables."""

        def value(var: Any) -> Any:
            axis = self.roles.of_loop(var)
            return var if axis is None else self._of[axis].astype(str(var.ty))

        return ir.substitute(statement.nest.placed(expression), value)


def read_steps(statements: list[Statement], names: Names, scope: str = "local") -> tuple[Step, ...]:
    """Read statements on rows, elements of the tile, and sums; they store to a scope.

    Raises
    ------
    LoweringRefused
        If one is no store of an element, or leaves keys out.
    """
    return tuple(_read(each, names, scope) for each in statements)


def _read(statement: Statement, names: Names, wanted: str) -> Step:
    roles = names.roles
    loops = {roles.of_loop(each.loop_var) for each in statement.nest.loops}
    stored = set(roles.of_buffer(statement.buffer))
    _check_condition(statement, roles)
    _check_type(statement, wanted)
    value = names.placed(statement, statement.body.value)
    start = statement.nest.block.init
    if start is not None:
        start = names.placed(statement, start.value)
    plain = ((_ROWS, Kind.ROW), (_TILE, Kind.TILE), (_SUMS, Kind.CARRY))
    for axes, kind in plain:
        if loops == stored == axes and start is None:
            return Step(statement.name, kind, statement.buffer, value)
    reduction = statement.reduction()
    if loops != _TILE or stored != _ROWS or reduction is None:
        raise refuse_stream(
            statement.where,
            f"a store to '{statement.buffer.name}' of {statement.body.value}",
            "an element of a row, a tile or the sums, or a maximum or sum over the keys of a row",
        )
    operation, term = reduction
    kind = Kind.TOP if operation is ir.tirx.Max else Kind.SUM
    return Step(statement.name, kind, statement.buffer, names.placed(statement, term), start)


def _check_type(statement: Statement, wanted: str) -> None:
    scope, dtype = str(statement.buffer.scope()), str(statement.buffer.ty.dtype)
    if scope != wanted or dtype not in ("float32", "bfloat16", "float16"):
        raise refuse_stream(
            statement.where,
            f"'{statement.buffer.name}' of {dtype} in scope {scope}",
            f"float32 in scope {wanted}, or 16 bits for an operand of the second product",
        )


def _check_condition(statement: Statement, roles: Roles) -> None:
    """All keys of a tile take part: which of them count is told by values."""
    keys = [
        each.loop_var
        for each in statement.nest.loops
        if roles.of_loop(each.loop_var) is not Axis.ROW
    ]
    for term in ir.terms(statement.nest.realize.predicate):
        if any(each.same_as(key) for each in ir.variables(term) for key in keys):
            raise refuse_stream(
                statement.where,
                f"a block that runs only if {term}",
                "blocks that run for all keys of a tile",
                "choose the value of keys that do not count, such as -inf for a maximum",
            )


def check_order(
    within: tuple[Statement, ...], products: Products, carries: list[Statement]
) -> None:
    """The order of a kernel is that of the function.

    A kernel does everything on a tile of scores before it touches the sums: what carries are made
    of may not change behind them.

    Raises
    ------
    LoweringRefused
        If it is not.
    """
    order = {each: number for number, each in enumerate(within)}
    first, second = (order[each] for each in products.both)
    for each in within:
        reads = [access.buffer for access in each.loads]
        early = products.first.buffer in reads and order[each] < first
        late = products.second.buffer in (each.buffer, *reads) and order[each] > second
        if early or late:
            raise refuse_stream(
                each.where,
                "a statement before the scores that it reads" if early else "one behind the sums",
                "statements between both products, or between the stream's loops",
            )
    for carry in (*carries, *(each for each in within if each.buffer.same_as(products.weights))):
        reads = [access.buffer for access in carry.loads if not access.buffer.same_as(carry.buffer)]
        changed = [each for each in within if order[each] > order[carry] and each.buffer in reads]
        if changed:
            raise refuse_stream(
                carry.where,
                f"'{changed[0].buffer.name}', which {changed[0].where} changes behind it",
                "values that stay until the tile is done",
            )
