"""The rule by which a fused result passes.

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

from crossfuse.errors import CheckFailed, refuse
from crossfuse.workload.dtypes import FLOAT_TYPES, float_type
from crossfuse.workload.numerics import Stages, activate, left, stages, unfused, weight
from crossfuse.workload.spec import WorkloadSpec

FACTOR = 2.0
_F32 = FLOAT_TYPES["float32"]
# Float32 elementary functions on CPU and GPU are within a few units in the last place.
_FUNCTION_ERROR = 8 * _F32.unit


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
    """

    reference: np.ndarray
    unfused: np.ndarray
    absolute: np.ndarray
    norm: float


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
    """

    error: float
    unfused_error: float
    allowed: float
    worst: float


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

    Parameters
    ----------
    reference : numpy.ndarray
        float64.
    unfused : numpy.ndarray
        The result of separate kernels, in the output type.
    noise : numpy.ndarray
        Error at each element that the free order of float32 sums explains.
    rounding : numpy.ndarray
        Error at each element that unavoidable roundings explain.
    scale : numpy.ndarray
        Positive size of each element before cancellation; errors are compared relative to it.

    Returns
    -------
    Tolerance
        The reference and the limits.
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
    """
    due = f"{spec.out}{list(spec.output)}"
    found = f"{output.dtype}{list(output.shape)}"
    if due != found:
        instead = "give the kernel an output of that shape and type"
        raise refuse(CheckFailed, "output-type", str(spec), found=found, limit=due, instead=instead)
    return judge(tolerance(spec, inputs), output, str(spec))


def judge(limits: Tolerance, output: np.ndarray, where: str) -> Accuracy:
    """Hold a result against given limits.

    Parameters
    ----------
    limits : Tolerance
        From `tolerance` or `make_tolerance`.
    output : numpy.ndarray
        The result, in the output type.
    where : str
        What was computed, for the message.

    Returns
    -------
    Accuracy
        The errors, all within the limits.

    Raises
    ------
    CheckFailed
        See `check`.
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
    error = refuse(CheckFailed, rule, where, found=found, limit=limit, instead=advice)
    assert isinstance(error, CheckFailed)
    return error


def _check_classes(limits: Tolerance, output: np.ndarray, where: str) -> None:
    """NaN, +inf, -inf and finite must agree with float64 or with the separate kernels.

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
    """0 finite, 1 NaN, 2 positive infinity, 3 negative infinity."""
    values = array.astype(np.float32)
    infinite = np.where(values > 0, 2, 3)
    return np.where(np.isnan(values), 1, np.where(np.isinf(values), infinite, 0))


def _unavoidable(
    spec: WorkloadSpec, inputs: Mapping[str, np.ndarray], exact: Stages
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise, rounding and scale as `make_tolerance` takes them."""
    a, *weights = (np.abs(inputs[name].astype(np.float64)) for name in spec.inputs)
    a, weights = left(spec, a), [weight(spec, stored) for stored in weights]
    out, kind = float_type(spec.out), float_type(spec.dtype)
    last = out.unit * np.abs(exact.output) + out.smallest
    if spec.kind == "gemm":
        size = a @ weights[0] if spec.combine == "sum" else np.abs(exact.first[0])
        shift = _sum_error(exact.first[0], size, spec.K)
        noise = _activation_error(spec, exact.first[0], shift)
        return noise, last, np.maximum(np.abs(exact.output), size) + _tiny(size)
    shifts = [
        _sum_error(result, a @ matrix, spec.K)
        for result, matrix in zip(exact.first, weights[:-1], strict=True)
    ]
    hidden = _activation_error(spec, exact.first[0], shifts[0])
    if spec.gated:
        gate, up = np.abs(activate(spec, exact.first[0])), np.abs(exact.first[1])
        hidden = hidden * (up + shifts[1]) + gate * shifts[1]
    down, size = weights[-1], np.abs(exact.hidden) @ weights[-1]
    # Errors of different elements of the intermediate are independent, so their squares add up.
    noise = np.sqrt(hidden**2 @ down**2) + _sum_error(exact.output, size, spec.N)
    rounded = np.sqrt((exact.hidden * kind.unit) ** 2 @ down**2)
    rounded += kind.smallest * np.sqrt(np.sum(down**2, axis=0))
    return noise, rounded + last, size + _tiny(size)


def _tiny(size: np.ndarray) -> float:
    """Keeps the scale positive where everything is zero."""
    finite = size[np.isfinite(size)]
    return float(max(np.max(finite, initial=0.0) * _F32.unit, _F32.smallest))


def _sum_error(result: np.ndarray, size: np.ndarray, depth: int) -> np.ndarray:
    """Error of a float32 sum of `depth` terms of total magnitude `size`, in any sensible order.

    Roundings of random sign grow with the root of the depth where the terms have one sign, and not
    at all with it where signs are mixed. The bound that holds for every input grows with the depth
    and would hide a lost term.
    """
    relative = np.sqrt(depth) * np.abs(result) + 4 * size
    return _F32.unit * relative + depth * _F32.smallest


def _activation_error(spec: WorkloadSpec, x: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """What an error of `shift` in x and float32 functions make of the activation."""
    if spec.act == "identity":
        return shift
    here = activate(spec, x)
    moved = [np.abs(activate(spec, x + offset) - here) for offset in (-shift, shift)]
    return np.maximum(*moved) + _FUNCTION_ERROR * (np.abs(x) + np.abs(here))
