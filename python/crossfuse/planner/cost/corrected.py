"""The estimate with what was learned from measured kernels.

``time = estimate * exp(correction)``. What the correction adds or takes is a term of its own, so
that a plan still says which part of its time is explained and which is experience.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.features import features
from crossfuse.planner.cost.own import with_own
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import LEARNED, Estimate
from crossfuse.planner.kernels.every import Kernel, memories
from crossfuse.planner.kernels.shape import Shape


def corrected(kernel: Kernel, shape: Shape, device: Device, rates: Rates) -> Estimate:
    """Estimate the time of kernels, and correct it by trees if the rates have any.

    Parameters
    ----------
    kernel, shape, device, rates
        See `crossfuse.planner.cost.estimate.estimate`.

    Returns
    -------
    Estimate
        With a term ``"learned"``, which is negative where kernels were faster than estimated, and
        the user's own terms, which were not learned from.
    """
    room = memories(kernel, shape, device)[-1]
    found = estimate(kernel, shape, device, rates, room)
    if rates.trees is None:
        return with_own(found, rates.own, kernel, shape, device)
    rows = features(kernel, shape, device, found, room)
    by: np.ndarray | float = np.expm1(rates.trees.sum(rows)) * np.asarray(found.microseconds)
    if not np.ndim(found.microseconds):
        by = float(np.asarray(by).item())
    found = replace(found, terms={**found.terms, LEARNED: by})
    return with_own(found, rates.own, kernel, shape, device)
