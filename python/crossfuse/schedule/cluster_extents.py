"""Checks on which all cluster-bound loops of a function must agree: axes, extents, nesting."""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse.blocks.scheduled import ClusterLoop, cluster_loops, function
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import AXES, MAX_CLUSTER, cluster_axis


def check_axis(rule: str, where: str, axis: Any) -> None:
    """Refuse an axis that a cluster does not have."""
    if axis not in AXES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"axis {axis!r}",
            limit="'x', 'y' or 'z'",
            instead="name one of the three cluster axes",
        )


def check_extent(rule: str, where: str, extent: int) -> None:
    """Refuse an extent that no cluster has."""
    if not 1 <= extent <= MAX_CLUSTER:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {extent}",
            limit=f"1 to {MAX_CLUSTER} CTAs in a cluster",
            instead="split the loop so that one part has at most that extent, and pass that part",
        )


def check_agreement(sch: Any, rule: str, where: str, loop: Any, axis: str, extent: int) -> None:
    """Refuse an extent that contradicts other cluster-bound loops, one by one or as a cluster."""
    known = {other.axis: other for other in cluster_loops(function(sch, loop))}
    check_same(rule, where, known, ClusterLoop(axis, "", extent))
    check_cluster(rule, where, known)


def check_same(rule: str, where: str, known: dict[str, ClusterLoop], loop: ClusterLoop) -> None:
    """Refuse a loop of another extent than the known one on its axis; a first one becomes known."""
    other = known.setdefault(loop.axis, loop)
    if other.extent != loop.extent:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {loop.extent} on axis {loop.axis}",
            limit=f"extent {other.extent}, as loop '{other.name}' has on that axis",
            instead="split both loops by the same number of CTAs",
        )


def check_cluster(rule: str, where: str, known: dict[str, ClusterLoop]) -> None:
    """Refuse a cluster, given by a loop for each axis, that is too large."""
    size = prod(each.extent for each in known.values())
    if size > MAX_CLUSTER:
        shape = " x ".join(f"{name}={known[name].extent}" for name in AXES if name in known)
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"a cluster of {size} CTAs ({shape})",
            limit=f"{MAX_CLUSTER} CTAs over all axes",
            instead="bind a smaller loop on one of the axes",
        )


def check_not_within(rule: str, where: str, nest: list[Any], axis: str) -> None:
    """Refuse a nest in which a ``For`` is bound to `axis` already."""
    for loop in nest:
        if cluster_axis(loop) == axis:
            raise refuse(
                ScheduleRefused,
                rule,
                where,
                found=f"loop '{loop.loop_var.name}' of the same nest bound to axis {axis} too",
                limit="one loop a nest on each cluster axis",
                instead="bind the second loop to another axis, or fuse the two loops and bind that",
            )
