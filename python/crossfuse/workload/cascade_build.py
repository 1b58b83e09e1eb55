"""Unscheduled functions of cascades: every reduction a loop of its own over all elements.

One block for each operator, as people and importers write them; nothing is streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from crossfuse.workload import cascade_spec
from crossfuse.workload.build import TIR
from crossfuse.workload.cascade_spec import (
    EPSILON,
    LARGEST_QUANTISED,
    LEAST_MAGNITUDE,
    QUANTISED,
    CascadeSpec,
)
from crossfuse.workload.cascades import RowsGradient
from crossfuse.workload.expression import evaluate
from crossfuse.workload.spec import refused

# Top-k as plain reductions.


def top_of(
    values: te.Tensor, k: int, names: tuple[str, str] = ("top", "top_at")
) -> tuple[te.Tensor, te.Tensor]:
    """The k largest of each row [rows, cols] in float32, and their places in int32, both [rows, k].

    An element's rank is the number of elements before it: larger ones, and equal ones of lower
    index. The number of rank t is the sum of all that have this rank, of which there is exactly
    one. So top-k is written in plain reductions, which `crossfuse.cascade.detect` recognises.
    `names` are those of the blocks.
    """
    rows, cols = values.shape
    other, at, of = (te.reduce_axis((0, cols), name) for name in ("other", "at", "of"))

    def ahead(i: Any, j: Any) -> Any:
        before = tirx.all(values[i, other] == values[i, j], other < j)
        stands = tirx.any(values[i, other] > values[i, j], before)
        return te.sum(tirx.Select(stands, 1, 0), axis=other)

    ranks = te.compute((rows, cols), ahead, names[0] + "_rank")
    zero = tirx.const(0, "float32")
    top = te.compute(
        (rows, k),
        lambda i, t: te.sum(tirx.Select(ranks[i, at] == t, values[i, at], zero), axis=at),
        names[0],
    )
    places = te.compute(
        (rows, k),
        lambda i, t: te.sum(tirx.Select(ranks[i, of] == t, of, 0), axis=of),
        names[1],
    )
    return top, places


#: Placeholders of a spec, in order.
Tensors = Sequence[te.Tensor]
#: Value of an element of a row, at the row's indices and its own.
Element = Callable[..., Any]


def prim_func(spec: CascadeSpec) -> tirx.PrimFunc:
    """The unscheduled s_tir function of a cascade, with sums and maxima in float32.

    Its parameters are the spec's operands in order, then the outputs. Gradients are refused: they
    are derived, not built; see `crossfuse.planner.cascade.shape.function_of`.
    """
    if isinstance(spec, RowsGradient):
        where, limit = str(spec), "functions that are written out"
        instead = "derive it by crossfuse.planner.cascade.shape.function_of"
        raise refused("workload-grad", where, "a gradient", limit, instead)
    inputs = [te.placeholder(each.shape, each.dtype, each.name) for each in spec.operands]
    outputs = _BUILDERS[type(spec)](spec, inputs)
    func = te.create_prim_func([*inputs, *outputs])
    if isinstance(spec, cascade_spec.MomentOfInertia):
        # A promise that detection reads: `crossfuse.cascade.detect.detect`.
        func = func.with_attr("crossfuse.nonnegative", ["mass"])
    return func


def _wide(value: Any) -> Any:
    return value.astype("float32")


def _reduced(
    shape: Sequence[int], cols: int, element: Element, name: str, by: Any = te.sum
) -> te.Tensor:
    """A reduction over a row of float32 elements, for each row."""
    axis = te.reduce_axis((0, cols), "l")
    return te.compute(tuple(shape), lambda *at: by(element(*at, axis), axis=axis), name)


def _exponentials(shape: Sequence[int], cols: int, value: Element) -> tuple[te.Tensor, te.Tensor]:
    """The maximum of each row, and the sum of exponentials of differences from it."""
    m = _reduced(shape, cols, value, "m", te.max)
    return m, _reduced(shape, cols, lambda i, j: tirx.exp(value(i, j) - m[i]), "s")


def _product(left: te.Tensor, weight: te.Tensor, name: str) -> te.Tensor:
    """The product of rows and a weight [columns, depth], in float32."""

    def element(i: Any, n: Any, j: Any) -> Any:
        return _wide(left[i, j]) * _wide(weight[n, j])

    return _reduced((left.shape[0], weight.shape[0]), left.shape[1], element, name)


def _element(x: te.Tensor) -> Element:
    return lambda i, j: _wide(x[i, j])


def _softmax(spec: cascade_spec.Softmax, inputs: Tensors) -> list[te.Tensor]:
    (x,) = inputs
    m, s = _exponentials((spec.rows,), spec.cols, _element(x))

    def element(i: Any, j: Any) -> Any:
        return (tirx.exp(_wide(x[i, j]) - m[i]) / s[i]).astype(spec.out)

    return [te.compute(x.shape, element, "y")]


def _log_softmax(spec: cascade_spec.LogSoftmax, inputs: Tensors) -> list[te.Tensor]:
    (x,) = inputs
    m, s = _exponentials((spec.rows,), spec.cols, _element(x))

    def element(i: Any, j: Any) -> Any:
        return (_wide(x[i, j]) - m[i] - tirx.log(s[i])).astype(spec.out)

    return [te.compute(x.shape, element, "y")]


def _cross_entropy(spec: cascade_spec.CrossEntropy, inputs: Tensors) -> list[te.Tensor]:
    x, labels = inputs
    rows, zero = (spec.rows,), tirx.const(0, "float32")
    m, s = _exponentials(rows, spec.cols, _element(x))

    def labelled(i: Any, j: Any) -> Any:
        return tirx.Select(j == labels[i], _wide(x[i, j]), zero)

    label = _reduced(rows, spec.cols, labelled, "labelled")
    return [te.compute(rows, lambda i: m[i] + tirx.log(s[i]) - label[i], "loss")]


def _moments(value: Element, rows: int, cols: int) -> tuple[te.Tensor, te.Tensor]:
    """The mean of each row, and the sum of squared deviations from it."""
    total = _reduced((rows,), cols, value, "total")
    mean = te.compute((rows,), lambda i: total[i] / float(cols), "mean")

    def squared(i: Any, j: Any) -> Any:
        deviation = value(i, j) - mean[i]
        return deviation * deviation

    return mean, _reduced((rows,), cols, squared, "squares")


def _summed(spec: cascade_spec.Norm, inputs: Tensors) -> tuple[Element, list[te.Tensor]]:
    """The element to be normalised, and the sum as an output where there is a residual."""
    x = inputs[0]
    if not spec.residual:
        return _element(x), []
    residual = inputs[1]
    total = te.compute(x.shape, lambda i, j: _wide(x[i, j]) + _wide(residual[i, j]), "sum")
    stored = te.compute(x.shape, lambda i, j: total[i, j].astype(spec.dtype), "h")
    return lambda i, j: total[i, j], [stored]


def _normal(
    value: Element, shape: tuple[int, int], gamma: te.Tensor, beta: te.Tensor | None = None
) -> Element:
    """An element of a norm: of RMS norm, or with `beta` of layer norm."""
    rows, cols = shape
    if beta is None:
        squares = _reduced((rows,), cols, lambda i, j: value(i, j) * value(i, j), "squares")
    else:
        mean, squares = _moments(value, rows, cols)
    epsilon = tirx.const(EPSILON, "float32")

    def element(i: Any, j: Any) -> Any:
        centred = value(i, j) if beta is None else value(i, j) - mean[i]
        spread = tirx.rsqrt(squares[i] / float(cols) + epsilon)
        scaled = centred * spread * _wide(gamma[j])
        return scaled if beta is None else scaled + _wide(beta[j])

    return element


def _norm(spec: cascade_spec.Norm, inputs: Tensors) -> list[te.Tensor]:
    value, stored = _summed(spec, inputs)
    shape = (spec.rows, spec.cols)
    normal = _normal(value, shape, *inputs[-len(spec.parameters) :])
    return [*stored, te.compute(shape, lambda i, j: normal(i, j).astype(spec.out), "y")]


def _variance(spec: cascade_spec.Variance, inputs: Tensors) -> list[te.Tensor]:
    x = inputs[0]
    _, squares = _moments(_element(x), spec.rows, spec.cols)
    return [te.compute((spec.rows,), lambda i: squares[i] / float(spec.cols), "variance")]


def _moment_of_inertia(spec: cascade_spec.MomentOfInertia, inputs: Tensors) -> list[te.Tensor]:
    mass, *positions = inputs
    rows, points = (spec.bodies,), spec.points
    total = _reduced(rows, points, lambda i, j: _wide(mass[i, j]), "total")

    def centre(position: te.Tensor) -> te.Tensor:
        def weighted(i: Any, j: Any) -> Any:
            return _wide(mass[i, j]) * _wide(position[i, j])

        found = _reduced(rows, points, weighted, f"first_{position.name}")
        return te.compute(rows, lambda i: found[i] / total[i], f"centre_{position.name}")

    centres = [centre(each) for each in positions]

    def second(i: Any, j: Any) -> Any:
        away = [_wide(r[i, j]) - c[i] for r, c in zip(positions, centres, strict=True)]
        x, y, z = (each * each for each in away)
        return _wide(mass[i, j]) * (x + y + z)

    return [_reduced(rows, points, second, "inertia")]


def _attend(
    rows: Sequence[int],
    length: int,
    width: int,
    scores: Element,
    values: Element,
    types: tuple[str, str],
    name: str = "out",
) -> te.Tensor:
    """Softmax of masked and scaled scores, times values; `types` of the softmax and the output."""
    m = _reduced(rows, length, scores, "m", te.max)
    power = te.compute((*rows, length), lambda *at: tirx.exp(scores(*at) - m(*at[:-1])), "power")
    s = _reduced(rows, length, lambda *at: power(*at), "s")
    rounded = power
    if types[0] != "float32":
        rounded = te.compute(power.shape, lambda *at: power(*at).astype(types[0]), "rounded")

    def weighted(*at: Any) -> Any:
        *row, column, position = at
        return _wide(rounded(*row, position)) * _wide(values(*row, position, column))

    o = _reduced((*rows, width), length, weighted, "o")
    return te.compute(o.shape, lambda *at: (o(*at) / s(*at[:-1])).astype(types[1]), name)


def _attention(spec: cascade_spec.Attention, inputs: Tensors) -> list[te.Tensor]:
    return [_attended(spec, inputs, spec.out, "out")]


def _attended(spec: cascade_spec.Attention, inputs: Tensors, out: str, name: str) -> te.Tensor:
    q, k, v = inputs
    share = spec.heads // spec.kv_heads
    rows = (spec.batch, spec.heads, spec.q_len)

    def product(b: Any, h: Any, i: Any, j: Any, d: Any) -> Any:
        return _wide(q[b, h, i, d]) * _wide(k[b, h // share, j, d])

    scores = _reduced((*rows, spec.kv_len), spec.head_dim, product, "scores")
    scale = tirx.const(spec.head_dim**-0.5, "float32")
    ahead, nothing = spec.kv_len - spec.q_len, tirx.const(float("-inf"), "float32")

    def masked(b: Any, h: Any, i: Any, j: Any) -> Any:
        score = scores[b, h, i, j] * scale
        return tirx.Select(j <= i + ahead, score, nothing) if spec.causal else score

    scaled = te.compute(scores.shape, masked, "scaled")
    return _attend(
        rows,
        spec.kv_len,
        spec.head_dim,
        lambda *at: scaled(*at),
        lambda b, h, i, j, d: v[b, h // share, j, d],
        (spec.dtype, out),
        name,
    )


def _attention_out(spec: cascade_spec.AttentionOut, inputs: Tensors) -> list[te.Tensor]:
    q, k, v, weight, *others = inputs
    attended = _attended(spec, (q, k, v), spec.dtype, "attended")
    length, depth = spec.q_len, spec.head_dim

    def row(t: Any, c: Any) -> Any:
        return attended[t // length, c // depth, t % length, c % depth]

    context = te.compute((spec.tokens, spec.heads * depth), row, "context")
    y = _product(context, weight, "product")
    added = dict(zip([each.name for each in spec.operands[4:]], others, strict=True))

    def element(i: Any, n: Any) -> Any:
        value = y[i, n]
        if spec.bias:
            value = value + _wide(added["bias"][n])
        if spec.residual:
            value = value + _wide(added["residual"][i, n])
        return value.astype(spec.out)

    return [te.compute(y.shape, element, "out")]


def _mla_decode(spec: cascade_spec.MlaDecode, inputs: Tensors) -> list[te.Tensor]:
    q, cache = inputs
    rows = (spec.batch, spec.q_heads)

    def product(b: Any, h: Any, j: Any, d: Any) -> Any:
        return _wide(q[b, h, d]) * _wide(cache[b, j, d])

    scores = _reduced((*rows, spec.kv_len), spec.width, product, "scores")
    scale = tirx.const(spec.width**-0.5, "float32")
    scaled = te.compute(scores.shape, lambda *at: scores(*at) * scale, "scaled")
    return [
        _attend(
            rows,
            spec.kv_len,
            spec.latent_dim,
            lambda *at: scaled(*at),
            lambda b, h, j, d: cache[b, j, d],
            (spec.dtype, spec.out),
        )
    ]


def _moe_routing(spec: cascade_spec.MoeRouting, inputs: Tensors) -> list[te.Tensor]:
    x, router = inputs
    logits = _product(x, router, "logits")
    m, s = _exponentials((spec.tokens,), spec.experts, lambda i, j: logits[i, j])
    top, places = top_of(logits, spec.top_k, ("top", "chosen"))
    gates = te.compute(top.shape, lambda i, t: tirx.exp(top[i, t] - m[i]) / s[i], "gates")
    return [gates, places]


def _quant_gemm(spec: cascade_spec.QuantGemm, inputs: Tensors) -> list[te.Tensor]:
    x, weight, weight_scale = inputs
    rows = (spec.tokens,)
    a = _reduced(rows, spec.K, lambda i, j: tirx.abs(_wide(x[i, j])), "magnitude", te.max)
    least, most = (tirx.const(each, "float32") for each in (LEAST_MAGNITUDE, LARGEST_QUANTISED))
    scale = te.compute(rows, lambda i: tirx.max(a[i], least) / most, "scale")
    quantised = te.compute(
        x.shape, lambda i, j: (_wide(x[i, j]) / scale[i]).astype(QUANTISED), "quantised"
    )
    y = _product(quantised, weight, "product")

    def element(i: Any, n: Any) -> Any:
        return (y[i, n] * scale[i] * weight_scale[n]).astype(spec.out)

    return [te.compute(y.shape, element, "out")]


def _rmsnorm_gemm(spec: cascade_spec.RmsNormGemm, inputs: Tensors) -> list[te.Tensor]:
    x, gamma, weight = inputs
    normal = _normal(_element(x), (spec.tokens, spec.K), gamma)
    rows = te.compute(x.shape, lambda i, j: normal(i, j).astype(spec.dtype), "normalised")
    y = _product(rows, weight, "product")
    return [te.compute(y.shape, lambda i, n: y[i, n].astype(spec.out), "out")]


def _norm_ffn(spec: cascade_spec.NormFfn, inputs: Tensors) -> list[te.Tensor]:
    count = 1 + len(spec.parameters)
    x, parameters, (*weights, down) = inputs[0], inputs[1:count], inputs[count:]
    value = _element(x)
    normal = _normal(value, (spec.tokens, spec.K), *parameters)
    rows = te.compute(x.shape, lambda i, j: normal(i, j).astype(spec.dtype), "normalised")
    firsts = [_product(rows, each, f"gemm0_{each.op.name}") for each in weights]

    def middle(i: Any, n: Any) -> Any:
        activated = evaluate(spec.act, firsts[0][i, n], TIR)
        return (activated * firsts[1][i, n] if spec.gated else activated).astype(spec.dtype)

    last = _product(te.compute((spec.tokens, spec.N), middle, "hidden"), down, "gemm1")

    def element(i: Any, n: Any) -> Any:
        return (last[i, n] + value(i, n) if spec.residual else last[i, n]).astype(spec.out)

    return [te.compute(last.shape, element, "out")]


_BUILDERS: dict[type[CascadeSpec], Callable[..., list[te.Tensor]]] = {
    cascade_spec.Softmax: _softmax,
    cascade_spec.LogSoftmax: _log_softmax,
    cascade_spec.CrossEntropy: _cross_entropy,
    cascade_spec.LayerNorm: _norm,
    cascade_spec.RmsNorm: _norm,
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
}
