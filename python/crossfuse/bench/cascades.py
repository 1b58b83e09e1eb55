"""Measures one cascade in this process, checked by float64; and the ways of torch to compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from crossfuse import hardware
from crossfuse.bench import variants
from crossfuse.bench.job import COMPILE_MODES, Floor, Variant, no_such, roofs_of
from crossfuse.bench.problem import Bound, Problem
from crossfuse.errors import CheckFailed
from crossfuse.measure.timing import TimingConditions, copies_needed
from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import EPSILON, LARGEST_QUANTISED, LEAST_MAGNITUDE, CascadeSpec
from crossfuse.workload.cascades import RowsGradient

#: Sets of inputs at most, and their bytes at most: a large set flushes the cache by itself.
_MOST_SETS = 16
_SET_BYTES = 8 * 10**9


def cascade_floor(spec: CascadeSpec) -> Floor:
    """Roofline of a cascade: every input read and every output written once, or its products.

    Causal attention counts the scores that are visible.
    """
    eight_bits = isinstance(spec, cascade_spec.QuantGemm)
    return Floor(spec.bytes, spec.flops, roofs_of(hardware.device()), eight_bits)


def rows_of(spec: CascadeSpec) -> int:
    """Rows of the first operand, by which tables tell cascades of one kind apart."""
    return prod(spec.operands[0].shape[:-1])


@dataclass
class CascadeProblem(Problem):
    """A cascade, whose inputs are drawn on the GPU; some rows of each set are checked."""

    spec: CascadeSpec
    checked: bool = True

    def variant(self, name: str, device: str) -> Variant:
        """A way to compute it."""
        return variants.make(name, self.spec, device)

    def bind(self, variant: Variant, how: TimingConditions, device: str) -> Bound:
        """Draw several sets of inputs, so that none is in the L2 cache when it is read next."""
        size = self.spec.bytes
        wanted = copies_needed(size, how.calls, how.l2)
        count = max(1, min(wanted, _MOST_SETS * max(1, how.calls), _SET_BYTES // size))
        sets = [draw(self.spec, number, device) for number in range(count)]
        calls = [partial(variant.call, *each.values()) for each in sets]
        judges = [partial(_judge, self.spec, each) for each in sets]
        return Bound(how, calls, judges if self.checked else ())


def draw(spec: CascadeSpec, seed: int, device: str) -> dict[str, Any]:
    """Draw inputs on the device, as `crossfuse.workload.cascade_numerics` draws them on the host.

    They are named, in the order of the function's parameters; equal seeds give equal inputs on
    equal devices.
    """
    import torch

    from crossfuse.workload.cascade_numerics import FACTORS, WEIGHTS

    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for each in spec.operands:
        how: dict[str, Any] = {"device": device, "generator": generator}
        if each.dtype == "int32":
            most = spec.operands[0].shape[-1]
            found[each.name] = torch.randint(0, most, each.shape, dtype=torch.int32, **how)
            continue
        values = torch.randn(each.shape, **how)
        if each.name in FACTORS:
            values = (values / 2).exp_()
        elif each.name in WEIGHTS and len(each.shape) > 1:
            values /= each.shape[-1] ** 0.5
        found[each.name] = values.to(getattr(torch, each.dtype))
    return found


def _judge(spec: CascadeSpec, inputs: dict[str, Any], outputs: Any) -> tuple[float | None, str]:
    """Hold some rows against the float64 rule.

    Gives the largest error over the allowed one and no message, or None and how the rule is broken.
    """
    from crossfuse.workload.cascade_numerics import check

    part = sample(spec)
    made = outputs if isinstance(outputs, tuple) else (outputs,)
    named = dict(zip((each.name for each in spec.outputs), made, strict=True))
    try:
        found = check(part.spec, part.take(inputs), part.take(named))
    except CheckFailed as error:
        return None, str(error)
    return max(each.worst for each in found.values()), ""


# Rows of a cascade that are few enough to be checked against float64.
#
# Rows of a cascade do not depend on each other, so that the expected values of some rows of the
# outputs are those of the same cascade with fewer rows.

#: Rows that are checked; of attention, heads.
ROWS = 32
_HEADS = 2
#: Of what is large, fewer.
_FEWER = {cascade_spec.MlaDecode: 1, cascade_spec.Variance: 8, cascade_spec.MomentOfInertia: 8}


@dataclass(frozen=True)
class Sample:
    """Some rows of a cascade, and how to cut them out of its tensors."""

    #: The cascade of these rows alone.
    spec: CascadeSpec
    #: Index into each operand and output that has rows; others are taken whole.
    picks: Mapping[str, Any]

    def take(self, tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Cut the rows out of tensors on any device; returns them by name, on the host."""
        from crossfuse.runtime.tensors import to_numpy

        shapes = {each.name: each.shape for each in (*self.spec.operands, *self.spec.outputs)}
        found = {}
        for name, tensor in tensors.items():
            part = tensor[self.picks[name]] if name in self.picks else tensor
            found[name] = to_numpy(part.contiguous()).reshape(shapes[name])
        return found


def sample(spec: CascadeSpec, seed: int = 0) -> Sample:
    """Choose at most `ROWS` rows, among them the first and the last; reproducible by its seed."""
    rng = np.random.default_rng(seed)
    if isinstance(spec, cascade_spec.Attention):
        return _heads(spec, rng)
    chosen = _some(rng, spec.count, _FEWER.get(type(spec), ROWS))
    index = list(map(int, chosen))
    every = (*spec.operands, *spec.outputs)
    # Whatever has the rows as its first extent, and would not with another number of rows.
    fewer = spec.with_count(len(index))
    shapes = {each.name: each.shape for each in (*fewer.operands, *fewer.outputs)}
    picks = {each.name: index for each in every if shapes[each.name] != each.shape}
    return Sample(fewer, picks)


def _heads(spec: cascade_spec.Attention, rng: np.random.Generator) -> Sample:
    """Single heads of single sequences, each with the keys and values of its group."""
    share = spec.heads // spec.kv_heads
    picks: list[tuple[int, int]] = []
    for number in _some(rng, spec.batch * spec.heads, _HEADS):
        picks.append(divmod(int(number), spec.heads))
    batches = [batch for batch, _ in picks]
    heads = [head for _, head in picks]
    of_keys = (batches, [head // share for head in heads])
    fewer = replace(spec, batch=len(picks), heads=1, kv_heads=1)
    own = (batches, heads)
    return Sample(fewer, {"q": own, "k": of_keys, "v": of_keys, "out": own})


def _some(rng: np.random.Generator, total: int, count: int) -> np.ndarray:
    if total <= count:
        return np.arange(total)
    middle = 1 + rng.choice(total - 2, count - 2, replace=False) if count > 2 else np.array([], int)
    return np.sort(np.concatenate(([0], middle, [total - 1])))


# Cascades as PyTorch computes them: the plain formula, library attention, QuACK's kernels.


#: Takes the inputs in order, gives the output or outputs.
Formula = Callable[..., Any]
_LIBRARY = {
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
}


def formula(name: str, spec: CascadeSpec) -> Formula:
    """How PyTorch computes a cascade, as a function of its inputs.

    Names are ``eager``, ``compile``, ``autotune``, ``quack``, and of attention alone
    ``sdpa-flash``, ``sdpa-cudnn`` and ``sdpa-efficient``; others are refused. ``torch.compile``
    compiles with the first call.
    """
    import torch

    plain = _PLAIN[type(spec)]
    if name == "eager":
        return lambda *inputs: plain(spec, *inputs)
    if name in COMPILE_MODES:
        mode = COMPILE_MODES[name]
        return torch.compile(lambda *inputs: plain(spec, *inputs), mode=mode, dynamic=False)
    if name in _LIBRARY and isinstance(spec, cascade_spec.Attention):
        return _library(_LIBRARY[name], spec)
    if name in _LIBRARY and isinstance(spec, cascade_spec.MlaDecode):
        return _latent_library(_LIBRARY[name], spec)
    if name == "quack":
        return quack(spec)
    limit = "eager, compile and autotune; sdpa-flash, sdpa-cudnn and sdpa-efficient of attention"
    raise no_such(name, spec, limit, "measure one of these")


def _library(backend: str, spec: cascade_spec.Attention) -> Formula:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    shared = spec.kv_heads != spec.heads

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=spec.causal, enable_gqa=shared)

    return call


def _latent_library(backend: str, spec: cascade_spec.MlaDecode) -> Formula:
    """Library attention of MLA: query heads as rows of one head, keys and values as views.

    Only the memory-efficient kernels take values narrower than keys. Others get all columns, of
    which the last results are dropped; on GPUs they refuse rows of more than 256 columns, as R4's.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    width = spec.latent_dim
    narrow = width if backend == "EFFICIENT_ATTENTION" else width + spec.rope_dim

    def call(q: Any, cache: Any) -> Any:
        rows, keys = q[:, None], cache[:, None]
        with sdpa_kernel(getattr(SDPBackend, backend)):
            found = scaled_dot_product_attention(rows, keys, keys[..., :narrow])
        return found[:, 0, :, :width]

    return call


def _softmax(spec: cascade_spec.Softmax, x: Any) -> Any:
    import torch

    return torch.softmax(x, -1)


def _log_softmax(spec: cascade_spec.LogSoftmax, x: Any) -> Any:
    import torch

    return torch.log_softmax(x, -1)


def _cross_entropy(spec: cascade_spec.CrossEntropy, x: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(x.float(), labels.long(), reduction="none")


def _layernorm(spec: cascade_spec.LayerNorm, *values: Any) -> Any:
    import torch

    *rows, weight, bias = values
    x = sum(rows[1:], rows[0])
    normal = torch.nn.functional.layer_norm(x, (spec.cols,), weight, bias, EPSILON)
    return (x, normal) if spec.residual else normal


def _rmsnorm(spec: cascade_spec.RmsNorm, *values: Any) -> Any:
    import torch

    *rows, weight = values
    x = sum(rows[1:], rows[0])
    normal = torch.nn.functional.rms_norm(x, (spec.cols,), weight, EPSILON)
    return (x, normal) if spec.residual else normal


def _variance(spec: cascade_spec.Variance, x: Any) -> Any:
    import torch

    return torch.var(x, -1, correction=0).float()


def _moment_of_inertia(
    spec: cascade_spec.MomentOfInertia, mass: Any, x: Any, y: Any, z: Any
) -> Any:
    total = mass.sum(1, keepdim=True)
    squares = sum((r - (mass * r).sum(1, keepdim=True) / total) ** 2 for r in (x, y, z))
    return (mass * squares).sum(1)


def _attention(spec: cascade_spec.Attention, q: Any, k: Any, v: Any) -> Any:
    import torch

    share = spec.heads // spec.kv_heads
    if share > 1:
        k, v = (each.repeat_interleave(share, 1) for each in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * spec.head_dim**-0.5
    if spec.causal:
        seen = torch.ones(spec.q_len, spec.kv_len, dtype=torch.bool, device=q.device)
        seen = seen.tril(spec.kv_len - spec.q_len)
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1).to(v.dtype) @ v


def _attention_out(spec: cascade_spec.AttentionOut, *operands: Any) -> Any:
    import torch

    q, k, v, weight, *others = operands
    context = _attention(spec, q, k, v).transpose(1, 2).reshape(spec.tokens, -1)
    bias = others.pop(0) if spec.bias else None
    found = torch.nn.functional.linear(context, weight, bias)
    return found + others[0] if others else found


def _mla_decode(spec: cascade_spec.MlaDecode, q: Any, cache: Any) -> Any:
    import torch

    width = spec.latent_dim + spec.rope_dim
    scores = (q @ cache.transpose(1, 2)).float() * width**-0.5
    return torch.softmax(scores, -1).to(q.dtype) @ cache[:, :, : spec.latent_dim]


def _moe_routing(spec: cascade_spec.MoeRouting, x: Any, router: Any) -> Any:
    import torch

    gates, chosen = torch.softmax((x @ router.T).float(), -1).topk(spec.top_k, -1)
    return gates, chosen.int()


def _quant_gemm(spec: cascade_spec.QuantGemm, x: Any, weight: Any, scale: Any) -> Any:
    import torch

    largest = x.float().abs().amax(1, keepdim=True).clamp(min=LEAST_MAGNITUDE)
    of_rows = largest / LARGEST_QUANTISED
    quantised = (x.float() / of_rows).to(weight.dtype)
    out = getattr(torch, spec.out)
    return torch._scaled_mm(quantised, weight.T, of_rows, scale[None, :], out_dtype=out)


def _rmsnorm_gemm(spec: cascade_spec.RmsNormGemm, x: Any, gamma: Any, weight: Any) -> Any:
    import torch

    wide = x.float()
    normal = wide * torch.rsqrt((wide * wide).mean(1, keepdim=True) + EPSILON)
    return torch.nn.functional.linear(normal.to(x.dtype) * gamma, weight)


def _norm_ffn(spec: cascade_spec.NormFfn, x: Any, gamma: Any, *given: Any) -> Any:
    from torch.nn.functional import layer_norm, linear, rms_norm

    from crossfuse.workload.torch_modules import activation

    act = activation(spec.act)
    if isinstance(spec, cascade_spec.LayerNormFfn):
        rows = layer_norm(x, (spec.K,), gamma, given[0], EPSILON)
    else:
        rows = rms_norm(x, (spec.K,), gamma, EPSILON)
    *weights, down = given[len(spec.parameters) - 1 :]
    first, *up = (linear(rows, each) for each in weights)
    hidden = act(first)
    out = linear(hidden * up[0] if up else hidden, down)
    return out + x if spec.residual else out


# Gradients of rows, written out so that ``torch.compile`` sees them alone: through autograd,
# what computes the function itself would be timed with it.


def gradient(spec: RowsGradient, *values: Any) -> Any:
    """The gradient by rows, in float32 and then of their type."""
    rows, *others = (each.float() if each.is_floating_point() else each for each in values)
    return _GRADIENTS[type(spec.of)](spec.of, rows, *others).to(values[0].dtype)


def _softmax_gradient(of: CascadeSpec, x: Any, given: Any) -> Any:
    y = x.softmax(-1)
    return y * (given - (y * given).sum(-1, keepdim=True))


def _log_softmax_gradient(of: CascadeSpec, x: Any, given: Any) -> Any:
    return given - x.softmax(-1) * given.sum(-1, keepdim=True)


def _cross_entropy_gradient(of: CascadeSpec, x: Any, labels: Any, given: Any) -> Any:
    import torch

    places = torch.arange(x.shape[-1], device=x.device)
    return (x.softmax(-1) - (places == labels[:, None]).float()) * given[:, None]


def _norm_gradient(of: cascade_spec.Norm, x: Any, *others: Any) -> Any:
    weight, *stored, given = others[1:] if of.residual else others
    x = x + others[0] if of.residual else x
    centred = isinstance(of, cascade_spec.LayerNorm)
    x = x - x.mean(-1, keepdim=True) if centred else x
    scale = (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    unit, by_unit = x * scale, given * weight
    found = by_unit - unit * (by_unit * unit).mean(-1, keepdim=True)
    found = found - by_unit.mean(-1, keepdim=True) if centred else found
    return sum(stored, scale * found)


def _variance_gradient(of: cascade_spec.Variance, x: Any, given: Any) -> Any:
    return 2 / of.cols * (x - x.mean(-1, keepdim=True)) * given[:, None]


_GRADIENTS: dict[type[CascadeSpec], Callable[..., Any]] = {
    cascade_spec.Softmax: _softmax_gradient,
    cascade_spec.LogSoftmax: _log_softmax_gradient,
    cascade_spec.CrossEntropy: _cross_entropy_gradient,
    cascade_spec.LayerNorm: _norm_gradient,
    cascade_spec.RmsNorm: _norm_gradient,
    cascade_spec.Variance: _variance_gradient,
}

_PLAIN: dict[type[CascadeSpec], Formula] = {
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


# QuACK's kernels of rows (Tri Dao and others, ``quack-kernels``) as baselines, if installed.


def quack(spec: CascadeSpec) -> Formula:
    """QuACK's kernel of a softmax, cross entropy, or norm of rows; its first call compiles it.

    Its norms take a residual, and return the sum beside the rows. They are called below
    ``layernorm_fwd``, which wants scales in float32: 16-bit scales are what ours read. What QuACK
    has no kernel for is refused, as is everything where it is not installed.
    """
    known: dict[type[CascadeSpec], Callable[[Any], Formula]] = {
        cascade_spec.Softmax: _quack_softmax,
        cascade_spec.CrossEntropy: _quack_cross_entropy,
        cascade_spec.LayerNorm: _quack_norm,
        cascade_spec.RmsNorm: _quack_norm,
    }
    if type(spec) not in known or spec.out != spec.dtype:
        kinds = ", ".join(each.kind for each in known)
        raise no_such("quack", spec, f"{kinds}, of one type", "measure other variants of it")
    try:
        return known[type(spec)](spec)
    except ImportError as error:
        limit, instead = f"an installed package ({error})", "pip install quack-kernels"
        raise no_such("quack", spec, limit, instead) from error


def _quack_softmax(spec: cascade_spec.Softmax) -> Formula:
    from quack.softmax import softmax_fwd

    return lambda x: softmax_fwd(x)


def _quack_cross_entropy(spec: cascade_spec.CrossEntropy) -> Formula:
    from quack.cross_entropy import cross_entropy_fwd

    return lambda x, labels: cross_entropy_fwd(x, labels)


def _quack_norm(spec: cascade_spec.Norm) -> Formula:
    import torch
    from quack.rmsnorm import _rmsnorm_fwd

    centred = isinstance(spec, cascade_spec.LayerNorm)

    def call(x: Any, *others: Any) -> Any:
        residual = others[0] if spec.residual else None
        weight, bias = (*others[spec.residual :], None)[:2]
        out = torch.empty_like(x)
        summed = torch.empty_like(x) if spec.residual else None
        _rmsnorm_fwd(x, weight, out, bias, None, None, residual, summed, EPSILON, centred)
        return (summed, out) if spec.residual else out

    return call
