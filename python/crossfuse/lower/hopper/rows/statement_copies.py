"""Copies of statements for one more row: with registers and loop variables of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from crossfuse import _tvm as ir


def fresh(statements: Sequence[Any], shared: Collection[Any] = ()) -> tuple[Any, ...]:
    """Copy statements.

    Parameters
    ----------
    statements : Sequence[tvm.tirx.Stmt]
        They may use registers that an earlier one of them allocates.
    shared : Collection
        Buffers in registers that the copy has, too.

    Returns
    -------
    tuple[tvm.tirx.Stmt, ...]
        The same, on other buffers in registers and in other loops; what threads share stays.
    """
    images: dict[Any, Any] = {}

    def allocate(node: Any) -> None:
        if str(node.buffer.scope()) != "local" or node.buffer in shared:
            return
        kind = node.buffer.ty
        images[node.buffer] = ir.tirx.decl_buffer(
            kind.shape, kind.dtype, node.buffer.name, scope=node.buffer.scope(), layout=None
        )

    def count(loop: Any) -> None:
        images[loop.loop_var] = ir.Var(loop.loop_var.name, str(loop.loop_var.ty))

    for each in statements:
        ir.walk(each, (ir.AllocBuffer, allocate), (ir.For, count))
    return tuple(ir.substitute(each, lambda var: images.get(var, var)) for each in statements)


def flat(statement: Any) -> list[Any]:
    """Statements one behind the other."""
    if not isinstance(statement, ir.SeqStmt):
        return [statement]
    return [each for part in statement.seq for each in flat(part)]


def independent_of(row: Any, statements: Sequence[Any]) -> dict[Any, Any]:
    """Statements that load the same whatever the row is, by the registers that they fill.

    Parameters
    ----------
    row : tvm.ir.Var
        Number of the row.
    statements : Sequence[tvm.tirx.Stmt]
        Of a row.
    """
    stores = [ir.buffer_stores(each) for each in statements]
    filled = [each.buffer for group in stores for each in group]
    found: dict[Any, Any] = {}
    for statement, group in zip(statements, stores, strict=True):
        buffers = {each.buffer for each in group}
        once = len(buffers) == 1 and all(filled.count(each) == len(group) for each in buffers)
        own = any(var.same_as(row) for var in ir.variables(statement))
        if once and not own and _only_loads(statement):
            found[buffers.pop()] = statement
    return found


def _only_loads(statement: Any) -> bool:
    """Whether a statement does nothing but load from global memory to registers."""
    loads, stores = ir.buffer_loads(statement), ir.buffer_stores(statement)
    return (
        bool(loads)
        and all(str(each.source.scope()) == "global" for each in loads)
        and all(str(each.buffer.scope()) == "local" for each in stores)
    )
