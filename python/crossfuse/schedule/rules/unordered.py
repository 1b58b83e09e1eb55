"""Sums of parts in the order in which they come: where there are any to add so."""

from __future__ import annotations

from typing import Any

from crossfuse.blocks.chain import Chain
from crossfuse.blocks.scheduled import name_of
from crossfuse.errors import ScheduleRefused, refuse


def check_unordered(sch: Any, chain: Chain, parts: int, summing: int) -> None:
    """Refuse to add parts in no order where L2 adds none.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule, for messages.
    chain : Chain
        What is divided.
    parts : int
        Parts of the second reduction.
    summing : int
        CTAs that sum them through DSM; 1 if their sums pass through L2.

    Raises
    ------
    ScheduleRefused
        If there is one part, or a cluster sums them.
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
