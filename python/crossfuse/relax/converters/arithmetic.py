"""Arithmetic, comparisons, other operators that promote, and activations.

TVM's own drop ``alpha``, and give numbers the type of the tensor beside them: ``ids > 0.5`` of
integers compares with zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
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
        if operator is relax.op.multiply and "float" in dtype and 0 in node.args[:2]:
            return _no_times(left if isinstance(node.args[0], fx.Node) else right, importer)
        return importer.block_builder.emit(made(left, right))

    return convert


def _no_times(x: Any, importer: Any) -> Any:
    """A tensor times 0: NaN of infinities and NaN, where TVM's simplifier takes all for 0."""
    emit = importer.block_builder.emit
    wide = x if "64" in str(x.ty.dtype) else emit(relax.op.astype(x, "float32"))
    finite = emit(relax.op.isfinite(wide))
    return emit(relax.op.where(finite, *(filled(x, each, importer) for each in (0.0, math.nan))))


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


# Activations with bounds, slopes and scales.
#
# TVM's own ignore the bound of ``clamp_max`` and the scale of ``elu`` (which ``selu`` has), and
# compute another ``celu``. Inductor writes ``hardtanh``, ``relu6``, ``hardswish`` and every
# ``clamp`` as ``clamp_min`` and ``clamp_max``.

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

    def atanh(self, x: Any) -> Any:
        """``log1p(2x / (1 - x)) / 2``; TVM's is a logarithm of a number near one."""
        op = relax.op
        ratio = self(op.divide, self(op.multiply, x, 2), self(op.subtract, 1, x))
        return self(op.multiply, self.log1p(ratio), 0.5)

    def _chosen(self, x: Any, bound: float, near: Any, far: Any) -> Any:
        small = self(relax.op.less, self(relax.op.abs, x), bound)
        return self(relax.op.where, small, near, far)


def _wide(node: fx.Node, importer: Any, function: Callable[..., Any], operands: int = 1) -> Any:
    """A function of a node's first operands, in float32 at least and rounded once."""
    dtype = result_type(node)
    wide = dtype if dtype in WIDE else "float32"
    given = [operand(each, importer, wide) for each in node.args[:operands]]
    made = function(Floats(importer, wide), *given)
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


def _clamp(node: fx.Node, importer: Any, names: tuple[str, ...] = ("min", "max")) -> Any:
    given = {name: argument(node, place, name) for place, name in enumerate(names, 1)}
    return _between(node, importer, given.get("min"), given.get("max"))


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


#: Scale and slope of ``selu``, as its authors and torch have them.
_SELU, _SELU_SLOPE = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


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
    **dict.fromkeys(("clamp_min.default", "clamp_min.Tensor"), partial(_clamp, names=("min",))),
    **dict.fromkeys(("clamp_max.default", "clamp_max.Tensor"), partial(_clamp, names=("max",))),
    **dict.fromkeys(("hardtanh.default", "hardtanh_.default"), _hardtanh),
    **dict.fromkeys(("relu6.default", "relu6_.default"), partial(_between, least=0, most=6)),
    "hardsigmoid.default": _hard,
    **dict.fromkeys(("hardswish.default", "hardswish_.default"), _hardswish),
    "elu.default": _elu,
    "celu.default": _celu,
    "selu.default": partial(_exponential, below=_SELU * _SELU_SLOPE, above=_SELU, inner=1.0),
    "softshrink.default": _decomposed,
    "mish.default": _mish,
    "log1p.default": partial(_wide, function=Floats.log1p),
    "expm1.default": partial(_wide, function=Floats.expm1),
    "atanh.default": partial(_wide, function=Floats.atanh),
    "softplus.default": _softplus,
}


# Gradients of activations, which graphs of backward passes have as operators. Inductor decomposes
# them before we see them; without it they stand as they are.


def _gradient(slope: Callable[[Floats, Any], Any]) -> Any:
    """A converter: the gradient of the result times a slope of what the activation read or made."""

    def function(floats: Floats, grad: Any, x: Any) -> Any:
        return floats(relax.op.multiply, grad, slope(floats, x))

    return partial(_wide, function=function, operands=2)


def _sigmoid_slope(floats: Floats, made: Any) -> Any:
    return floats(relax.op.multiply, made, floats(relax.op.subtract, 1, made))


def _tanh_slope(floats: Floats, made: Any) -> Any:
    return floats(relax.op.subtract, 1, floats(relax.op.multiply, made, made))


def _silu_slope(floats: Floats, x: Any) -> Any:
    op, sigmoid = relax.op, floats(relax.op.sigmoid, x)
    left = floats(op.multiply, x, floats(op.subtract, 1, sigmoid))
    return floats(op.multiply, sigmoid, floats(op.add, left, 1))


def _gelu_gradient(node: fx.Node, importer: Any) -> Any:
    approximate = argument(node, 2, "approximate", "none")
    slope = _gelu_tanh_slope if approximate == "tanh" else _gelu_slope
    return _gradient(slope)(node, importer)


def _gelu_slope(floats: Floats, x: Any) -> Any:
    """``P(x) + x p(x)`` of the normal distribution and its density."""
    op, square = relax.op, floats(relax.op.multiply, x, x)
    erf = floats(op.erf, floats(op.multiply, x, math.sqrt(0.5)))
    whole = floats(op.multiply, floats(op.add, erf, 1), 0.5)
    bell = floats(op.exp, floats(op.multiply, square, -0.5))
    density = floats(op.multiply, bell, 1 / math.sqrt(2 * math.pi))
    return floats(op.add, whole, floats(op.multiply, x, density))


def _gelu_tanh_slope(floats: Floats, x: Any) -> Any:
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
    "sigmoid_backward.default": _gradient(_sigmoid_slope),
    "tanh_backward.default": _gradient(_tanh_slope),
    "silu_backward.default": _gradient(_silu_slope),
    "gelu_backward.default": _gelu_gradient,
    "threshold_backward.default": _threshold,
}


# Remainders and rounded quotients of floats, exact as torch's are.
#
# TVM's are ``x - floor(x / y) * y`` and ``floor(x / y)``. A quotient that is rounded may be the
# next whole number, as that of 1 by 0.1 in float32 is 10, and beyond 2^24 no remainder is left.


_OVERLOADS = ("Tensor", "Scalar")


def _of_floats(node: fx.Node, importer: Any, *, function: Callable[[Floats, Any, Any], Any]) -> Any:
    """A function of two floats, in float32 at least and rounded once; integers are TVM's."""
    dtype = result_type(node)
    if "float" not in dtype:
        return tvm_own(node, importer)
    wide = dtype if dtype in WIDE else "float32"
    x, y = (operand(each, importer, wide) for each in node.args[:2])
    made = function(Floats(importer, wide), x, y)
    return made if wide == dtype else importer.block_builder.emit(relax.op.astype(made, dtype))


def _crosses(floats: Floats, rest: Any, y: Any) -> Any:
    """Whether a remainder has another sign than the divisor, and is not 0."""
    op = relax.op
    other = floats(op.logical_xor, floats(op.less, rest, 0), floats(op.less, y, 0))
    return floats(op.logical_and, floats(op.greater, floats(op.abs, rest), 0), other)


def _remainder(floats: Floats, x: Any, y: Any) -> Any:
    """Of the sign of the divisor."""
    rest = floats(relax.op.mod, x, y)
    moved = floats(relax.op.add, rest, y)
    return floats(relax.op.where, _crosses(floats, rest, y), moved, rest)


def _floor_quotient(floats: Floats, x: Any, y: Any) -> Any:
    """The largest whole number that is no larger than the quotient; x / y where y is 0."""
    op = relax.op
    rest = floats(op.mod, x, y)
    whole = floats(op.divide, floats(op.subtract, x, rest), y)
    below = floats(op.subtract, whole, 1)
    whole = floats(op.where, _crosses(floats, rest, y), below, whole)
    # Whole but for a rounding; half a unit and more below the next one belongs to that.
    least = floats(op.floor, whole)
    far = floats(op.greater, floats(op.subtract, whole, least), 0.5)
    nearest = floats(op.where, far, floats(op.add, least, 1), least)
    return floats(op.where, floats(op.equal, y, 0), floats(op.divide, x, y), nearest)


_floored = partial(_of_floats, function=_floor_quotient)


def _divided(node: fx.Node, importer: Any) -> Any:
    floors = argument(node, 2, "rounding_mode") == "floor"
    return (_floored if floors else tvm_own)(node, importer)


#: By the name of the operator.
REMAINDERS = {
    **{f"remainder.{each}": partial(_of_floats, function=_remainder) for each in _OVERLOADS},
    "floor_divide.default": _floored,
    "div.Tensor_mode": _divided,
}
