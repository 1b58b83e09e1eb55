"""Inputs to check cascades with: random ones, and ones that break careless kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.dtypes import float_type

Inputs = dict[str, np.ndarray]

#: Operands that are the weights of a product, which scale with the terms of its sums.
WEIGHTS = ("weight", "router")
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
    return _rounded(spec, drawn)


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
        if name == "infinite" and spec.kind not in ("softmax", "log_softmax", "cross_entropy"):
            continue
        changed = change(values.reshape(-1, first.shape[-1]), float_type(first.dtype).smallest)
        inputs = dict(base) | {first.name: changed.reshape(first.shape)}
        if "residual" in inputs:
            inputs["residual"] = np.zeros_like(inputs["residual"])
        if name == "infinite" and "labels" in inputs:
            # The first element of a row is finite: a loss of infinity checks nothing.
            inputs["labels"] = np.zeros_like(inputs["labels"])
        yield name, _rounded(spec, inputs)


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


def _rounded(spec: CascadeSpec, inputs: Mapping[str, np.ndarray]) -> Inputs:
    return {
        each.name: np.ascontiguousarray(inputs[each.name]).astype(
            np.int32 if each.dtype == "int32" else float_type(each.dtype).numpy
        )
        for each in spec.operands
    }
