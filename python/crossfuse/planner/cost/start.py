"""From the launch of a kernel to its first tiles: the same for kernels of every kind."""

from __future__ import annotations

import numpy as np

from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.dataflow.counts import Count, Share


def start_time(rates: Rates, cluster: Count, ctas: Count) -> Share:
    """Microseconds until what is asked for first is there.

    Parameters
    ----------
    rates : Rates
        Of the device.
    cluster : Count
        CTAs of a cluster, which meet.
    ctas : Count
        That begin at the same time.
    """
    fitted, measured = rates.fitted, rates.measured
    latency = measured.early_launch + measured.hbm
    together = latency + at(measured.cluster_barrier, cluster)
    return fitted.start + together + fitted.crowd * np.log2(ctas)
