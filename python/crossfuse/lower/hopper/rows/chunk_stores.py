"""Numbers of rows that one thread stores: those of a batch together, a lane each.

A store by one lane is a branch, behind which the warp's next row would wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import registers


@dataclass(frozen=True, eq=False)
class RowStore:
    """A number of a row.

    Attributes
    ----------
    store : tvm.tirx.BufferStore
        As one thread does it.
    kept : Any
        Registers for the numbers of a batch, the same in all lanes.
    """

    store: Any
    kept: Any


def without_stores(statement: Any, lane: Any, batch: int) -> tuple[Any, list[RowStore]]:
    """Statements that keep in registers what lane 0 stores of a row, and these stores.

    Parameters
    ----------
    statement : Any
        Of one row.
    lane : tvm.ir.Var
        Of the thread.
    batch : int
        Rows whose numbers are stored together.
    """
    found: list[RowStore] = []

    def visit(node: Any, mutator: Any) -> Any:
        if not _is_first(node.condition, lane) or node.else_case is not None:
            return mutator.default_mutate(node)
        if not isinstance(node.then_case, ir.BufferStore):
            return mutator.default_mutate(node)
        store = node.then_case
        if not _is_common(store, lane):
            return mutator.default_mutate(node)
        kept = registers(f"{store.buffer.name}_of_batch", batch, str(store.buffer.ty.dtype))
        found.append(RowStore(store, kept))
        return ir.BufferStore(kept, store.value, [0])

    return ir.mutate(statement, (ir.IfThenElse, visit)), found


def _is_first(condition: Any, lane: Any) -> bool:
    if not isinstance(condition, ir.tirx.EQ):
        return False
    return condition.a.same_as(lane) and ir.constant(condition.b) == 0


def _is_common(store: Any, lane: Any) -> bool:
    """Whether all lanes have a number: one that is made of states, and of no thread's elements."""
    parts = (store.value, *store.indices)
    if any(var.same_as(lane) for each in parts for var in ir.variables(each)):
        return False
    loads = ir.buffer_loads(*parts)
    return all(
        str(each.source.scope()) == "local" and all(int(e) == 1 for e in each.source.ty.shape)
        for each in loads
    )


def number_of(each: RowStore, lane: Any, batch: int) -> Any:
    """The number of a lane's row."""
    value = each.kept[0]
    for row in range(1, batch):
        value = ir.script.Select(lane == row, each.kept[row], value)
    return value
