"""Loads of a row, all in front of what is computed: they take as long as one then."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir


def loads_first(statement: Any, known: tuple[Any, ...]) -> Any:
    """Move loops that copy from global memory to registers in front of all others.

    nvcc does not: what merges the states of threads is volatile.

    Parameters
    ----------
    statement : tvm.tirx.Stmt
        Statements of a row, without blocks.
    known : tuple
        Variables that are known in front of them.

    Returns
    -------
    tvm.tirx.Stmt
        The same statements; loops that are not the first to use their registers, or whose places
        depend on more, stay where they are.
    """
    if not isinstance(statement, ir.SeqStmt):
        return statement
    stored = {each.buffer for each in _all(statement, ir.BufferStore)}
    first: list[Any] = []
    rest: list[Any] = []
    used: set[Any] = set()
    for each in statement.seq:
        if _is_copy(each, stored, known, used):
            first.append(each)
        else:
            rest.append(each)
            used |= {load.source for load in _all(each, ir.TensorLoad)}
            used |= {store.buffer for store in _all(each, ir.BufferStore)}
    declared = [each for each in rest if isinstance(each, ir.AllocBuffer)]
    others = [each for each in rest if not isinstance(each, ir.AllocBuffer)]
    return ir.SeqStmt([*declared, *first, *others])


def _is_copy(node: Any, stored: set[Any], known: tuple[Any, ...], used: set[Any]) -> bool:
    """Whether a loop loads from memory that the row does not store, to registers not yet used."""
    if not isinstance(node, ir.For):
        return False
    loads, stores = _all(node, ir.TensorLoad), _all(node, ir.BufferStore)
    free = {*known, *(each.loop_var for each in _all(node, ir.For))}
    places = {v for e in (*loads, *stores) for index in e.indices for v in ir.variables(index)}
    return (
        places <= free
        and all(str(e.source.scope()) == "global" and e.source not in stored for e in loads)
        and all(str(e.buffer.scope()) == "local" and e.buffer not in used for e in stores)
    )


def _all(node: Any, kind: Any) -> list[Any]:
    found: list[Any] = []
    ir.walk(node, (kind, found.append))
    return found
