"""`cluster_layout`: reads off a schedule which buffers lie in which CTA of a cluster."""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import cluster_loops, function
from crossfuse.calls import AnySchedule, checked
from crossfuse.markers import AXES, DSM_REDUCE, DSM_SCOPE, DSM_SHUFFLE
from crossfuse.schedule.cluster_picture import ClusterLayout, Slabs
from crossfuse.schedule.compaction import compacted
from crossfuse.schedule.slabs import SlabUse, slab_axis, slab_uses


@checked
def cluster_layout(sch: AnySchedule) -> ClusterLayout:
    """Read the cluster, its loops and the buffers spread over its CTAs off a schedule.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.cluster_layout()``. Nothing is recorded.

    Returns
    -------
    ClusterLayout
        Plain values; ``print(sch.cluster_layout().picture())`` shows them.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> i, j, k = sch.get_loops(sch.get_sblock("gemm0"))
    >>> k0, k1 = sch.split(k, [2, None])
    >>> sch.reorder(k0, i, j, k1)
    >>> partial = sch.dsm_reduce(sch.get_sblock("gemm0"), k0)
    >>> print(sch.cluster_layout().picture().splitlines()[0])
    cluster of 2 CTAs (x=2)
    """
    func = function(sch)
    loops = cluster_loops(func)
    extents = {loop.axis: loop.extent for loop in loops}
    shapes = _allocated(func)
    buffers = tuple(_slabs(each, uses, shapes) for each, uses in slab_uses(sch).items())
    axes = tuple((axis, extents[axis]) for axis in AXES if axis in extents)
    return ClusterLayout(axes, loops, buffers)


def _slabs(buffer: Any, uses: list[SlabUse], shapes: dict[str, tuple[int, ...]]) -> Slabs:
    name, dtype = str(buffer.name), str(buffer.ty.dtype)
    count, *shape = shapes[name]
    return Slabs(
        name=name,
        dtype=dtype,
        axis=slab_axis(uses) or "",
        count=count,
        shape=tuple(shape),
        size=prod(shape) * (int(ir.tvm.DataType(dtype).bits) // 8),
        writers=_names(uses, write=True),
        readers=_names(uses, write=False),
        exchange=_exchange(uses),
    )


def _names(uses: list[SlabUse], *, write: bool) -> tuple[str, ...]:
    return tuple(str(each.block.name_hint) for each in uses if each.write is write)


def _exchange(uses: list[SlabUse]) -> str:
    for use in uses:
        for key in (DSM_REDUCE, DSM_SHUFFLE):
            if not use.write and key in use.block.annotations:
                return str(use.block.annotations[key])
    return ""


def _allocated(func: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of `shared.dsm` buffers as TVM allocates them, the slabs of all CTAs together."""
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(block: Any) -> None:
        for buffer in block.alloc_buffers:
            if buffer.scope() == DSM_SCOPE:
                shapes[str(buffer.name)] = tuple(int(extent) for extent in buffer.ty.shape)

    ir.walk(compacted(func).body, (ir.SBlock, visit))
    return shapes
