"""Operands of torch's operators, in the type that torch computes in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from tvm import relax


def name_of(dtype: torch.dtype) -> str:
    """TVM's name of an element type."""
    return str(dtype).removeprefix("torch.")


def result_type(node: fx.Node) -> str:
    """The element type of a node's result."""
    return name_of(node.meta["val"].dtype)


def common_type(node: fx.Node) -> str:
    """The type that torch promotes the first two operands of a node to."""
    return name_of(torch.result_type(*(_value(each) for each in node.args[:2])))


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of a node that may be given by position or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def operand(given: Any, importer: Any, dtype: str) -> Any:
    """A tensor or a number as an expression of type `dtype`.

    The importer has the tensors that were made so far. ``NotImplementedError`` for what is neither,
    such as a symbolic size.
    """
    if isinstance(given, (bool, int, float)):
        return relax.const(given, dtype)
    value = importer.env[given] if isinstance(given, fx.Node) else given
    if not isinstance(getattr(value, "ty", None), relax.TensorType):
        raise NotImplementedError(f"an operand that is no tensor: {given}")
    if str(value.ty.dtype) == dtype:
        return value
    return importer.block_builder.emit(relax.op.astype(value, dtype))


def tvm_own(node: fx.Node, importer: Any) -> Any:
    """The result of TVM's own converter, where ours does no better."""
    return importer.create_convert_map()[node.target.__name__](node)


def filled(like: Any, value: Any, importer: Any) -> Any:
    """A tensor of one number, in the shape and type of another.

    A constant in ``where`` would leave a tensor that kernels cannot hold, and TVM fills with finite
    numbers only.
    """
    dtype, emit = str(like.ty.dtype), importer.block_builder.emit
    finite = not isinstance(value, float) or math.isfinite(value)
    made = emit(relax.op.full_like(like, relax.const(value if finite else 1, dtype)))
    return made if finite else emit(relax.op.multiply(made, relax.const(value, dtype)))


def _value(given: Any) -> Any:
    return given.meta["val"] if isinstance(given, fx.Node) else given
