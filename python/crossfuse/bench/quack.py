"""QuACK's kernels of rows (Tri Dao and others, ``quack-kernels``) as baselines, if installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse.bench.variant import no_such
from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import EPSILON, CascadeSpec

#: Takes the inputs in order, gives the output or outputs.
Formula = Callable[..., Any]


def quack(spec: CascadeSpec) -> Formula:
    """QuACK's kernel of a softmax, cross entropy, or norm of rows; its first call compiles it.

    Its norms take a residual, and return the sum beside the rows. They are called below
    ``layernorm_fwd``, which wants scales in float32: 16-bit scales are what ours read. What QuACK
    has no kernel for is refused, as is everything where it is not installed.
    """
    known: dict[type[CascadeSpec], Callable[[Any], Formula]] = {
        cascade_spec.Softmax: _softmax,
        cascade_spec.CrossEntropy: _cross_entropy,
        cascade_spec.LayerNorm: _norm,
        cascade_spec.RmsNorm: _norm,
    }
    if type(spec) not in known or spec.out != spec.dtype:
        kinds = ", ".join(each.kind for each in known)
        raise no_such("quack", spec, f"{kinds}, of one type", "measure other variants of it")
    try:
        return known[type(spec)](spec)
    except ImportError as error:
        limit, instead = f"an installed package ({error})", "pip install quack-kernels"
        raise no_such("quack", spec, limit, instead) from error


def _softmax(spec: cascade_spec.Softmax) -> Formula:
    from quack.softmax import softmax_fwd

    return lambda x: softmax_fwd(x)


def _cross_entropy(spec: cascade_spec.CrossEntropy) -> Formula:
    from quack.cross_entropy import cross_entropy_fwd

    return lambda x, labels: cross_entropy_fwd(x, labels)


def _norm(spec: cascade_spec.Norm) -> Formula:
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
