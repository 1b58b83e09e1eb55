"""How operands of a product lie in memory, and which are views of an input."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import is_reduction, reduces


def is_view(sch: Any, block: Any) -> bool:
    """Whether a block only copies an input at other indices, with zeros outside its bounds.

    Windows of a convolution are such views. They are no part of a chain of products: the operand is
    read at these indices wherever it is staged.
    """
    body = sch.get(block).body
    if sch.get_producers(block) or reduces(sch, block) or not isinstance(body, ir.BufferStore):
        return False
    value = body.value
    if isinstance(value, ir.Call) and str(getattr(value.op, "name", "")) == ir.IF_THEN_ELSE:
        _, value, otherwise = value.args
        if not isinstance(otherwise, ir.tirx.FloatImm) or float(otherwise.value) != 0:
            return False
    return isinstance(value, ir.TensorLoad)


def is_k_major(sch: Any, consumer: Any, index: int) -> bool:
    """Whether the weights that a block multiplies its read `index` by are stored as [n, k]."""
    weights = sch.get(consumer).reads[1 - index]
    reduced = [each.var for each in sch.get(consumer).iter_vars if is_reduction(each)]
    inner = list(ir.variables(weights.region[-1].min))
    return any(each.same_as(var) for each in inner for var in reduced)
