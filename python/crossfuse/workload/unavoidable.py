"""The error that no float32 computation of a workload can avoid."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from crossfuse.workload.dtypes import FLOAT_TYPES, float_type
from crossfuse.workload.epilogue import affine
from crossfuse.workload.numerics import Stages, activate, left, weight
from crossfuse.workload.spec import WorkloadSpec

_F32 = FLOAT_TYPES["float32"]
# Float32 elementary functions on CPU and GPU are within a few units in the last place.
_FUNCTION_ERROR = 8 * _F32.unit


def unavoidable(
    spec: WorkloadSpec, inputs: Mapping[str, np.ndarray], exact: Stages
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise, rounding and scale at each element of the output, for `tolerances.make_tolerance`.

    `exact` is the float64 result on these inputs.
    """
    values = {name: inputs[name].astype(np.float64) for name in spec.inputs}
    a, weights = np.abs(left(spec, values)), [np.abs(each) for each in _weights(spec, values)]
    *first, last = spec.products
    if spec.kind == "gemm":
        own = a @ weights[0] if spec.combine == "sum" else None
        size, shift = _finished(spec, last, exact.first[0], own, spec.K, values)
        noise = _activation_error(spec, exact.first[0], shift)
        size = np.maximum(np.abs(activate(spec, exact.first[0])), size)
        return _with_residual(spec, exact, values, noise, np.zeros_like(noise), size)
    shifts = [
        _finished(spec, name, result, a @ matrix, spec.K, values)[1]
        for name, result, matrix in zip(first, exact.first, weights[:-1], strict=True)
    ]
    hidden = _activation_error(spec, exact.first[0], shifts[0])
    if spec.gated:
        gate, up = np.abs(activate(spec, exact.first[0])), np.abs(exact.first[1])
        hidden = hidden * (up + shifts[1]) + gate * shifts[1]
    down, kind = weights[-1], float_type(spec.dtype)
    factor, output = _factor(spec, last, values), exact.output - values.get("residual", 0.0)
    size, own = _finished(spec, last, output, np.abs(exact.hidden) @ down, spec.N, values)
    # Errors of different elements of the intermediate are independent, so their squares add up.
    noise = factor * np.sqrt(hidden**2 @ down**2) + own
    rounded = np.sqrt((exact.hidden * kind.unit) ** 2 @ down**2)
    rounded += kind.smallest * np.sqrt(np.sum(down**2, axis=0))
    return _with_residual(spec, exact, values, noise, factor * rounded, size)


def _weights(spec: WorkloadSpec, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [weight(spec, values[each.name]) for each in spec.weight_operands]


def _factor(spec: WorkloadSpec, product: str, values: Mapping[str, np.ndarray]) -> float:
    """Magnitude of a product's scale; 1 without one."""
    scale, _ = affine(spec, product)
    return float(np.abs(values[scale][0])) if scale else 1.0


def _finished(
    spec: WorkloadSpec,
    product: str,
    result: np.ndarray,
    size: np.ndarray | None,
    depth: int,
    values: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Size before cancellation, and error, of a product with its scale and its bias.

    `result` has both; `size` is that of the product alone, None where nothing cancels in it.
    """
    factor, (scale, bias) = _factor(spec, product, values), affine(spec, product)
    added = values[bias] if bias else np.zeros(1)
    alone = np.abs(result - added)
    size = alone if size is None else factor * size
    error = _sum_error(alone, size, depth, factor)
    size = size + np.abs(added)
    return size, error + _F32.unit * size * ((scale != "") + (bias != ""))


def _with_residual(
    spec: WorkloadSpec,
    exact: Stages,
    values: Mapping[str, np.ndarray],
    noise: np.ndarray,
    rounding: np.ndarray,
    size: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise, rounding and scale of the output: with the residual added, and rounded to its type."""
    out = float_type(spec.out)
    if spec.residual:
        size = size + np.abs(values["residual"])
        noise = noise + _F32.unit * size
    last = out.unit * np.abs(exact.output) + out.smallest
    return noise, rounding + last, size + _tiny(size)


def _tiny(size: np.ndarray) -> float:
    """A number that keeps the scale positive where everything is zero."""
    finite = size[np.isfinite(size)]
    return float(max(np.max(finite, initial=0.0) * _F32.unit, _F32.smallest))


def _sum_error(result: np.ndarray, size: np.ndarray, depth: int, factor: float = 1.0) -> np.ndarray:
    """Error of a float32 sum of `depth` terms of total magnitude `size`, in any sensible order.

    Both are what they are after a multiplication by `factor`.

    Roundings of random sign grow with the root of the depth where the terms have one sign, and not
    at all with it where signs are mixed. The bound that holds for every input grows with the depth
    and would hide a lost term.
    """
    relative = np.sqrt(depth) * np.abs(result) + 4 * size
    return _F32.unit * relative + factor * depth * _F32.smallest


def _activation_error(spec: WorkloadSpec, x: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Error of the activation for an error of `shift` in x, with float32 functions."""
    if spec.act == "identity":
        return shift
    here = activate(spec, x)
    moved = [np.abs(activate(spec, x + offset) - here) for offset in (-shift, shift)]
    return np.maximum(*moved) + _FUNCTION_ERROR * (np.abs(x) + np.abs(here))
