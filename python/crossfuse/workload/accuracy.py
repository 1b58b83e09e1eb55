"""Judging results by the rule of `crossfuse.workload.tolerances`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crossfuse.calls import checked
from crossfuse.errors import CheckFailed, refuse
from crossfuse.workload.spec import WorkloadSpec
from crossfuse.workload.tolerances import Tolerance, tolerance


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
