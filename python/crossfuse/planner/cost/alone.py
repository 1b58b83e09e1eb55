"""The streams of a kernel one by one, as if there were no other."""

from __future__ import annotations

from functools import reduce

from crossfuse.hardware import Device
from crossfuse.planner.cost.loop import Load, memory_speed, streams
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.counts import Share, least, most
from crossfuse.planner.kernels.every import Kernel
from crossfuse.planner.kernels.resident import resident
from crossfuse.planner.kernels.shape import Shape


def alone(kernel: Kernel, shape: Shape, device: Device, rates: Rates) -> dict[str, Share]:
    """Microseconds that each stream of the loops would take if there were no other.

    Unlike `crossfuse.planner.cost.estimate.Estimate.busy`, with what is loaded while the
    intermediate passes.
    """
    clusters = reduce(most, kernel.clusters(shape, device))
    active = least(clusters, resident(device, kernel.cluster))
    found: dict[str, Share] = dict.fromkeys(("hbm", "l2", "ingest", "tensor"), 0.0)
    for phase, fresh in zip(kernel.phases(shape), shape.weight_bytes, strict=False):
        load = Load(kernel.cluster, active, fresh)
        each = streams(phase, load, shape.item, rates, device.sms)
        for name in found:
            found[name] = found[name] + getattr(each, name)
    found["hbm"] = found["hbm"] + shape.further / memory_speed(rates)
    return found
