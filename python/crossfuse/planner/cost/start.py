"""From the launch of a kernel to its first tiles or rows, for kernels of every kind."""

from __future__ import annotations

import numpy as np

from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.counts import Count, Share

#: Microseconds of a start beyond the latency of memory, and for each time that there are twice as
#: many CTAs, of kernels that load rows: fitted to streams on H100s and H200s.
OF_ROWS = (0.68, 0.0623)


def start_time(
    rates: Rates, cluster: Count, ctas: Count, own: tuple[float, float] | None = None
) -> Share:
    """Microseconds until what is asked for first is there.

    Parameters
    ----------
    rates : Rates
        Of the device.
    cluster : Count
        CTAs of a cluster, which meet.
    ctas : Count
        That begin at the same time.
    own : tuple[float, float] | None
        Microseconds beyond the latency of memory, and for each time that there are twice as many
        CTAs; None takes those that were fitted to kernels with rings of tiles.
    """
    fitted, measured = rates.fitted, rates.measured
    late, crowd = own or (fitted.start, fitted.crowd)
    latency = measured.early_launch + measured.hbm
    together = latency + at(measured.cluster_barrier, cluster)
    return late + together + crowd * np.log2(ctas)
