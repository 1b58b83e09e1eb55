"""Activations with bounds, slopes and scales.

TVM's own take no bound of ``clamp_max``, no scale of ``elu`` (which ``selu`` has), and another
``celu``. Inductor writes ``hardtanh``, ``relu6``, ``hardswish`` and every ``clamp`` as
``clamp_min`` and ``clamp_max``.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from tvm import relax

from crossfuse.relax.converters.near_zero import WIDE, Floats
from crossfuse.relax.converters.operands import argument, operand, result_type


def _clamp(node: fx.Node, importer: Any) -> Any:
    return _between(node, importer, argument(node, 1, "min"), argument(node, 2, "max"))


def _clamp_min(node: fx.Node, importer: Any) -> Any:
    return _between(node, importer, argument(node, 1, "min"), None)


def _clamp_max(node: fx.Node, importer: Any) -> Any:
    return _between(node, importer, None, argument(node, 1, "max"))


def _hardtanh(node: fx.Node, importer: Any) -> Any:
    least, most = argument(node, 1, "min_val", -1), argument(node, 2, "max_val", 1)
    return _between(node, importer, least, most)


def _relu6(node: fx.Node, importer: Any) -> Any:
    return _between(node, importer, 0, 6)


def _between(node: fx.Node, importer: Any, least: Any, most: Any) -> Any:
    x = operand(node.args[0], importer, result_type(node))
    return _bounded(x, least, most, importer)


def _bounded(x: Any, least: Any, most: Any, importer: Any) -> Any:
    for bound, operator in ((least, relax.op.maximum), (most, relax.op.minimum)):
        if bound is not None:
            limit = operand(bound, importer, str(x.ty.dtype))
            x = importer.block_builder.emit(operator(x, limit))
    return x


def _hard(node: fx.Node, importer: Any) -> Any:
    """``hardsigmoid``: ``clamp(x + 3, 0, 6) / 6``."""
    dtype, emit = result_type(node), importer.block_builder.emit
    x = operand(node.args[0], importer, dtype)
    moved = _bounded(emit(relax.op.add(x, relax.const(3, dtype))), 0, 6, importer)
    return emit(relax.op.divide(moved, relax.const(6, dtype)))


def _hardswish(node: fx.Node, importer: Any) -> Any:
    made = relax.op.multiply(importer.env[node.args[0]], _hard(node, importer))
    return importer.block_builder.emit(made)


def _elu(node: fx.Node, importer: Any) -> Any:
    alpha, scale = argument(node, 1, "alpha", 1), argument(node, 2, "scale", 1)
    return _exponential(node, importer, alpha * scale, scale, argument(node, 3, "input_scale", 1))


def _celu(node: fx.Node, importer: Any) -> Any:
    alpha = argument(node, 1, "alpha", 1)
    return _exponential(node, importer, alpha, 1, 1 / alpha)


def _exponential(node: fx.Node, importer: Any, below: float, above: float, inner: float) -> Any:
    """``above * x`` of positive numbers, and ``below * (exp(inner * x) - 1)`` of others."""
    dtype, emit = result_type(node), importer.block_builder.emit
    x = operand(node.args[0], importer, dtype)

    def scaled(value: Any, factor: float) -> Any:
        if factor == 1:
            return value
        return emit(relax.op.multiply(value, relax.const(factor, dtype)))

    one, zero = relax.const(1, dtype), relax.const(0, dtype)
    if dtype in WIDE:
        curved = Floats(importer, dtype).expm1(scaled(x, inner))
    else:  # behind products, where kernels have exponentials
        curved = emit(relax.op.subtract(emit(relax.op.exp(scaled(x, inner))), one))
    positive = emit(relax.op.greater(x, zero))
    return emit(relax.op.where(positive, scaled(x, above), scaled(curved, below)))


#: By the name of the operator.
ACTIVATIONS = {
    **dict.fromkeys(("clamp.default", "clamp.Tensor"), _clamp),
    **dict.fromkeys(("clamp_min.default", "clamp_min.Tensor"), _clamp_min),
    **dict.fromkeys(("clamp_max.default", "clamp_max.Tensor"), _clamp_max),
    **dict.fromkeys(("hardtanh.default", "hardtanh_.default"), _hardtanh),
    **dict.fromkeys(("relu6.default", "relu6_.default"), _relu6),
    "hardsigmoid.default": _hard,
    **dict.fromkeys(("hardswish.default", "hardswish_.default"), _hardswish),
    "elu.default": _elu,
    "celu.default": _celu,
}
