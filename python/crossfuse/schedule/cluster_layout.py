"""`cluster_layout`: reads off a schedule which buffers lie in which CTA of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from textwrap import wrap
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import ClusterLoop, cluster_loops, function
from crossfuse.calls import AnySchedule, checked
from crossfuse.markers import AXES, DSM_REDUCE, DSM_SCOPE, DSM_SHUFFLE
from crossfuse.schedule.exchange import SlabUse, compacted, slab_axis, slab_uses

# The layout of buffers in a cluster, as values and as a picture in text.

WIDTH = 80
_ELIDED = "..."
#: Most characters of a shape in a box, so that two boxes and the gap between them fit.
_LONGEST = 24
_MEANING = {
    "scatter": "reduce-scatter: CTA r combines slice r of all {n} slabs",
    "all-exchange": "all-exchange: every CTA combines all {n} slabs",
    "ring": "ring: in step s, CTA r takes slab (r + s) mod {n}",
    "all-gather": "all-gather: every CTA takes all {n} slabs in order",
    "": "taken as its readers say",
}
#: Direction in which elements pass between neighbours. In a ring, CTA r takes from CTA r + 1.
_ARROW = {"ring": " <-- "}
_BOTH_WAYS = " <-> "


@dataclass(frozen=True)
class Slabs:
    """A buffer of which each CTA along a cluster axis holds one slab."""

    name: str
    dtype: str
    #: Cluster axis; "" if no cluster-bound loop fills the slabs.
    axis: str
    #: Number of slabs.
    count: int
    #: Of one slab, as it is allocated in a CTA's shared memory.
    shape: tuple[int, ...]
    #: Bytes of one slab.
    size: int
    #: Names of the blocks that fill the slabs.
    writers: tuple[str, ...]
    #: Names of the blocks that read them.
    readers: tuple[str, ...]
    #: "scatter" or "all-exchange" of `dsm_reduce`, "ring" or "all-gather" of `dsm_shuffle`, "" if
    #: the readers are not annotated.
    exchange: str


@dataclass(frozen=True)
class ClusterLayout:
    """Clusters of a scheduled function; loops and buffers are in program order."""

    #: Cluster axes in use with their extents, x first; empty without clusters.
    axes: tuple[tuple[str, int], ...]
    #: The loops bound to the axes.
    loops: tuple[ClusterLoop, ...]
    #: Buffers that are spread over CTAs.
    buffers: tuple[Slabs, ...]

    @property
    def size(self) -> int:
        """CTAs in a cluster; 1 without clusters."""
        return prod(extent for _, extent in self.axes)

    def picture(self) -> str:
        """Draw in text which CTA holds which slab and how slabs pass, at most 80 columns wide.

        A buffer is a row of boxes, one for each CTA; of many CTAs the middle is left out.
        """
        return _draw(self)


def _draw(layout: ClusterLayout) -> str:
    if not layout.axes:
        return "no clusters"
    extents = " x ".join(f"{axis}={extent}" for axis, extent in layout.axes)
    plural = "" if layout.size == 1 else "s"
    lines = [f"cluster of {layout.size} CTA{plural} ({extents})"]
    for slabs in layout.buffers:
        lines += ["", *_caption(slabs, layout), "", *_row(slabs, len(layout.axes) > 1)]
    return "\n".join(line.rstrip() for line in lines)


def _caption(slabs: Slabs, layout: ClusterLayout) -> list[str]:
    plural = "" if slabs.count == 1 else "s"
    held = f"{slabs.name}: {slabs.count} slab{plural} of {_shape(slabs)} {slabs.dtype}, "
    held += f"{slabs.size} bytes in a CTA"
    if len(layout.axes) > 1:
        held += f", one set along {slabs.axis} for each place on the other axes"
    made = f"made by {_named(slabs.writers)}; taken by {_named(slabs.readers)}"
    return [*_wrapped(held), *_wrapped(made, "  "), *_wrapped(meaning(slabs), "  ")]


def meaning(slabs: Slabs) -> str:
    """An exchange in words."""
    if slabs.count == 1:
        return "one CTA, so nothing is exchanged"
    return _MEANING[slabs.exchange].format(n=slabs.count)


def _row(slabs: Slabs, several_axes: bool) -> list[str]:
    """One box for each CTA, without the middle ones where they do not fit."""
    prefix = f"{slabs.axis}=" if several_axes else "CTA "
    shape = _shape(slabs)
    if len(shape) > _LONGEST:
        shape = f"{slabs.size} bytes"
    inner = max(len(f"slab {slabs.count - 1}"), len(shape), len(f"{prefix}{slabs.count - 1}"))
    shown = _shown(slabs.count, inner + 4)
    arrow = _ARROW.get(slabs.exchange, _BOTH_WAYS)
    titles, rims, names, shapes = [], [], [], []
    for rank in shown:
        if rank is None:
            titles.append(" " * len(_ELIDED))
            rims.append(" " * len(_ELIDED))
            names.append(_ELIDED)
            shapes.append(" " * len(_ELIDED))
        else:
            titles.append(f"{prefix}{rank}".center(inner + 4))
            rims.append("+" + "-" * (inner + 2) + "+")
            names.append(f"| {f'slab {rank}'.center(inner)} |")
            shapes.append(f"| {shape.center(inner)} |")
    gap = " " * len(arrow)
    body = [gap.join(titles), gap.join(rims), arrow.join(names), gap.join(shapes), gap.join(rims)]
    lines = [f"  {line}" for line in body]
    return lines + _return_path(slabs, len(body[0]))


def _return_path(slabs: Slabs, width: int) -> list[str]:
    """The line from the first CTA round to the last, which closes a ring."""
    if slabs.exchange != "ring" or slabs.count < 3:
        return []
    return ["  " + " " * 3 + "|" + "_" * (width - 9) + "^"]


def _shown(count: int, box: int) -> list[int | None]:
    """Ranks to draw; None stands for those left out."""
    room = WIDTH - 2 + len(_BOTH_WAYS)
    fitting = room // (box + len(_BOTH_WAYS))
    if count <= fitting:
        return list(range(count))
    fitting = max(2, (room - len(_ELIDED) - len(_BOTH_WAYS)) // (box + len(_BOTH_WAYS)))
    return [*range(fitting - 1), None, count - 1]


def _shape(slabs: Slabs) -> str:
    return " x ".join(map(str, slabs.shape)) or "1"


def _named(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "no block"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


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
        size=prod(shape) * ir.item_bytes(dtype),
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
