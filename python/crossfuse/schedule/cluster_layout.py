"""`cluster_layout`: what a schedule keeps in which CTA of a cluster, as values and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.schedule.cluster_picture import draw
from crossfuse.schedule.compaction import compacted
from crossfuse.schedule.facts import ClusterLoop, cluster_loops, function
from crossfuse.schedule.markers import AXES, DSM_REDUCE, DSM_SCOPE, DSM_SHUFFLE
from crossfuse.schedule.slabs import SlabUse, slab_axis, slab_uses


@dataclass(frozen=True)
class Slabs:
    """A buffer of which each CTA along a cluster axis holds one slab.

    Attributes
    ----------
    name : str
        Of the buffer.
    dtype : str
        Of its elements.
    axis : str
        Cluster axis; "" if no cluster-bound loop fills the slabs.
    count : int
        Slabs.
    shape : tuple[int, ...]
        Of one slab, as it is allocated in a CTA's shared memory.
    size : int
        Bytes of one slab.
    writers, readers : tuple[str, ...]
        Names of the blocks that fill the slabs and of those that take from them.
    exchange : str
        "scatter" or "all-exchange" of `dsm_reduce`, "ring" or "all-gather" of `dsm_shuffle`, ""
        if the readers say nothing.
    """

    name: str
    dtype: str
    axis: str
    count: int
    shape: tuple[int, ...]
    size: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    exchange: str


@dataclass(frozen=True)
class ClusterLayout:
    """Clusters of a scheduled function.

    Attributes
    ----------
    axes : tuple[tuple[str, int], ...]
        Cluster axes in use with their extents, x first; empty without clusters.
    loops : tuple[ClusterLoop, ...]
        The loops bound to them, in program order.
    buffers : tuple[Slabs, ...]
        Buffers that are spread over CTAs, in program order.
    """

    axes: tuple[tuple[str, int], ...]
    loops: tuple[ClusterLoop, ...]
    buffers: tuple[Slabs, ...]

    @property
    def size(self) -> int:
        """CTAs in a cluster; 1 without clusters."""
        return prod(extent for _, extent in self.axes)

    def picture(self) -> str:
        """Draw in text who holds what and which way it passes, at most 80 columns wide.

        Returns
        -------
        str
            A row of boxes for each buffer, one box a CTA; of many CTAs the middle is left out.
        """
        return draw(self)


def cluster_layout(sch: Any) -> ClusterLayout:
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
    >>> print(sch.cluster_layout().picture())                            # doctest: +SKIP
    cluster of 2 CTAs (x=2)
    ...
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
