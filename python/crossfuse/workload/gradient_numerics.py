"""Gradients of rows, written out by hand: what derived ones are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import EPSILON, CascadeSpec
from crossfuse.workload.gradient_spec import RowsGradient

Values = Sequence[np.ndarray]
#: Rounds what leaves an operator to a type.
Rounding = Callable[[np.ndarray, str], np.ndarray]


def gradient(spec: RowsGradient, values: Values, rounded: Rounding) -> Values:
    """The gradient by rows of a cascade, of values in the order of the spec's operands.

    As of separate kernels, it reads what the function has stored: the softmax, its logarithm, the
    sum with a residual.
    """
    return [_RULES[type(spec.of)](spec.of, values, rounded)]


def _mean(x: np.ndarray) -> np.ndarray:
    return x.mean(axis=1, keepdims=True)


def _logarithms(x: np.ndarray) -> np.ndarray:
    """Logarithms of a softmax."""
    below = x - x.max(axis=1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=1, keepdims=True))


def _softmax(of: Any, values: Values, rounded: Rounding) -> np.ndarray:
    x, given = values
    below = np.exp(x - x.max(axis=1, keepdims=True))
    y = rounded(below / below.sum(axis=1, keepdims=True), of.out)
    return y * (given - (y * given).sum(axis=1, keepdims=True))


def _log_softmax(of: Any, values: Values, rounded: Rounding) -> np.ndarray:
    x, given = values
    y = rounded(_logarithms(x), of.out)
    return given - np.exp(y) * given.sum(axis=1, keepdims=True)


def _cross_entropy(of: Any, values: Values, rounded: Rounding) -> np.ndarray:
    x, labels, given = values
    y = np.exp(rounded(_logarithms(x), of.dtype))
    y[np.arange(len(y)), labels.astype(np.int64)] -= 1
    return y * given[:, None]


def _norm(of: Any, values: Values, rounded: Rounding) -> np.ndarray:
    """Of rows that are divided by a deviation; of a layer norm also moved, which leaves no mean."""
    x, *others, given = values
    stored = others.pop() if of.residual else None
    if of.residual:
        x = rounded(x + others.pop(0), of.dtype)
    (weight,) = others
    if isinstance(of, cascade_spec.LayerNorm):
        x = x - _mean(x)
    scale = 1 / np.sqrt(_mean(x * x) + x.dtype.type(EPSILON))
    unit, by_unit = x * scale, given * weight
    found = by_unit - unit * _mean(by_unit * unit)
    if isinstance(of, cascade_spec.LayerNorm):
        found = found - _mean(by_unit)
    return scale * found if stored is None else scale * found + stored


def _variance(of: Any, values: Values, rounded: Rounding) -> np.ndarray:
    x, given = values
    return x.dtype.type(2 / of.cols) * (x - _mean(x)) * given[:, None]


_RULES: dict[type[CascadeSpec], Callable[..., np.ndarray]] = {
    cascade_spec.Softmax: _softmax,
    cascade_spec.LogSoftmax: _log_softmax,
    cascade_spec.CrossEntropy: _cross_entropy,
    cascade_spec.LayerNorm: _norm,
    cascade_spec.RmsNorm: _norm,
    cascade_spec.Variance: _variance,
}
