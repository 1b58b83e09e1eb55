"""Reasons not to analyse a candidate, each of which leaves a best one in.

```
idle loop     a dim is walked in one step. The schedule with this dim spatial moves no more on any
              level and holds no more, so that the candidate is left out if that one is there.
least bytes   what the inputs must move at least, over the bandwidths, is more than the time of the
              best few so far.
```

The third one is in `crossfuse.planner.space.tiles`: extents that another one makes needless are
left out before anything is combined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.dataflow.counts import Count, ceil_div
from crossfuse.planner.dataflow.schedules import LoopSchedule
from crossfuse.planner.dataflow.tiling import Tiling
from crossfuse.planner.dataflow.volume import Nest, elements_moved, nests
from crossfuse.planner.space.groups import Group, candidates_of
from crossfuse.planner.space.roof import Roof


@dataclass(frozen=True)
class Bound:
    """A reason to leave candidates out.

    Attributes
    ----------
    name : str
        To count by.
    least : Callable
        Of (Group, Tiling) to an array of numbers that the score is nowhere below; infinite for
        candidates that another one stands for.
    """

    name: str
    least: Callable[[Group, Tiling], np.ndarray]


def least_bytes(chain: Chain, roof: Roof) -> Bound:
    """Bound the time by what inputs move when every tile stays as long as it is needed.

    Then only copies side by side count: a cluster reads each input once, a CTA gets each once.
    """
    compulsory = sum(
        -(-chain.elements(each.name) * each.item // each.repeats)
        for each in chain.tensors
        if each.role != "intermediate"
    )
    hbm = compulsory / roof.bandwidths["hbm"] if "hbm" in roof.bandwidths else 0.0
    units = {"l2": "cluster", "shared": "cta"}

    def least(group: Group, tiling: Tiling) -> np.ndarray:
        made = nests(chain, group.schedule, tiling, group.residency)
        found: Count = np.full(candidates_of(tiling), hbm)
        for level, unit in units.items():
            if level in roof.bandwidths:
                moved = _inputs(chain, made[unit]) / roof.bandwidths[level]
                found = np.maximum(found, moved)
        return np.asarray(found)

    return Bound("least bytes", least)


def idle_loops(chain: Chain, groups: Sequence[Group]) -> Bound:
    """Leave out candidates that walk a dim in one step, if they are there with the dim spatial.

    What has room in a schedule has room in the one with the dim spatial too, as nothing is held for
    longer there, so that a group of the family with that schedule has the same candidate.
    """
    present = {(each.family, each.schedule) for each in groups}

    def least(group: Group, tiling: Tiling) -> np.ndarray:
        idle: np.ndarray = np.zeros(candidates_of(tiling), dtype=bool)
        for dim in group.schedule.order:
            if (group.family, spatial_twin(group.schedule, dim, chain)) in present:
                wide = tiling.block[dim] * tiling.cluster.get(dim, 1)
                idle = idle | np.asarray(ceil_div(chain.extents[dim], wide) == 1)
        return np.where(idle, np.inf, -np.inf)

    return Bound("idle loop", least)


def spatial_twin(schedule: LoopSchedule, dim: str, chain: Chain) -> LoopSchedule:
    """The schedule with a dim spatial that this one walks."""
    spatial = {*schedule.spatial, dim}
    return LoopSchedule(
        tuple(each for each in chain.extents if each in spatial),
        tuple(each for each in schedule.order if each != dim),
    )


def _inputs(chain: Chain, made: tuple[Nest, ...]) -> Count:
    total: Count = 0
    for nest, product in zip(made, chain.products, strict=True):
        for name in (product.left, *product.rights):
            tensor = chain.tensor(name)
            if tensor.role == "input":
                # Held from the outermost loop on, so that nothing comes twice to one unit.
                total = total + elements_moved(nest, tensor.dims, 0) * tensor.item
    return total
