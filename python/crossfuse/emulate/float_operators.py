"""Operators of floats that TVM's LLVM code generator computes otherwise than a GPU does."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.workload.dtypes import is_float

_TANH = "tirx.tanh"
#: The C library's, by type.
_OF_C = {"float32": "tanhf", "float64": "tanh"}


def as_on_gpu(func: Any) -> Any:
    """Replace operators of a function for LLVM; one without any of them is returned as it is.

    NaN is unequal to everything, itself too: TVM's ``!=`` is false of it. ``tanh`` has all digits
    of small numbers, of which TVM's, a quotient of exponentials, leaves 0.
    """
    if not any(map(_is_wrong, ir.nodes(func.body, ir.tirx.NE, ir.Call))):
        return func
    return ir.with_body(func, ir.mutate(func.body, (ir.tirx.NE, _unequal), (ir.Call, _call)))


def _is_wrong(node: Any) -> bool:
    return _is_tanh(node) if isinstance(node, ir.Call) else is_float(str(node.a.ty))


def _is_tanh(call: Any) -> bool:
    return str(getattr(call.op, "name", "")) == _TANH


def _unequal(node: Any, mutator: Any) -> Any:
    node = mutator.default_mutate(node)
    if not is_float(str(node.a.ty)):
        return node
    # By way of an integer: of the opposite of a comparison TVM makes the other comparison.
    return ir.tirx.EQ(ir.tirx.Cast("int8", ir.tirx.EQ(node.a, node.b)), ir.tirx.const(0, "int8"))


def _call(node: Any, mutator: Any) -> Any:
    node = mutator.default_mutate(node)
    dtype = str(node.ty)
    if not _is_tanh(node):
        return node
    wide = dtype if dtype in _OF_C else "float32"
    (x,) = node.args
    made = ir.tirx.call_pure_extern(wide, _OF_C[wide], x if wide == dtype else x.astype(wide))
    return made if wide == dtype else made.astype(dtype)
