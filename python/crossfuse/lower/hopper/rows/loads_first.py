"""Loads of a row, all in front of what is computed: they take as long as one then."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.order_loads import VECTORS, load_in_order


def loads_first(statement: Any, known: tuple[Any, ...]) -> Any:
    """Move what copies from global memory to registers in front of what computes.

    nvcc does not, as what merges the states of threads is volatile. ptxas keeps the order of
    relaxed loads; other ones it would put behind what it computes, so of these what is needed last
    is loaded first.

    Parameters
    ----------
    statement : tvm.tirx.Stmt
        Statements of a row, without blocks.
    known : tuple
        Variables that are known in front of them.

    Returns
    -------
    tvm.tirx.Stmt
        The same statements; copies that are not the first to use their registers, or that depend on
        more than is known, stay where they are.
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
    return ir.SeqStmt([*declared, *_loads(first), *others])


def _loads(copies: list[Any]) -> list[Any]:
    """Copies in the order in which they are asked for."""
    made = [(each, _in_order(each)) for each in copies]
    relaxed = [new for old, new in made if not new.same_as(old)]
    return [*(old for old, new in reversed(made) if new.same_as(old)), *relaxed]


def _in_order(node: Any) -> Any:
    """A copy with relaxed loads where a thread loads 16 bytes of 16-bit elements side by side."""

    def load(loop: Any, mutator: Any) -> Any:
        store = loop.body
        if loop.kind != ir.ForKind.VECTORIZED or not isinstance(store, ir.BufferStore):
            return mutator.default_mutate(loop)
        source, lanes = store.value, ir.constant(loop.extent)
        dtype = str(store.buffer.ty.dtype)
        if not isinstance(source, ir.TensorLoad) or (dtype, lanes) not in VECTORS:
            return mutator.default_mutate(loop)
        first = {loop.loop_var: ir.tirx.IntImm(str(loop.loop_var.ty), 0)}
        to, place = (
            [ir.substitute(index, lambda var: first.get(var, var)) for index in each.indices]
            for each in (store, source)
        )
        words = load_in_order(source.source, place, dtype, lanes)
        return ir.BufferStore(store.buffer, words, [*to[:-1], ir.tirx.Ramp(to[-1], 1, lanes)])

    return ir.mutate(node, (ir.For, load))


def _is_copy(node: Any, stored: set[Any], known: tuple[Any, ...], used: set[Any]) -> bool:
    """Whether a loop loads from memory that the row does not store, to registers not yet used."""
    if not isinstance(node, (ir.For, ir.IfThenElse)):
        return False
    loads, stores = _all(node, ir.TensorLoad), _all(node, ir.BufferStore)
    buffers = {*(each.source for each in loads), *(each.buffer for each in stores)}
    free = {*known, *buffers, *(each.loop_var for each in _all(node, ir.For))}
    return (
        set(ir.variables(node)) <= free
        and all(str(e.source.scope()) == "global" and e.source not in stored for e in loads)
        and all(str(e.buffer.scope()) == "local" and e.buffer not in used for e in stores)
    )


def _all(node: Any, kind: Any) -> list[Any]:
    found: list[Any] = []
    ir.walk(node, (kind, found.append))
    return found
