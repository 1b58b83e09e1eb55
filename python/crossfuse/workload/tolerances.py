"""Tolerance of a fused result: the rule by which it passes.

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
from crossfuse.workload.dtypes import FLOAT_TYPES
from crossfuse.workload.numerics import stages, unfused
from crossfuse.workload.spec import WorkloadSpec
from crossfuse.workload.unavoidable import unavoidable

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
        noise, rounding, scale = unavoidable(spec, inputs, exact)
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
    finite = np.abs(reference[np.isfinite(reference)])
    scale = np.full(reference.shape, max(float(finite.max(initial=0.0)), smallest))
    noise = FLOAT_TYPES["float32"].unit * np.sqrt(depth) * scale if kind else np.zeros_like(scale)
    return make_tolerance(reference, unfused, noise, unit * np.abs(reference), scale)
