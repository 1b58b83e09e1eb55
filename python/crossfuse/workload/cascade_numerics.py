"""Results of a cascade: exact ones, and as separate kernels would round them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import (
    EPSILON,
    LARGEST_QUANTISED,
    LEAST_MAGNITUDE,
    QUANTISED,
    CascadeSpec,
)
from crossfuse.workload.cascades import RowsGradient
from crossfuse.workload.dtypes import float_type, stored
from crossfuse.workload.expression import evaluate
from crossfuse.workload.numerics import NUMPY, check_operands

#: Arrays by name.
Arrays = Mapping[str, np.ndarray]
#: Rounds what leaves an operator to a type.
Rounding = Callable[[np.ndarray, str], np.ndarray]


def reference(spec: CascadeSpec, inputs: Arrays) -> dict[str, np.ndarray]:
    """Compute the outputs by name in float64, with no rounding or quantisation in between.

    Integers keep their type. Inputs of other names, shapes or types than the spec's raise
    `CheckFailed`.
    """
    return run(spec, inputs, np.float64, lambda x, _: x)


def unfused(spec: CascadeSpec, inputs: Arrays) -> dict[str, np.ndarray]:
    """Compute the outputs as one kernel per operator would: in float32, stored in the spec's type.

    They are by name, of the output types. Refuses as `reference`.
    """

    def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
        return x.astype(float_type(dtype).numpy).astype(np.float32)

    return stored(spec.outputs, run(spec, inputs, np.float32, rounded))


def run(
    spec: CascadeSpec,
    inputs: Arrays,
    work: type[np.floating],
    rounded: Rounding,
    typed: bool = True,
) -> dict[str, np.ndarray]:
    """Compute the outputs by name, with all numbers of the type `work`.

    `rounded` is applied to what leaves an operator. Types of inputs are checked if `typed`.
    """
    if typed:
        check_operands(spec.operands, inputs)
    values = [
        inputs[each.name] if each.dtype == "int32" else inputs[each.name].astype(work)
        for each in spec.operands
    ]
    with np.errstate(all="ignore"):
        results = _RULES[type(spec)](spec, values, rounded)
    return {each.name: result for each, result in zip(spec.outputs, results, strict=True)}


Values = Sequence[np.ndarray]


def below_maximum(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exponentials of differences from each row's maximum, and their sums."""
    m = x.max(axis=-1, keepdims=True)
    power = np.exp(x - m)
    return power, power.sum(axis=-1, keepdims=True)


def _softmax(spec: CascadeSpec, values: Values, rounded: Rounding) -> Values:
    power, total = below_maximum(values[0])
    return [power / total]


def _log_softmax(spec: CascadeSpec, values: Values, rounded: Rounding) -> Values:
    _power, total = below_maximum(values[0])
    return [values[0] - values[0].max(axis=1, keepdims=True) - np.log(total)]


def _cross_entropy(spec: cascade_spec.CrossEntropy, values: Values, rounded: Rounding) -> Values:
    x, labels = values
    _power, total = below_maximum(x)
    label = np.take_along_axis(x, labels[:, None].astype(np.int64), axis=1)
    return [(x.max(axis=1, keepdims=True) + np.log(total) - label)[:, 0]]


def _mean(x: np.ndarray) -> np.ndarray:
    return x.mean(axis=1, keepdims=True)


def _deviations(x: np.ndarray) -> np.ndarray:
    return x - _mean(x)


def _summed(spec: cascade_spec.Norm, values: Values, rounded: Rounding) -> np.ndarray:
    """The rows to be normalised: the sum as the operator before has stored it."""
    return rounded(values[0] + values[1], spec.dtype) if spec.residual else values[0]


def _unit(x: np.ndarray) -> np.ndarray:
    """Rows divided by the roots of their mean squares."""
    return x / np.sqrt(_mean(x * x) + x.dtype.type(EPSILON))


def _layernorm(spec: cascade_spec.LayerNorm, values: Values, rounded: Rounding) -> Values:
    weight, bias = values[-2:]
    x = _summed(spec, values, rounded)
    normal = _unit(_deviations(x)) * weight + bias
    return [x, normal] if spec.residual else [normal]


def _rmsnorm(spec: cascade_spec.RmsNorm, values: Values, rounded: Rounding) -> Values:
    x = _summed(spec, values, rounded)
    normal = _unit(x) * values[-1]
    return [x, normal] if spec.residual else [normal]


def _variance(spec: cascade_spec.Variance, values: Values, rounded: Rounding) -> Values:
    return [(_deviations(values[0]) ** 2).mean(axis=1)]


def _moment_of_inertia(
    spec: cascade_spec.MomentOfInertia, values: Values, rounded: Rounding
) -> Values:
    mass, *positions = values
    total = mass.sum(axis=1, keepdims=True)
    away = [r - (mass * r).sum(axis=1, keepdims=True) / total for r in positions]
    return [(mass * sum(each * each for each in away)).sum(axis=1)]


def _attention(spec: cascade_spec.Attention, values: Values, rounded: Rounding) -> Values:
    q, k, v = values
    share = spec.heads // spec.kv_heads
    k, v = (np.repeat(each, share, axis=1) for each in (k, v))
    scores = rounded(q @ k.swapaxes(2, 3), spec.dtype) * q.dtype.type(spec.head_dim**-0.5)
    if spec.causal:
        i, j = np.indices((spec.q_len, spec.kv_len))
        scores = np.where(j <= i + spec.kv_len - spec.q_len, scores, -np.inf)
    power, total = below_maximum(scores)
    return [rounded(power / total, spec.dtype) @ v]


def _attention_out(spec: cascade_spec.AttentionOut, values: Values, rounded: Rounding) -> Values:
    q, k, v, weight, *others = values
    (heads,) = _attention(spec, (q, k, v), rounded)
    context = rounded(heads, spec.dtype).swapaxes(1, 2).reshape(spec.tokens, -1)
    return [sum(others, start=context @ weight.T)]


def _mla_decode(spec: cascade_spec.MlaDecode, values: Values, rounded: Rounding) -> Values:
    q, cache = values
    scores = rounded(q @ cache.swapaxes(1, 2), spec.dtype) * q.dtype.type(spec.width**-0.5)
    power, total = below_maximum(scores)
    return [rounded(power / total, spec.dtype) @ cache[:, :, : spec.latent_dim]]


def _moe_routing(spec: cascade_spec.MoeRouting, values: Values, rounded: Rounding) -> Values:
    x, router = values
    logits = x @ router.T
    power, total = below_maximum(logits)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : spec.top_k]
    gates = np.take_along_axis(power, chosen, axis=1) / total
    return [gates, chosen.astype(np.int32)]


def _quant_gemm(spec: cascade_spec.QuantGemm, values: Values, rounded: Rounding) -> Values:
    x, weight, weight_scale = values
    largest = np.abs(x).max(axis=1, keepdims=True)
    scale = np.maximum(largest, x.dtype.type(LEAST_MAGNITUDE)) / x.dtype.type(LARGEST_QUANTISED)
    return [(rounded(x / scale, QUANTISED) @ weight.T) * scale * weight_scale]


def _rmsnorm_gemm(spec: cascade_spec.RmsNormGemm, values: Values, rounded: Rounding) -> Values:
    x, gamma, weight = values
    return [rounded(rounded(_unit(x), spec.dtype) * gamma, spec.dtype) @ weight.T]


def _norm_ffn(spec: cascade_spec.NormFfn, values: Values, rounded: Rounding) -> Values:
    x, gamma, *others = values
    if isinstance(spec, cascade_spec.LayerNormFfn):
        rows = rounded(_unit(_deviations(x)) * gamma + others.pop(0), spec.dtype)
    else:
        rows = rounded(rounded(_unit(x), spec.dtype) * gamma, spec.dtype)
    *weights, down = others
    first, *up = (rounded(rows @ each.T, spec.dtype) for each in weights)
    hidden = rounded(np.asarray(evaluate(spec.act, first, NUMPY), x.dtype), spec.dtype)
    if up:
        hidden = rounded(hidden * up[0], spec.dtype)
    out = hidden @ down.T
    return [rounded(out, spec.dtype) + x if spec.residual else out]


# Gradients of rows, written out by hand: what derived ones are compared with.


def gradient(spec: RowsGradient, values: Values, rounded: Rounding) -> Values:
    """The gradient by rows of a cascade, of values in the order of the spec's operands.

    As of separate kernels, it reads what the function has stored: the softmax, its logarithm, the
    sum with a residual.
    """
    return [_GRADIENTS[type(spec.of)](spec.of, values, rounded)]


def _softmax_gradient(of: CascadeSpec, values: Values, rounded: Rounding) -> np.ndarray:
    x, given = values
    y = rounded(_softmax(of, [x], rounded)[0], of.out)
    return y * (given - (y * given).sum(axis=1, keepdims=True))


def _log_softmax_gradient(of: CascadeSpec, values: Values, rounded: Rounding) -> np.ndarray:
    x, given = values
    y = rounded(_log_softmax(of, [x], rounded)[0], of.out)
    return given - np.exp(y) * given.sum(axis=1, keepdims=True)


def _cross_entropy_gradient(of: CascadeSpec, values: Values, rounded: Rounding) -> np.ndarray:
    x, labels, given = values
    y = np.exp(rounded(_log_softmax(of, [x], rounded)[0], of.dtype))
    y[np.arange(len(y)), labels.astype(np.int64)] -= 1
    return y * given[:, None]


def _norm_gradient(of: cascade_spec.Norm, values: Values, rounded: Rounding) -> np.ndarray:
    """Of rows that are divided by a deviation; of a layer norm also moved, which leaves no mean."""
    x = _summed(of, values, rounded)
    weight, *stored, given = values[1 + of.residual :]
    if isinstance(of, cascade_spec.LayerNorm):
        x = _deviations(x)
    scale = 1 / np.sqrt(_mean(x * x) + x.dtype.type(EPSILON))
    unit, by_unit = x * scale, given * weight
    found = by_unit - unit * _mean(by_unit * unit)
    if isinstance(of, cascade_spec.LayerNorm):
        found = found - _mean(by_unit)
    return sum(stored, start=scale * found)


def _variance_gradient(of: cascade_spec.Variance, values: Values, rounded: Rounding) -> np.ndarray:
    x, given = values
    return x.dtype.type(2 / of.cols) * _deviations(x) * given[:, None]


_GRADIENTS: dict[type[CascadeSpec], Callable[..., np.ndarray]] = {
    cascade_spec.Softmax: _softmax_gradient,
    cascade_spec.LogSoftmax: _log_softmax_gradient,
    cascade_spec.CrossEntropy: _cross_entropy_gradient,
    cascade_spec.LayerNorm: _norm_gradient,
    cascade_spec.RmsNorm: _norm_gradient,
    cascade_spec.Variance: _variance_gradient,
}

_RULES: dict[type[CascadeSpec], Callable[..., Values]] = {
    cascade_spec.Softmax: _softmax,
    cascade_spec.LogSoftmax: _log_softmax,
    cascade_spec.CrossEntropy: _cross_entropy,
    cascade_spec.LayerNorm: _layernorm,
    cascade_spec.RmsNorm: _rmsnorm,
    cascade_spec.Variance: _variance,
    cascade_spec.MomentOfInertia: _moment_of_inertia,
    cascade_spec.Attention: _attention,
    cascade_spec.DecodeAttention: _attention,
    cascade_spec.AttentionOut: _attention_out,
    cascade_spec.MlaDecode: _mla_decode,
    cascade_spec.MoeRouting: _moe_routing,
    cascade_spec.QuantGemm: _quant_gemm,
    cascade_spec.RmsNormGemm: _rmsnorm_gemm,
    cascade_spec.RmsNormFfn: _norm_ffn,
    cascade_spec.LayerNormFfn: _norm_ffn,
    RowsGradient: gradient,
}
