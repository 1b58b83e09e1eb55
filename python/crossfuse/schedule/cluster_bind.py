"""`cluster_bind`: binds the iterations of a parallel loop to the CTAs of a thread-block cluster."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import constant_extent, name_of
from crossfuse.calls import AnySchedule, checked
from crossfuse.markers import CLUSTER_AXIS
from crossfuse.schedule.primitive import (
    check_agreement,
    check_axis,
    check_extent,
    check_loop,
    check_not_within,
    check_spatial,
    check_unbound,
    refusing,
)

RULE = "cluster_bind"


@checked
def cluster_bind(sch: AnySchedule, loop: Any, axis: str = "x") -> None:
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

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> i, j, k = sch.get_loops(sch.get_sblock("gemm0"))
    >>> outer, c = sch.split(i, [None, 4])
    >>> sch.cluster_bind(c)
    >>> sch.cluster_layout().axes
    (('x', 4),)
    """
    check_loop(sch, RULE, "loop", loop)
    where = name_of(sch, loop)
    check_axis(RULE, where, axis)
    extent = constant_extent(sch, RULE, loop)
    check_extent(RULE, where, extent)
    check_unbound(sch, RULE, where, loop)
    check_spatial(
        sch,
        RULE,
        where,
        loop,
        instead="for a reduction loop call dsm_reduce, which makes one partial result a CTA and "
        "combines them",
    )
    check_agreement(sch, RULE, where, loop, axis, extent)
    _check_nesting(sch, loop, where, axis)
    with refusing(
        RULE,
        where,
        limit="a data-parallel loop",
        instead="bind a loop whose iterations write different elements, and read none of them",
    ):
        sch.parallel(loop)
    sch.annotate(loop, CLUSTER_AXIS, axis)


def _check_nesting(sch: Any, loop: Any, where: str, axis: str) -> None:
    """Refuse a loop with another loop of the axis around it or inside it."""
    nest: list[Any] = []
    ir.walk(sch.get(loop).body, (ir.For, nest.append))
    sref = sch.get_sref(loop).parent
    while sref is not None:
        if isinstance(sref.stmt, ir.For):
            nest.append(sref.stmt)
        sref = sref.parent
    check_not_within(RULE, where, nest, axis)
