"""Gradients of activations, which graphs of backward passes have as operators.

Inductor decomposes them before we see them; without it they stand as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax

from crossfuse.relax.converters.arithmetic import WIDE, Floats
from crossfuse.relax.converters.operands import argument, filled, operand, result_type

#: Of an importer's expressions, the gradient of the result, what the activation read or made, and
#: the node.
_Gradient = Callable[[Floats, Any, Any, fx.Node], Any]


def _wide(function: _Gradient) -> Any:
    """A converter of a gradient's operator, in float32 at least and rounded once."""

    def convert(node: fx.Node, importer: Any) -> Any:
        dtype = result_type(node)
        wide = dtype if dtype in WIDE else "float32"
        grad, x = (operand(each, importer, wide) for each in node.args[:2])
        made = function(Floats(importer, wide), grad, x, node)
        return made if wide == dtype else importer.block_builder.emit(relax.op.astype(made, dtype))

    return convert


def _sigmoid(floats: Floats, grad: Any, made: Any, _: fx.Node) -> Any:
    op = relax.op
    slope = floats(op.multiply, made, floats(op.subtract, 1, made))
    return floats(op.multiply, grad, slope)


def _tanh(floats: Floats, grad: Any, made: Any, _: fx.Node) -> Any:
    op = relax.op
    slope = floats(op.subtract, 1, floats(op.multiply, made, made))
    return floats(op.multiply, grad, slope)


def _silu(floats: Floats, grad: Any, x: Any, _: fx.Node) -> Any:
    op, sigmoid = relax.op, floats(relax.op.sigmoid, x)
    left = floats(op.multiply, x, floats(op.subtract, 1, sigmoid))
    slope = floats(op.multiply, sigmoid, floats(op.add, left, 1))
    return floats(op.multiply, grad, slope)


def _gelu(floats: Floats, grad: Any, x: Any, node: fx.Node) -> Any:
    approximate = argument(node, 2, "approximate", "none")
    slope = _tanh_slope(floats, x) if approximate == "tanh" else _erf_slope(floats, x)
    return floats(relax.op.multiply, grad, slope)


def _erf_slope(floats: Floats, x: Any) -> Any:
    """``P(x) + x p(x)`` of the normal distribution and its density."""
    op, square = relax.op, floats(relax.op.multiply, x, x)
    erf = floats(op.erf, floats(op.multiply, x, math.sqrt(0.5)))
    whole = floats(op.multiply, floats(op.add, erf, 1), 0.5)
    bell = floats(op.exp, floats(op.multiply, square, -0.5))
    density = floats(op.multiply, bell, 1 / math.sqrt(2 * math.pi))
    return floats(op.add, whole, floats(op.multiply, x, density))


def _tanh_slope(floats: Floats, x: Any) -> Any:
    """``(1 + t) / 2 + x (1 - t * t) u' / 2`` where ``t = tanh(u)`` and ``u = a x + b x^3``."""
    op, square = relax.op, floats(relax.op.multiply, x, x)
    a = math.sqrt(2 / math.pi)
    b = 0.044715 * a
    inner = floats(op.multiply, x, floats(op.add, floats(op.multiply, square, b), a))
    tanh = floats(op.tanh, inner)
    slope = floats(op.add, floats(op.multiply, square, 3 * b), a)
    curve = floats(op.subtract, 1, floats(op.multiply, tanh, tanh))
    second = floats(op.multiply, x, floats(op.multiply, curve, slope))
    both = floats(op.add, floats(op.add, tanh, 1), second)
    return floats(op.multiply, both, 0.5)


def _threshold(node: fx.Node, importer: Any) -> Any:
    """The gradient of ``relu`` and ``threshold``; it passes where x is NaN."""
    emit = importer.block_builder.emit
    grad, x = importer.env[node.args[0]], importer.env[node.args[1]]
    below = emit(relax.op.less_equal(x, operand(node.args[2], importer, str(x.ty.dtype))))
    return emit(relax.op.where(below, filled(grad, 0, importer), grad))


#: By the name of the operator.
GRADIENTS = {
    "sigmoid_backward.default": _wide(_sigmoid),
    "tanh_backward.default": _wide(_tanh),
    "silu_backward.default": _wide(_silu),
    "gelu_backward.default": _wide(_gelu),
    "threshold_backward.default": _threshold,
}
