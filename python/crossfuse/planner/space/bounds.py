"""Reasons not to analyse a candidate, each of which leaves a best one in.

```
idle loop     a dim is walked in one step. The schedule with this dim spatial moves no more on any
              level and holds no more, so that the candidate is left out if that one is there.
least bytes   what goes through L2 and into shared memory, or what memory must move at least, over
              the bandwidths, is more than the time of the best few so far.
```

The third one is in `crossfuse.planner.space.tiles`: extents that another one makes needless are
left out before anything is combined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.counts import ceil_div
from crossfuse.planner.dataflow.movement import Machine, arrivals, through_l2
from crossfuse.planner.dataflow.schedules import LoopSchedule
from crossfuse.planner.dataflow.tiling import Tiling
from crossfuse.planner.dataflow.volume import nests
from crossfuse.planner.space.groups import Group, candidates_of
from crossfuse.planner.space.roof import Roof

#: Keeps nothing, which does not matter to what goes through L2 and into shared memory.
_ANY = Machine(0)


@dataclass(frozen=True)
class Bound:
    """A reason to leave candidates out.

    Attributes
    ----------
    name : str
        To count by.
    stages : tuple[Callable, ...]
        Of (Group, Tiling) to an array of numbers that the score is nowhere below; infinite for
        candidates that another one stands for. Each is asked of what those before it left in.
    """

    name: str
    stages: tuple[Callable[[Group, Tiling], np.ndarray], ...]

    def least(self, group: Group, tiling: Tiling) -> np.ndarray:
        """What all stages say of the same candidates."""
        return np.maximum.reduce([each(group, tiling) for each in self.stages])


def least_bytes(chain: Chain, roof: Roof) -> Bound:
    """Bound the time by what each level moves at least.

    From memory every input and the output come once. What goes through L2 and into shared memory is
    what `movement` says; it costs a part of it to know. A machine that spills, or that has to read
    partial sums back, moves more.
    """
    compulsory = sum(
        -(-chain.elements(each.name) * each.item // each.repeats)
        for each in chain.tensors
        if each.role != "intermediate"
    )
    hbm = compulsory / roof.bandwidths["hbm"] if "hbm" in roof.bandwidths else 0.0

    def memory(group: Group, tiling: Tiling) -> np.ndarray:
        return np.full(candidates_of(tiling), hbm)

    def l2(group: Group, tiling: Tiling) -> np.ndarray:
        made = nests(chain, group.schedule, tiling, group.residency)["cluster"]
        moved = through_l2(chain, made, group.residency, _ANY)
        return np.asarray(sum(moved.values()) / roof.bandwidths["l2"])

    def shared(group: Group, tiling: Tiling) -> np.ndarray:
        made = nests(chain, group.schedule, tiling, group.residency)["cta"]
        moved = arrivals(chain, made, group.residency, tiling.cluster)
        return np.asarray(sum(moved.values()) / roof.bandwidths["shared"])

    levels = {"l2": l2, "shared": shared}
    known = tuple(each for level, each in levels.items() if level in roof.bandwidths)
    return Bound("least bytes", (memory, *known))


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

    return Bound("idle loop", (least,))


def spatial_twin(schedule: LoopSchedule, dim: str, chain: Chain) -> LoopSchedule:
    """The schedule with a dim spatial that this one walks."""
    spatial = {*schedule.spatial, dim}
    return LoopSchedule(
        tuple(each for each in chain.extents if each in spatial),
        tuple(each for each in schedule.order if each != dim),
    )
