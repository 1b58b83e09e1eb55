"""Inputs and results of a cascade: exact ones, and as separate kernels would round them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from crossfuse.errors import CheckFailed, refuse
from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import (
    EPSILON,
    LARGEST_QUANTISED,
    LEAST_MAGNITUDE,
    QUANTISED,
    CascadeSpec,
)
from crossfuse.workload.cascades import RowsGradient
from crossfuse.workload.dtypes import FLOAT_TYPES, float_type, stored
from crossfuse.workload.expression import evaluate
from crossfuse.workload.numerics import NUMPY, check_operands
from crossfuse.workload.tolerances import Accuracy, judge, plain_tolerance

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


# Inputs of cascades, and how far from float64 their results may be.

# Inputs to check cascades with: random ones, and ones that break careless kernels.

Inputs = dict[str, np.ndarray]

#: Operands that are the weights of a product, which scale with the terms of its sums.
WEIGHTS = ("weight", "router", "gate", "up", "down")
#: Operands around one.
FACTORS = ("gamma", "weight_scale", "mass")


def random_inputs(spec: CascadeSpec, seed: int = 0) -> Inputs:
    """Draw inputs of order one by name, in the order of the function's parameters.

    Equal seeds give equal inputs.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[str, np.ndarray] = {}
    for each in spec.operands:
        if each.dtype == "int32":
            drawn[each.name] = rng.integers(0, spec.operands[0].shape[-1], each.shape)
            continue
        values = rng.standard_normal(each.shape, np.float32)
        if each.name in FACTORS:
            values = np.exp(values / 2)
        elif each.name in WEIGHTS and len(each.shape) > 1:
            values = values / np.float32(np.sqrt(each.shape[-1]))
        drawn[each.name] = values
    return stored(spec.operands, drawn)


def adversarial_inputs(spec: CascadeSpec, seed: int = 0) -> Iterator[tuple[str, Inputs]]:
    """Yield names and inputs on which mistakes of rounding, masking and correction show.

    All of them change ``x``, or the queries; a residual is zero in them. ``large``: 64 times as
    large, so that exponentials overflow unless they are taken below the maximum. ``zero_rows``:
    every second row is zero.
    ``constant_rows``: each repeats one value. ``denormal``: denormals only. ``ascending``: each
    element of a row is larger than the one before, so that every one changes the maximum.
    ``descending``: none does. ``offset``: one thousand more, which cancels in deviations.
    ``alternating``: of one magnitude, the sign changing. ``infinite``, of a softmax and of what is
    made of one: every third element is -inf.

    Equal seeds give equal inputs.
    """
    base = random_inputs(spec, seed)
    first = next((each for each in spec.operands if each.name == "x"), spec.operands[0])
    values = base[first.name].astype(np.float32)
    for name, change in _CASES.items():
        if name == "infinite" and not spec.masked:
            continue
        changed = change(values.reshape(-1, first.shape[-1]), float_type(first.dtype).smallest)
        inputs = dict(base) | {first.name: changed.reshape(first.shape)}
        if "residual" in inputs:
            inputs["residual"] = np.zeros_like(inputs["residual"])
        if name == "infinite" and "labels" in inputs:
            # The first element of a row is finite: a loss of infinity checks nothing.
            inputs["labels"] = np.zeros_like(inputs["labels"])
        yield name, stored(spec.operands, inputs)


def _infinite(x: np.ndarray, smallest: float) -> np.ndarray:
    return np.where(np.arange(x.shape[1]) % 3 == 2, np.float32(-np.inf), x)


_CASES: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "large": lambda x, smallest: x * 64,
    "zero_rows": lambda x, smallest: np.where(np.arange(len(x))[:, None] % 2, x, 0),
    "constant_rows": lambda x, smallest: np.broadcast_to(x[:, :1], x.shape),
    "denormal": lambda x, smallest: np.sign(x) * np.ceil(np.abs(x)) * smallest,
    "ascending": lambda x, smallest: np.sort(x, axis=1),
    "descending": lambda x, smallest: -np.sort(-x, axis=1),
    "offset": lambda x, smallest: x + 1000,
    "alternating": lambda x, smallest: np.where(np.arange(x.shape[1]) % 2, -1.0, 1.0) + 0 * x,
    "infinite": _infinite,
}


# Errors of computed cascades, and the errors that are allowed.

#: How often inputs are moved to see what rounding does.
_DRAWS = 4


def check(spec: CascadeSpec, inputs: Arrays, outputs: Arrays) -> dict[str, Accuracy]:
    """Errors of each floating-point output by the rule of `crossfuse.workload.tolerances`.

    What float32 sums may do is what float64 does on inputs perturbed by as much: this also covers
    differences that cancel. `CheckFailed` says that an output has another shape or type, is too far
    off, or that chosen elements are not among the largest.
    """
    exact, separate = reference(spec, inputs), unfused(spec, inputs)
    noise = _noise(spec, inputs, exact)
    anywhere = noise
    if isinstance(spec, cascade_spec.QuantGemm):
        # Single elements of separate kernels may be near by chance; all of them together are not.
        anywhere = _noise(spec, inputs, exact, x=FLOAT_TYPES[QUANTISED].unit)
    found = {}
    for each in spec.outputs:
        output, where = outputs[each.name], f"{spec}, output '{each.name}'"
        due = f"{each.dtype}{list(each.shape)}"
        if f"{output.dtype}{list(output.shape)}" != due:
            got, instead = f"{output.dtype}{list(output.shape)}", "give it that shape and type"
            raise refuse(CheckFailed, "output-type", where, found=got, limit=due, instead=instead)
        if each.dtype in FLOAT_TYPES:
            plain = plain_tolerance(exact[each.name], separate[each.name], _depth(spec))
            limits = replace(
                plain,
                absolute=plain.absolute + np.nan_to_num(anywhere[each.name]),
                norm=plain.norm + float(np.linalg.norm(np.nan_to_num(noise[each.name]))),
            )
            found[each.name] = judge(limits, output, where)
        elif isinstance(spec, cascade_spec.MoeRouting):
            _check_chosen(spec, inputs, output, exact["gates"], noise["gates"])
    return found


def _noise(
    spec: CascadeSpec, inputs: Arrays, exact: Arrays, **units: float
) -> dict[str, np.ndarray]:
    """Error at each element that rounding in float32 explains; in some inputs, by their `units`."""
    rng = np.random.default_rng(0)
    unit = FLOAT_TYPES["float32"].unit * np.sqrt(_depth(spec))
    most = {each.name: np.zeros(each.shape) for each in spec.outputs}
    # Large, and nothing cancels behind the rows but what the plain tolerance knows.
    still = WEIGHTS if isinstance(spec, cascade_spec.NormFfn) else ()
    for _ in range(_DRAWS):
        moved = {n: e if n in still else _moved(rng, e, unit) for n, e in inputs.items()}
        moved |= {name: _moved(rng, moved[name], each) for name, each in units.items()}
        found = run(spec, moved, np.float64, lambda x, _: x, typed=False)
        with np.errstate(all="ignore"):
            for name in most:
                most[name] = np.fmax(most[name], np.abs(found[name] - exact[name]))
    return {name: _DRAWS * array for name, array in most.items()}


def _moved(rng: np.random.Generator, array: np.ndarray, unit: float) -> np.ndarray:
    if array.dtype == np.int32:
        return array
    return array.astype(np.float64) * (1 + unit * rng.choice([-1.0, 1.0], array.shape))


def _check_chosen(
    spec: cascade_spec.MoeRouting,
    inputs: Arrays,
    chosen: np.ndarray,
    gates: np.ndarray,
    noise: np.ndarray,
) -> None:
    """Check that chosen experts are as good as the best, up to rounding, and all different."""
    logits = inputs["x"].astype(np.float64) @ inputs["router"].astype(np.float64).T
    power, total = below_maximum(logits)
    inside = np.clip(chosen, 0, spec.experts - 1)
    found = np.take_along_axis(power / total, inside, axis=1)
    repeated = np.sort(inside, axis=1)
    allowed = 4 * (noise + FLOAT_TYPES["float32"].unit * np.sqrt(_depth(spec)) * gates)
    wrong = np.argwhere((np.abs(found - gates) > allowed) | (inside != chosen))
    wrong = np.concatenate([wrong, np.argwhere(repeated[:, 1:] == repeated[:, :-1])])
    if len(wrong):
        row = int(wrong[0][0])
        best = np.argsort(-logits[row], kind="stable")[: spec.top_k]
        raise refuse(
            CheckFailed,
            "chosen",
            f"{spec}, output 'chosen'",
            found=f"{chosen[row].tolist()} in row {row}",
            limit=f"{best.tolist()}, as in float64",
            instead="emulate the kernel to find the first wrong element",
        )


def _depth(spec: CascadeSpec) -> int:
    """Number of terms of the longest sum."""
    return max(each.shape[-1] for each in spec.operands)
