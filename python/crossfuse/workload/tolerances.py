"""Tolerance of a fused result: the rule by which it passes, and judging by it.

A fused kernel rounds less than separate kernels do, so against float64 its error may be at most
twice theirs, norm-wise and element-wise. What the rule cannot demand is subtracted first: the
order in which float32 sums are taken, and the roundings that no kernel can avoid (the intermediate
to the input type, the result to the output type), which matter where few elements are compared
and the unfused result is exact by luck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crossfuse.calls import checked
from crossfuse.errors import CheckFailed, refuse
from crossfuse.workload.dtypes import FLOAT_TYPES, float_type
from crossfuse.workload.numerics import Stages, activate, left, stages, unfused, weight
from crossfuse.workload.spec import WorkloadSpec, affine

FACTOR = 2.0


@dataclass(frozen=True)
class Tolerance:
    """What a result is compared with and how far off it may be.

    Attributes
    ----------
    reference : numpy.ndarray
        The float64 result.
    unfused : numpy.ndarray
        The result of separate kernels, in the output type.
    absolute : numpy.ndarray
        Largest error allowed at each element.
    norm : float
        Largest Frobenius norm allowed of the error.

    Examples
    --------
    >>> from crossfuse.workload import parse, random_inputs, tolerance
    >>> spec = parse("gemm_chain:M=16,K=64,N=32,L=8")
    >>> limits = tolerance(spec, random_inputs(spec))
    >>> limits.absolute.shape, limits.norm > 0
    ((16, 8), True)
    """

    reference: np.ndarray
    unfused: np.ndarray
    absolute: np.ndarray
    norm: float


@checked
def tolerance(spec: WorkloadSpec, inputs: Mapping[str, np.ndarray]) -> Tolerance:
    """Work out what a fused kernel may err on these inputs.

    Parameters
    ----------
    spec : WorkloadSpec
        What is computed.
    inputs : Mapping[str, numpy.ndarray]
        On which inputs.

    Returns
    -------
    Tolerance
        The reference and the limits.

    Raises
    ------
    CheckFailed
        When the inputs are not the spec's.

    Examples
    --------
    >>> from crossfuse.workload import parse, random_inputs, unfused
    >>> spec = parse("gemm_chain:M=16,K=64,N=32,L=8")
    >>> inputs = random_inputs(spec)
    >>> limits = tolerance(spec, inputs)
    >>> bool((abs(unfused(spec, inputs) - limits.reference) <= limits.absolute).all())
    True
    """
    exact = stages(spec, inputs)
    separate = unfused(spec, inputs)
    with np.errstate(all="ignore"):
        noise, rounding, scale = _unavoidable(spec, inputs, exact)
    return make_tolerance(exact.output, separate, noise, rounding, scale)


def make_tolerance(
    reference: np.ndarray,
    unfused: np.ndarray,
    noise: np.ndarray,
    rounding: np.ndarray,
    scale: np.ndarray,
) -> Tolerance:
    """Apply the rule to the results of any computation.

    The reference is float64, `unfused` the result of separate kernels in the output type. At each
    element `noise` is the error that the free order of float32 sums explains, `rounding` the error
    of unavoidable roundings, and `scale` the positive size before cancellation, relative to which
    errors are compared.
    """
    with np.errstate(all="ignore"):
        errors = np.abs(unfused.astype(np.float64) - reference)
        usable = np.isfinite(errors) & np.isfinite(scale)
        worst = (errors[usable] / scale[usable]).max(initial=0.0)
        absolute = FACTOR * worst * scale + noise + rounding
        # Luck averages out over many elements, so the norm gets only a share of the rounding.
        share = rounding / np.sqrt(max(1, int(usable.sum())))
        norm = FACTOR * np.linalg.norm(errors[usable]) + np.linalg.norm((noise + share)[usable])
    return Tolerance(reference, unfused, absolute, float(norm))


def plain_tolerance(reference: np.ndarray, unfused: np.ndarray, depth: int) -> Tolerance:
    """Apply the rule to a computation of which only inputs and outputs are known.

    Errors are relative to the largest output: cancellation inside is not visible here. The
    reference is float64, `unfused` the result of separate kernels in the output type, where
    integers are not rounded; `depth` counts the terms of the longest sum.
    """
    kind = FLOAT_TYPES.get(str(unfused.dtype))
    unit, smallest = (kind.unit, kind.smallest) if kind else (0.0, 1.0)
    of_sums = FLOAT_TYPES["float32"].unit if kind else 0.0
    if unfused.dtype == np.float64:
        # Separate kernels are the reference itself: 8 units for sums and elementary functions.
        info = np.finfo(np.float64)
        unit, smallest, of_sums = float(info.eps) / 2, float(info.tiny), 4 * float(info.eps)
    finite = np.abs(reference[np.isfinite(reference)])
    scale = np.full(reference.shape, max(float(finite.max(initial=0.0)), smallest))
    noise = of_sums * np.sqrt(depth) * scale
    return make_tolerance(reference, unfused, noise, unit * np.abs(reference), scale)


# The error that no float32 computation of a workload can avoid.

_F32 = FLOAT_TYPES["float32"]
# Float32 elementary functions on CPU and GPU are within a few units in the last place.
_FUNCTION_ERROR = 8 * _F32.unit


def _unavoidable(
    spec: WorkloadSpec, inputs: Mapping[str, np.ndarray], exact: Stages
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise, rounding and scale at each element of the output, for `make_tolerance`.

    `exact` is the float64 result on these inputs.
    """
    values = {name: inputs[name].astype(np.float64) for name in spec.inputs}
    a, weights = np.abs(left(spec, values)), [np.abs(each) for each in _weights(spec, values)]
    last, first = spec.products[-1], spec.products[: -1 if spec.L else None]
    if spec.kind == "gemm":
        own = a @ weights[0] if spec.combine == "sum" else None
        size, shift = _finished(spec, last, exact.first[0], own, spec.K, values)
        noise = _activation_error(spec, exact.first[0], shift)
        size = np.maximum(np.abs(activate(spec, exact.first[0])), size)
        return _with_residual(spec, exact, values, noise, np.zeros_like(noise), size)
    sizes, shifts = zip(
        *(
            _finished(spec, name, result, a @ matrix, spec.K, values)
            for name, result, matrix in zip(first, exact.first, weights, strict=False)
        ),
        strict=True,
    )
    hidden = _activation_error(spec, exact.first[0], shifts[0])
    if spec.gated:
        gate, up = np.abs(activate(spec, exact.first[0])), np.abs(exact.first[1])
        hidden = hidden * (up + shifts[1]) + gate * shifts[1]
    if not spec.L:
        size = np.maximum(gate, sizes[0]) * np.maximum(up, sizes[1])
        return _with_residual(spec, exact, values, hidden, np.zeros_like(hidden), size)
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


# Judging results by the rule.


@dataclass(frozen=True)
class Accuracy:
    """How far off a result that passed is, relative to the norm of the reference.

    Attributes
    ----------
    error : float
        Frobenius norm of the error over that of the reference.
    unfused_error : float
        The same for the result of separate kernels.
    allowed : float
        The same for the largest error allowed.
    worst : float
        Largest error of an element over what is allowed there; at most 1.

    Examples
    --------
    >>> from crossfuse.workload import check, parse, random_inputs, unfused
    >>> spec = parse("gemm_chain:M=16,K=64,N=32,L=8")
    >>> inputs = random_inputs(spec)
    >>> found = check(spec, inputs, unfused(spec, inputs))
    >>> found.error <= found.allowed
    True
    """

    error: float
    unfused_error: float
    allowed: float
    worst: float


@checked
def check(spec: WorkloadSpec, inputs: Mapping[str, np.ndarray], output: np.ndarray) -> Accuracy:
    """Hold a result against the rule.

    Parameters
    ----------
    spec : WorkloadSpec
        What was computed.
    inputs : Mapping[str, numpy.ndarray]
        From which inputs.
    output : numpy.ndarray
        The result, of the spec's output shape and type.

    Returns
    -------
    Accuracy
        The errors, all within the limits.

    Raises
    ------
    CheckFailed
        For a result of another shape or type, one whose NaN and infinities differ from those of
        reference and separate kernels, and one that is too far off; the message names the element.

    Examples
    --------
    >>> from crossfuse.workload import parse, random_inputs, unfused
    >>> spec = parse("gemm_chain:M=16,K=64,N=32,L=8")
    >>> inputs = random_inputs(spec)
    >>> check(spec, inputs, unfused(spec, inputs)).worst <= 1
    True
    """
    due = f"{spec.out}{list(spec.output)}"
    found = f"{output.dtype}{list(output.shape)}"
    if due != found:
        instead = "give the kernel an output of that shape and type"
        raise refuse(CheckFailed, "output-type", str(spec), found=found, limit=due, instead=instead)
    return judge(tolerance(spec, inputs), output, str(spec))


def judge(limits: Tolerance, output: np.ndarray, where: str) -> Accuracy:
    """Judge a result, in the output type, by given limits; `CheckFailed` if one is exceeded.

    `where` names what was computed in messages. See `check`.
    """
    with np.errstate(all="ignore"):
        _check_classes(limits, output, where)
        got = output.astype(np.float64)
        finite = np.isfinite(got) & np.isfinite(limits.reference)
        errors = np.where(finite, np.abs(got - limits.reference), 0.0)
        ratios = np.where(errors > 0, errors / limits.absolute, 0.0)
        separate = np.abs(limits.unfused.astype(np.float64) - limits.reference)[finite]
    worst = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    if ratios[worst] > 1:
        place = ", ".join(str(int(i)) for i in worst)
        facts = f"{got[worst]:.6g} at [{place}] where float64 gives {limits.reference[worst]:.6g}"
        raise _failed("element-error", where, facts, f"an error of {limits.absolute[worst]:.3g}")
    norm = float(np.linalg.norm(errors))
    if norm > limits.norm:
        facts = f"an error of norm {norm:.3g}, {np.linalg.norm(separate):.3g} for separate kernels"
        raise _failed("norm-error", where, facts, f"{limits.norm:.3g}")
    size = float(np.linalg.norm(limits.reference[finite])) or 1.0
    return Accuracy(
        error=norm / size,
        unfused_error=float(np.linalg.norm(separate)) / size,
        allowed=limits.norm / size,
        worst=float(ratios[worst]),
    )


def _failed(rule: str, where: str, found: str, limit: str) -> CheckFailed:
    advice = "find the first stage whose tensor is off"
    return refuse(CheckFailed, rule, where, found=found, limit=limit, instead=advice)


def _check_classes(limits: Tolerance, output: np.ndarray, where: str) -> None:
    """Check that NaN, +inf, -inf and finite agree with float64 or with the separate kernels.

    Near the end of the range either side of the rounding to infinity is right, so the class may be
    that of any value within the tolerance.
    """
    got = _classes(output)
    step = np.nan_to_num(limits.absolute, nan=0.0, posinf=0.0)
    near = (limits.reference + offset for offset in (-step, 0.0, step))
    agrees = got == _classes(limits.unfused)
    for candidate in near:
        agrees |= got == _classes(candidate.astype(output.dtype))
    if agrees.all():
        return
    place = tuple(int(i) for i in np.argwhere(~agrees)[0])
    found = f"{output[place]} at {list(place)}"
    limit = f"{limits.reference[place]:.6g}, as in float64, or {limits.unfused[place]}"
    raise _failed("value-class", where, found, limit)


def _classes(array: np.ndarray) -> np.ndarray:
    """Class of each element: 0 finite, 1 NaN, 2 positive infinity, 3 negative infinity."""
    values = array.astype(np.float32)
    infinite = np.where(values > 0, 2, 3)
    return np.where(np.isnan(values), 1, np.where(np.isinf(values), infinite, 0))
