"""Shared memory of a CTA: as many stages as fit beside what else it keeps.

The arithmetic of `crossfuse.lower.hopper.kernel_memory`, over arrays. Tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from crossfuse.hardware import Device
from crossfuse.planner.dataflow.counts import Count, Flag, ceil_div, choose, least, most
from crossfuse.planner.kernels.phase import Phase

#: Stages at most, and stages of left tiles that cover the latency of L2.
MAX_STAGES, LEFT_STAGES = 12, 4
_ALIGNMENT = 1024


@dataclass(frozen=True)
class Memory:
    """Shared memory of a kernel's CTA.

    Attributes
    ----------
    left, right : Count
        Stages of left and of right tiles.
    size : Count
        Bytes in all.
    fits : Flag
        Whether two stages fit.
    """

    left: Count
    right: Count
    size: Count
    fits: Flag


@dataclass(frozen=True)
class _Needs:
    """What a CTA keeps whatever the stages, and the bytes of a stage."""

    left: Count
    right: Count
    before: Count
    received: Count
    spread: Flag
    summed: Flag
    held: Count

    def size(self, left: Count, right: Count) -> Count:
        """Bytes with so many stages."""
        tiles = right * self.right
        room = most(tiles, self.received - choose(self._over(right), left * self.left, 0))
        end = self.before + left * self.left + room
        end = end + choose(self.received > 0, 16, 0) + choose(self.summed, 8, 0)
        return end + 16 * (left + right)

    def _over(self, right: Count) -> Flag:
        """Whether what is received takes the place of left tiles too."""
        return self.spread & (self.received > right * self.right)


def memory(phases: Sequence[Phase], device: Device, *, summed: Flag = False) -> Memory:
    """Divide shared memory among the rings of a kernel.

    Parameters
    ----------
    phases : Sequence[Phase]
        Of one kernel.
    device : Device
        Its shared memory.
    summed : Flag
        Whether CTAs add partial tiles at the end.

    Returns
    -------
    Memory
        As many right stages as fit with four left ones (L2 is near, HBM is not), then as many left
        ones as fit beside them.
    """
    needs = _needs(phases, summed)
    limit = device.max_shared_bytes
    right: Count = 0
    for stages in range(2, MAX_STAGES + 1):
        fewest = most(least(LEFT_STAGES, stages), needs.held)
        possible = (needs.size(fewest, stages) <= limit) & (needs.held <= stages)
        right = choose(possible, stages, right)
    left: Count = 0
    for stages in range(2, MAX_STAGES + 1):
        possible = (needs.size(stages, right) <= limit) & (stages <= right)
        left = choose(possible & (stages >= needs.held), stages, left)
    fits = (right >= 2) & (left >= 2)
    return Memory(left, right, needs.size(left, right), fits)


def _needs(phases: Sequence[Phase], summed: Flag) -> _Needs:
    groups = phases[0].warpgroups
    boxes = reduce(most, [each.boxes for each in phases]) * groups
    gathered = reduce(most, [each.gathered for each in phases])
    barriers = choose(gathered > 0, 8 * groups, 0)
    before = ceil_div(boxes + gathered + barriers, _ALIGNMENT) * _ALIGNMENT
    return _Needs(
        reduce(most, [each.left for each in phases]),
        reduce(most, [each.right for each in phases]),
        before,
        reduce(most, [each.received for each in phases]),
        phases[0].blocks > 1,
        summed,
        reduce(most, [each.pages for each in phases]),
    )
