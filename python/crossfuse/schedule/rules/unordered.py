"""Checks sums of parts that are added in the order in which they come."""

from __future__ import annotations

from typing import Any

from crossfuse.blocks.chain import Chain
from crossfuse.blocks.scheduled import name_of
from crossfuse.errors import ScheduleRefused, refuse


def check_unordered(sch: Any, chain: Chain, parts: int, summing: int) -> None:
    """Refuse to add parts in no order where L2 adds none: one part, or parts that a cluster sums.

    `summing` is the number of CTAs that sum the `parts` through DSM; 1 if the sums pass through L2.
    """
    if parts > 1 and summing == 1:
        return
    through = f", which {summing} CTAs of a cluster sum" if summing > 1 else ""
    raise refuse(
        ScheduleRefused,
        "unordered",
        name_of(sch, chain.second),
        found=f"{parts} part{'s' * (parts > 1)} of the reduction{through}",
        limit="at least 2 parts that are summed through L2",
        instead="name tiles with more parts than a cluster sums, or leave unordered out",
    )
