"""Clusters that run at the same time."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.counts import Count


def resident(device: Device, size: Count) -> Count:
    """Clusters of a size that find room at once, one CTA an SM.

    Parameters
    ----------
    device : Device
        What was counted there, see `Device.resident_clusters`.
    size : Count
        CTAs of a cluster, up to 16; 1 cluster is assumed of more.
    """
    table = _table(device)
    if isinstance(size, np.ndarray):
        return table[np.minimum(size, len(table) - 1).astype(np.int64)]
    return int(table[min(int(size), len(table) - 1)])


@lru_cache(maxsize=8)
def _table(device: Device) -> np.ndarray:
    sizes = range(1, device.max_cluster + 1)
    return np.array([device.sms, *map(device.resident_clusters, sizes), 1], np.float64)
