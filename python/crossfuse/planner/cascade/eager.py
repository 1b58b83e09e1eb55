"""Not fusing a cascade: one kernel after another, each of which reads and writes memory."""

from __future__ import annotations

from collections.abc import Sequence

from crossfuse.cascade.rewrite.passes import Pass
from crossfuse.hardware import Device
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate


def pass_times(passes: Sequence[Pass], device: Device, rates: Rates) -> list[dict[str, float]]:
    """Microseconds of each pass by memory and by tensor cores, as if there were no other.

    Reductions and outputs reach the measured rate of memory, as two-pass kernels of torch.compile
    do (cross entropy 684 us of 671, moments of inertia 682 of 686); products what cuBLAS was fitted
    to (`Fitted.eager`, `eager_tensor`).
    """
    found = []
    measured, fitted = rates.measured, rates.fitted
    peak = fitted.eager_tensor * float(rates.tensor_rate(128, 256, 2)) * device.sms
    for each in passes:
        reached = fitted.eager if each.flops else 1.0
        memory = each.read / measured.hbm_read + each.written / measured.hbm_write
        found.append({"hbm": memory / reached, "tensor": each.flops / peak})
    return found


def eager_estimate(passes: Sequence[Pass], device: Device, rates: Rates) -> Estimate:
    """Estimate separate kernels in a CUDA graph."""
    terms = {"hbm": 0.0, "tensor": 0.0}
    busy = dict(terms)
    for each in pass_times(passes, device, rates):
        terms["hbm"] += each["hbm"]
        terms["tensor"] += max(0.0, each["tensor"] - each["hbm"])
        for name in busy:
            busy[name] += each[name]
    terms["kernels"] = len(passes) * rates.fitted.eager_kernel
    return Estimate({name: time for name, time in terms.items() if time}, busy)
