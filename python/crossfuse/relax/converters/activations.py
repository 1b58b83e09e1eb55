"""Activations with bounds, slopes and scales.

TVM's own ignore the bound of ``clamp_max`` and the scale of ``elu`` (which ``selu`` has), and
compute another ``celu``. Inductor writes ``hardtanh``, ``relu6``, ``hardswish`` and every ``clamp``
as ``clamp_min`` and ``clamp_max``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx
from tvm import relax

from crossfuse.relax.converters.operands import argument, operand, result_type

# ``log1p``, ``expm1``, ``softplus`` and ``mish``, accurate near zero too.
#
# TVM's importer writes them as ``log(1 + x)`` and ``exp(x) - 1``, which are 0 for all small
# numbers.

#: Types that need the forms for small numbers; `_wide` computes narrower ones in float32.
WIDE = ("float32", "float64")
#: Magnitudes below which the forms for small numbers are used.
_SMALL = {"log1p": 0.5, "expm1": 1.0}


class Floats:
    """Emits expressions of tensors of one type, in which plain numbers become constants."""

    def __init__(self, importer: Any, dtype: str) -> None:
        self._emit = importer.block_builder.emit
        self._dtype = dtype

    def __call__(self, operator: Callable[..., Any], *operands: Any) -> Any:
        """Emit an operator of tensors and numbers."""
        given = (self._tensor(each) for each in operands)
        return self._emit(operator(*given))

    def _tensor(self, value: Any) -> Any:
        return relax.const(value, self._dtype) if isinstance(value, (int, float)) else value

    def log1p(self, x: Any) -> Any:
        """``2 asinh(x / (2 sqrt(1 + x)))`` for small numbers."""
        op, whole = relax.op, self(relax.op.add, x, 1)
        half = self(op.divide, x, self(op.multiply, self(op.sqrt, whole), 2))
        near = self(op.multiply, self(op.asinh, half), 2)
        return self._chosen(x, _SMALL["log1p"], near, self(op.log, whole))

    def expm1(self, x: Any) -> Any:
        """``2 sinh(x / 2) exp(x / 2)`` for small numbers."""
        op, half = relax.op, self(relax.op.multiply, x, 0.5)
        product = self(op.multiply, self(op.sinh, half), self(op.exp, half))
        near = self(op.multiply, product, 2)
        far = self(op.subtract, self(op.exp, x), 1)
        return self._chosen(x, _SMALL["expm1"], near, far)

    def _chosen(self, x: Any, bound: float, near: Any, far: Any) -> Any:
        small = self(relax.op.less, self(relax.op.abs, x), bound)
        return self(relax.op.where, small, near, far)


def _wide(node: fx.Node, importer: Any, function: Callable[[Floats, Any], Any]) -> Any:
    """A function of a node's first operand, in float32 at least and rounded once."""
    dtype = result_type(node)
    wide = dtype if dtype in WIDE else "float32"
    made = function(Floats(importer, wide), operand(node.args[0], importer, wide))
    return made if wide == dtype else importer.block_builder.emit(relax.op.astype(made, dtype))


def _softplus(node: fx.Node, importer: Any) -> Any:
    """``log1p(exp(beta x)) / beta``, and x where ``beta x`` exceeds the threshold."""
    beta, threshold = argument(node, 1, "beta", 1), argument(node, 2, "threshold", 20)

    def function(floats: Floats, x: Any) -> Any:
        op = relax.op
        scaled = x if beta == 1 else floats(op.multiply, x, beta)
        curved = floats.log1p(floats(op.exp, scaled))
        curved = curved if beta == 1 else floats(op.divide, curved, beta)
        return floats(op.where, floats(op.greater, scaled, threshold), x, curved)

    return _wide(node, importer, function)


def _mish(node: fx.Node, importer: Any) -> Any:
    """``x tanh(softplus(x))`` as ``x n / (n + 2)``, of ``n = e (e + 2)`` and ``e = exp(x)``."""

    def function(floats: Floats, x: Any) -> Any:
        op = relax.op
        e = floats(op.exp, x)
        n = floats(op.multiply, e, floats(op.add, e, 2))
        curved = floats(op.multiply, x, floats(op.divide, n, floats(op.add, n, 2)))
        return floats(op.where, floats(op.greater, x, 20), x, curved)

    return _wide(node, importer, function)


def _clamp(node: fx.Node, importer: Any) -> Any:
    return _between(node, importer, argument(node, 1, "min"), argument(node, 2, "max"))


def _clamp_min(node: fx.Node, importer: Any) -> Any:
    return _between(node, importer, argument(node, 1, "min"), None)


def _clamp_max(node: fx.Node, importer: Any) -> Any:
    return _between(node, importer, None, argument(node, 1, "max"))


def _hardtanh(node: fx.Node, importer: Any) -> Any:
    least, most = argument(node, 1, "min_val", -1), argument(node, 2, "max_val", 1)
    return _between(node, importer, least, most)


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
    """``above * x`` for positive numbers, ``below * (exp(inner * x) - 1)`` for others."""
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
    **dict.fromkeys(("relu6.default", "relu6_.default"), partial(_between, least=0, most=6)),
    "hardsigmoid.default": _hard,
    **dict.fromkeys(("hardswish.default", "hardswish_.default"), _hardswish),
    "elu.default": _elu,
    "celu.default": _celu,
    "mish.default": _mish,
    "log1p.default": partial(_wide, function=Floats.log1p),
    "expm1.default": partial(_wide, function=Floats.expm1),
    "softplus.default": _softplus,
}
