"""A stand-in for a cost model: bytes of each level over its bandwidth, and the largest of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crossfuse.planner.dataflow.movement import Movement
from crossfuse.planner.dataflow.tiling import Tiling
from crossfuse.planner.space.groups import Group


@dataclass(frozen=True)
class Roof:
    """Levels overlap entirely, and each runs at its bandwidth (Chimera's objective).

    Attributes
    ----------
    bandwidths : Mapping[str, float]
        Bytes in a microsecond of all multiprocessors together, by level of
        `crossfuse.planner.dataflow.movement.MEMORIES`; levels that are absent cost nothing.
    """

    bandwidths: Mapping[str, float]

    def score(self, moved: Movement, group: Group, tiling: Tiling) -> np.ndarray:
        """Microseconds of each candidate, for `crossfuse.planner.space.search.search`."""
        times = [moved.total(level) / width for level, width in self.bandwidths.items()]
        return np.maximum.reduce([np.asarray(each) for each in np.broadcast_arrays(*times)])
