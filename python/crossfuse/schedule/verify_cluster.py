"""`verify_cluster`: checks that the cluster annotations of a schedule are consistent."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import ClusterLoop, cluster_loops, function
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import Rule, ScheduleRefused
from crossfuse.markers import AXES, NAIVE_TAGS, thread_tag
from crossfuse.schedule.exchange import slab_axis, slab_uses
from crossfuse.schedule.primitive import check_axis, check_cluster, check_extent, check_same

RULE = "verify_cluster"

_refused = Rule(ScheduleRefused, RULE)


@checked
def verify_cluster(sch: AnySchedule) -> None:
    """Check the cluster bindings and `shared.dsm` buffers of a schedule, at any time.

    The primitives keep these rules; TVM's own, which may be mixed with them, know nothing of
    clusters. Lowering checks the finished kernel again, and more closely.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.verify_cluster()``. Nothing is recorded.

    Raises
    ------
    ScheduleRefused
        If a loop is bound to ``clusterCtaIdx`` directly, if cluster-bound loops of one axis
        differ in extent or the cluster exceeds 16 CTAs, or if a `shared.dsm` buffer does not
        have one slab for each CTA of an axis.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> outer, c = sch.split(sch.get_loops(sch.get_sblock("gemm0"))[0], [None, 4])
    >>> sch.bind(c, "clusterCtaIdx.x")
    >>> try:
    ...     sch.verify_cluster()
    ... except ScheduleRefused as error:
    ...     print(error.refusal.found)
    a plain bind to clusterCtaIdx.x
    """
    loops: list[Any] = []
    ir.walk(function(sch).body, (ir.For, loops.append))
    for loop in loops:
        _check_tag(loop)
    known = _check_loops(sch)
    for buffer, uses in slab_uses(sch).items():
        _check_slabs(buffer, slab_axis(uses), known)


def _check_tag(loop: Any) -> None:
    tag = thread_tag(loop)
    if tag in NAIVE_TAGS:
        raise _refused(
            f"loop '{loop.loop_var.name}'",
            found=f"a plain bind to {tag}",
            limit="TVM launches too few CTAs for it and gives each the shared tiles of all",
            instead=f'call sch.cluster_bind(loop, axis="{tag[-1]}") in its place',
        )


def _check_loops(sch: Any) -> dict[str, ClusterLoop]:
    """A loop for each cluster axis, of the extent that all loops on it have."""
    known: dict[str, ClusterLoop] = {}
    for loop in cluster_loops(function(sch)):
        where = f"loop '{loop.name}'"
        check_axis(RULE, where, loop.axis)
        check_extent(RULE, where, loop.extent)
        check_same(RULE, where, known, loop)
    check_cluster(RULE, "function", known)
    return known


def _check_slabs(buffer: Any, axis: str | None, known: dict[str, ClusterLoop]) -> None:
    where = f"buffer '{buffer.name}'"
    bound = ", ".join(f"{name}={known[name].extent}" for name in AXES if name in known) or "none"
    count = ir.constant(buffer.ty.shape[0])
    if axis is None:
        raise _refused(
            where,
            found="no cluster-bound loop over its leading dimension where it is written",
            limit=f"one slab for each CTA of a cluster axis (bound: {bound})",
            instead="cluster_bind the loop that fills the slabs, or make the buffer with "
            "dsm_reduce or dsm_shuffle",
        )
    if count != known[axis].extent:
        raise _refused(
            where,
            found=f"{buffer.ty.shape[0]} slabs on axis {axis}",
            limit=f"one slab for each CTA of a cluster axis (bound: {bound})",
            instead="give the buffer a leading dimension of the cluster's extent",
        )
