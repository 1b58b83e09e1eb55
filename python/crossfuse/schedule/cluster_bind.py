"""`cluster_bind`: the iterations of a parallel loop become the CTAs of a thread-block cluster."""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.schedule.facts import cluster_loops, constant_extent, function, name_of, reason
from crossfuse.schedule.markers import AXES, CLUSTER_AXIS, MAX_CLUSTER, cluster_axis, thread_tag

RULE = "cluster_bind"


def cluster_bind(sch: Any, loop: Any, axis: str = "x") -> None:
    """Bind a parallel loop to the CTAs of a thread-block cluster.

    Before, with ``c`` a parallel loop of extent 4 inside the grid loop ``i``::

        for i in thread_binding(8, "blockIdx.x"):
            for c in range(4):
                body(i, c)

    After ``sch.cluster_bind(c)``: 8 clusters of 4 CTAs, launched as 32 CTAs along x; iteration c
    of the loop runs in the CTA whose rank in its cluster is c::

        for i in thread_binding(8, "blockIdx.x"):
            for c in parallel(4):            # crossfuse.cluster_axis = "x"
                body(i, c)                   # CTA c of cluster i

    Several loops may be bound to one axis, one after the other: the same CTAs run them in turn.
    Recorded as ``parallel`` and ``annotate``, so a trace replays it in stock TVM.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.cluster_bind(loop, axis)``.
    loop : LoopRV
        A data-parallel loop of constant extent, 1 to 16.
    axis : str
        Cluster axis, "x", "y" or "z". Ranks count x fastest, as the hardware does.

    Raises
    ------
    ScheduleRefused
        If the extent is not 1 to 16 or differs from another loop on the axis, if the cluster
        would exceed 16 CTAs, if the loop is not parallel, is bound already, or lies inside
        another loop of the axis.

    Notes
    -----
    At most 16 CTAs share a cluster on sm_90; more than 8 need the non-portable launch attribute,
    which the launcher sets (CUDA C++ Programming Guide, thread block clusters).
    """
    where = name_of(sch, loop)
    _check_axis(where, axis)
    extent = constant_extent(sch, RULE, loop)
    _check_extent(where, extent)
    _check_unbound(sch, loop, where)
    _check_agreement(sch, where, axis, extent)
    _check_nesting(sch, loop, where, axis)
    try:
        sch.parallel(loop)
    except ir.ScheduleError as error:
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=reason(error),
            limit="a data-parallel loop",
            instead="bind a loop over output elements; for a reduction loop call dsm_reduce, "
            "which makes one partial result a CTA and combines them",
        ) from error
    sch.annotate(loop, CLUSTER_AXIS, axis)


def _check_axis(where: str, axis: str) -> None:
    if axis not in AXES:
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"axis {axis!r}",
            limit="'x', 'y' or 'z'",
            instead="name one of the three cluster axes",
        )


def _check_extent(where: str, extent: int) -> None:
    if not 1 <= extent <= MAX_CLUSTER:
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"extent {extent}",
            limit=f"1 to {MAX_CLUSTER} CTAs in a cluster",
            instead=f"split the loop so that the part to bind has extent at most {MAX_CLUSTER}",
        )


def _check_unbound(sch: Any, loop: Any, where: str) -> None:
    node = sch.get(loop)
    bound = thread_tag(node) or (f"cluster axis {cluster_axis(node)}" if cluster_axis(node) else "")
    if bound or int(node.kind) != int(ir.ForKind.SERIAL):
        kind = bound or ir.ForKind(int(node.kind)).name.lower()
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"a loop that is already {kind if not bound else f'bound to {bound}'}",
            limit="a serial loop",
            instead="split the loop and bind one of the parts",
        )


def _check_agreement(sch: Any, where: str, axis: str, extent: int) -> None:
    extents: dict[str, int] = {}
    for other in cluster_loops(function(sch)):
        extents[other.axis] = other.extent
        if other.axis == axis and other.extent != extent:
            raise refuse(
                ScheduleRefused,
                RULE,
                where,
                found=f"extent {extent} on axis {axis}",
                limit=f"extent {other.extent}, as loop '{other.name}' has on that axis",
                instead="split both loops by the same number of CTAs",
            )
    extents[axis] = extent
    if prod(extents.values()) > MAX_CLUSTER:
        shape = " x ".join(f"{name}={extents[name]}" for name in AXES if name in extents)
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"a cluster of {prod(extents.values())} CTAs ({shape})",
            limit=f"{MAX_CLUSTER} CTAs over all axes",
            instead="bind a smaller loop on one of the axes",
        )


def _check_nesting(sch: Any, loop: Any, where: str, axis: str) -> None:
    node = sch.get(loop)
    clash: list[str] = []

    def visit(outer: Any) -> None:
        if outer.same_as(node) or cluster_axis(outer) == axis:
            inner: list[Any] = []
            ir.walk(outer.body, (ir.For, inner.append))
            for each in inner:
                if outer.same_as(node) and cluster_axis(each) == axis:
                    clash.append(str(each.loop_var.name))
                if not outer.same_as(node) and each.same_as(node):
                    clash.append(str(outer.loop_var.name))

    ir.walk(function(sch).body, (ir.For, visit))
    if clash:
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"loop '{clash[0]}' of the same nest bound to axis {axis} too",
            limit="one loop a nest on each cluster axis",
            instead="bind the second loop to another axis, or fuse the two loops and bind that",
        )
