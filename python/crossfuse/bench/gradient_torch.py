"""Gradients of rows as torch computes them, from the same inputs as our kernels.

They are written out, so that ``torch.compile`` sees the gradient alone: through autograd, what
computes the function itself would be timed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import EPSILON, CascadeSpec
from crossfuse.workload.gradient_spec import RowsGradient


def gradient(spec: RowsGradient, *values: Any) -> Any:
    """The gradient by rows, in float32 and then of their type."""
    rows, *others = (each.float() if each.is_floating_point() else each for each in values)
    return _RULES[type(spec.of)](spec.of, rows, *others).to(values[0].dtype)


def _softmax(of: CascadeSpec, x: Any, given: Any) -> Any:
    y = x.softmax(-1)
    return y * (given - (y * given).sum(-1, keepdim=True))


def _log_softmax(of: CascadeSpec, x: Any, given: Any) -> Any:
    return given - x.softmax(-1) * given.sum(-1, keepdim=True)


def _cross_entropy(of: CascadeSpec, x: Any, labels: Any, given: Any) -> Any:
    import torch

    places = torch.arange(x.shape[-1], device=x.device)
    return (x.softmax(-1) - (places == labels[:, None]).float()) * given[:, None]


def _norm(of: cascade_spec.Norm, x: Any, *others: Any) -> Any:
    weight, *stored, given = others[1:] if of.residual else others
    x = x + others[0] if of.residual else x
    centred = isinstance(of, cascade_spec.LayerNorm)
    x = x - x.mean(-1, keepdim=True) if centred else x
    scale = (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    unit, by_unit = x * scale, given * weight
    found = by_unit - unit * (by_unit * unit).mean(-1, keepdim=True)
    found = found - by_unit.mean(-1, keepdim=True) if centred else found
    return sum(stored, scale * found)


def _variance(of: cascade_spec.Variance, x: Any, given: Any) -> Any:
    return 2 / of.cols * (x - x.mean(-1, keepdim=True)) * given[:, None]


_RULES: dict[type[CascadeSpec], Callable[..., Any]] = {
    cascade_spec.Softmax: _softmax,
    cascade_spec.LogSoftmax: _log_softmax,
    cascade_spec.CrossEntropy: _cross_entropy,
    cascade_spec.LayerNorm: _norm,
    cascade_spec.RmsNorm: _norm,
    cascade_spec.Variance: _variance,
}
