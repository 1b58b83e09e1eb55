"""Facts about one block of a function, for the stages that read blocks."""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir

#: Combining operators of reductions, by the TVM node of their update expression.
COMBINERS = {ir.tirx.Add: "sum", ir.tirx.Mul: "product", ir.tirx.Max: "max", ir.tirx.Min: "min"}


def is_reduction(iter_var: Any) -> bool:
    """Whether a block iteration variable is a reduction axis."""
    return int(iter_var.iter_type) == int(ir.IterVar.CommReduce)


def combiner_of(block: Any) -> str | None:
    """Operator of a reduction block: "sum", "product", "max", "min", or None."""
    body = block.body
    if block.init is None or not isinstance(body, ir.BufferStore):
        return None
    operator = COMBINERS.get(type(body.value))
    return operator if operator is not None and carried(body) is not None else None


def iterations(func: Any) -> int:
    """How often blocks of an unscheduled function run, all of them together."""
    counts: list[int] = []
    ir.walk(func.body, (ir.SBlock, lambda block: counts.append(_runs(block))))
    return sum(counts)


def _runs(block: Any) -> int:
    return prod(int(each.dom.extent) for each in block.iter_vars)


def carried(store: Any) -> Any:
    """The operand of an update that is the element being updated, or None."""
    for each in (store.value.a, store.value.b):
        if isinstance(each, ir.TensorLoad) and each.source.same_as(store.buffer):
            return each
    return None


def corrected(store: Any) -> tuple[Any, Any] | None:
    """The element being updated and its factor, of ``c = c * factor + term``; else None."""
    if not isinstance(store, ir.BufferStore) or not isinstance(store.value, ir.tirx.Add):
        return None
    if not isinstance(store.value.a, ir.tirx.Mul):
        return None
    sums, factor = store.value.a.a, store.value.a.b
    own = isinstance(sums, ir.TensorLoad) and sums.source.same_as(store.buffer)
    return (sums, factor) if own else None
