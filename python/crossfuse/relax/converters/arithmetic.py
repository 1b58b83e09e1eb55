"""Sums, products, quotients and comparisons of two operands, and other operators that promote.

TVM's own drop ``alpha``, and give numbers the type of the tensor beside them: ``ids > 0.5`` of
integers compares with zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax

from crossfuse.relax.converters.operands import (
    argument,
    common_type,
    filled,
    operand,
    result_type,
    tvm_own,
)

_Operator = Callable[[Any, Any], Any]
#: Overloads for a tensor and for a number.
_KINDS = ("Tensor", "Scalar")


def _binary(
    operator: _Operator, *, swapped: bool = False, of_truths: _Operator | None = None
) -> Any:
    """A converter in the result's type; `of_truths` is for booleans, which TVM's operator lacks."""

    def convert(node: fx.Node, importer: Any) -> Any:
        if any(not _plain(each) for each in node.args[:2]):
            return tvm_own(node, importer)
        dtype = result_type(node)
        left, right = (operand(each, importer, dtype) for each in node.args[:2])
        if swapped:
            left, right = right, left
        alpha = argument(node, 2, "alpha", 1)
        if alpha != 1:
            scaled = relax.op.multiply(right, relax.const(alpha, dtype))
            right = importer.block_builder.emit(scaled)
        made = of_truths if dtype == "bool" and of_truths is not None else operator
        return importer.block_builder.emit(made(left, right))

    return convert


def _multiply_add(node: fx.Node, importer: Any) -> Any:
    """A product and a sum, which inductor's decompositions name as one."""
    emit, dtype = importer.block_builder.emit, result_type(node)
    left, right, more = (operand(each, importer, dtype) for each in node.args)
    return emit(relax.op.add(emit(relax.op.multiply(left, right)), more))


def _comparison(operator: _Operator) -> Any:
    """A converter in the type that both operands are promoted to."""

    def convert(node: fx.Node, importer: Any) -> Any:
        dtype = common_type(node)
        dtype = "int8" if dtype == "bool" else dtype
        one, other = node.args[:2]
        if isinstance(one, fx.Node) and one is other and "float" in dtype:
            return _of_itself(operator, operand(one, importer, dtype), importer.block_builder.emit)
        left, right = (operand(each, importer, dtype) for each in (one, other))
        return importer.block_builder.emit(operator(left, right))

    return convert


def _of_itself(operator: _Operator, x: Any, emit: Callable[[Any], Any]) -> Any:
    """A comparison of a value with itself asks for NaN, which TVM's simplifier leaves out."""
    wide = x if "64" in str(x.ty.dtype) else emit(relax.op.astype(x, "float32"))
    if operator is relax.op.not_equal:
        return emit(relax.op.isnan(wide))
    if operator in (relax.op.less, relax.op.greater):
        return emit(operator(x, x))
    return emit(relax.op.logical_not(emit(relax.op.isnan(wide))))


def _plain(given: Any) -> bool:
    """Whether an operand is a tensor or a number, not a size of the graph."""
    return not isinstance(given, fx.Node) or hasattr(given.meta.get("val"), "dtype")


def _where(node: fx.Node, importer: Any) -> Any:
    condition, *both = node.args
    mask, dtype = importer.env[condition], result_type(node)

    def value(given: Any) -> Any:
        if isinstance(given, fx.Node):
            return operand(given, importer, dtype)
        like = importer.block_builder.emit(relax.op.astype(mask, dtype))
        return filled(like, given, importer)

    chosen = [value(each) for each in both]
    return importer.block_builder.emit(relax.op.where(mask, *chosen))


def _masked_fill(node: fx.Node, importer: Any) -> Any:
    x, mask, value = node.args
    data = operand(x, importer, result_type(node))
    given = isinstance(value, fx.Node)
    chosen = operand(value, importer, result_type(node)) if given else filled(data, value, importer)
    return importer.block_builder.emit(relax.op.where(importer.env[mask], chosen, data))


def _spread(root: bool) -> Any:
    """A converter to the variance or its root, which are rounded once and have any correction.

    TVM's own drop the correction of ``std``, and round the variance before its root is taken.
    """

    def convert(node: fx.Node, importer: Any) -> Any:
        emit, dtype = importer.block_builder.emit, result_type(node)
        wide = dtype if dtype == "float64" else "float32"
        x, axes = operand(node.args[0], importer, wide), argument(node, 1, "dim") or None
        count, correction = importer._reduction_size(x, axes), node.kwargs.get("correction")
        correction = 1 if correction is None else correction
        if count is None and correction:
            raise NotImplementedError("a correction of an unknown number of elements")
        made = emit(relax.op.variance(x, axes, keepdims=node.kwargs.get("keepdim", False)))
        if correction:
            left = max(count - correction, 0)
            factor = count / left if left else math.inf
            made = emit(relax.op.multiply(made, relax.const(factor, wide)))
        made = emit(relax.op.sqrt(made)) if root else made
        return made if wide == dtype else emit(relax.op.astype(made, dtype))

    return convert


def _decomposed(node: fx.Node, _importer: Any) -> Any:
    """Torch's own decomposition is taken: TVM's overflows where the result would not."""
    raise NotImplementedError(f"{node.target}, whose parts are beyond the type")


def _largest(operator: Callable[..., Any]) -> Any:
    def convert(node: fx.Node, importer: Any) -> Any:
        emit, x = importer.block_builder.emit, importer.env[node.args[0]]
        axes, keep = argument(node, 1, "dim", []), argument(node, 2, "keepdim", False)
        dtype = str(x.ty.dtype)
        wide = emit(relax.op.astype(x, "int32")) if dtype == "bool" else x
        made = emit(operator(wide, list(axes) or None, keepdims=keep))
        return emit(relax.op.astype(made, dtype)) if dtype == "bool" else made

    return convert


def _truth(operator: Callable[..., Any]) -> Any:
    def convert(node: fx.Node, importer: Any) -> Any:
        emit, x = importer.block_builder.emit, importer.env[node.args[0]]
        axes, keep = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
        true = x if str(x.ty.dtype) == "bool" else emit(relax.op.not_equal(x, _zero(x)))
        ones = emit(relax.op.astype(true, "int32"))
        return emit(relax.op.astype(emit(operator(ones, axes, keepdims=keep)), "bool"))

    return convert


def _zero(x: Any) -> Any:
    return relax.const(0, str(x.ty.dtype))


def _along(operator: Callable[..., Any]) -> Any:
    def convert(node: fx.Node, importer: Any) -> Any:
        x = operand(node.args[0], importer, result_type(node))
        return importer.block_builder.emit(operator(x, argument(node, 1, "dim")))

    return convert


_BINARY = {
    "add": relax.op.add,
    "sub": relax.op.subtract,
    "mul": relax.op.multiply,
    "div": relax.op.divide,
}
_COMPARISONS = {
    "eq": relax.op.equal,
    "ne": relax.op.not_equal,
    "lt": relax.op.less,
    "le": relax.op.less_equal,
    "gt": relax.op.greater,
    "ge": relax.op.greater_equal,
}
#: Sums and products of truth values.
_OF_TRUTHS = {"add": relax.op.logical_or, "mul": relax.op.logical_and}
#: By the name of the operator.
ARITHMETIC = {
    **{
        f"{name}.{kind}": _binary(op, of_truths=_OF_TRUTHS.get(name))
        for name, op in _BINARY.items()
        for kind in _KINDS
    },
    **{f"rsub.{kind}": _binary(relax.op.subtract, swapped=True) for kind in _KINDS},
    **{f"{name}.{kind}": _comparison(op) for name, op in _COMPARISONS.items() for kind in _KINDS},
    "fma.default": _multiply_add,
    "maximum.default": _binary(relax.op.maximum, of_truths=relax.op.logical_or),
    "minimum.default": _binary(relax.op.minimum, of_truths=relax.op.logical_and),
    **{f"where.{kind}": _where for kind in ("self", "Scalar", "ScalarSelf", "ScalarOther")},
    **{f"any.{kind}": _truth(relax.op.max) for kind in ("default", "dim", "dims")},
    **{f"all.{kind}": _truth(relax.op.min) for kind in ("default", "dim", "dims")},
    **dict.fromkeys(("masked_fill.Scalar", "masked_fill.Tensor"), _masked_fill),
    "var.correction": _spread(root=False),
    "std.correction": _spread(root=True),
    # Exponentials of numbers of any size; sums of powers in two bytes.
    **dict.fromkeys(("logaddexp.default", "linalg_vector_norm.default"), _decomposed),
    "amax.default": _largest(relax.op.max),
    "amin.default": _largest(relax.op.min),
    **dict.fromkeys(("softmax.int", "_softmax.default"), _along(relax.op.nn.softmax)),
    **dict.fromkeys(("log_softmax.int", "_log_softmax.default"), _along(relax.op.nn.log_softmax)),
    "cumsum.default": _along(relax.op.cumsum),
}
