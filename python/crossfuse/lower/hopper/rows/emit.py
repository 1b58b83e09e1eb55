"""The warps that make rows of the left operand, while others load and multiply."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.coordinates import Coordinates
from crossfuse.lower.hopper.plan.kernel import KernelPlan
from crossfuse.lower.hopper.rows.program import RowProgram
from crossfuse.lower.hopper.statements import Variable, let, run, when
from crossfuse.lower.hopper.sync.flags import Flags, FlagWriter
from crossfuse.lower.hopper.timeline import ROWS_BEGUN, ROWS_MADE

#: Warps of the loading warpgroup that make rows, and the first of them: those before it load.
ROW_WARPS, FIRST_WARP = 2, 2
#: Bytes of a line of the cache, and of a tensor that are asked for ahead at most.
_LINE, _MOST = 128, 32 << 10
_FETCH_LINE = """\
__device__ __forceinline__ void crossfuse_fetch_line(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(place) : "memory");
}
"""
# nvcc may make loads of constants from plain ones, and move them in front of a wait; but not in
# front of what their address comes from, and volatile statements keep their order.
_PINNED = """\
__device__ __forceinline__ int crossfuse_pinned(int place) {
  asm volatile("" : "+r"(place) : : "memory");
  return place;
}
"""


def fetch_rows(plan: KernelPlan, where: Coordinates) -> None:
    """Ask for what the first rows of this CTA need, before weights are: these would come first.

    Parameters
    ----------
    plan : KernelPlan
        The kernel.
    where : Coordinates
        Of the thread.
    """
    rows = plan.rows
    if rows is None or rows.chunks is not None:
        return
    if plan.head is not None:
        with when(where.warpgroup > plan.consumers):
            for number in range(plan.head.at_once):
                row = let("row_ahead", first_row(plan, where, rows, number))
                with when(row < rows.rows):
                    for each in rows.read if number == 0 else rows.matrices:
                        _fetch(each, row, where.thread, rows.threads)
        return
    row = let("row_ahead", first_row(plan, where, rows))
    makes = [where.warpgroup == 0, where.thread >= FIRST_WARP * WARP]
    if rows.by_warpgroups:
        makes = [where.warpgroup > 0]
    with when(ir.conjunction([*makes, row < rows.rows])):
        for each in rows.read:
            _fetch(each, rows.given(row), where.thread % rows.threads, rows.threads)


def _fetch(buffer: Any, row: Any, lane: Any, threads: int) -> None:
    """Ask for a row of a matrix, or for a vector: each thread for lines of its own."""
    *matrix, length = (int(extent) for extent in buffer.ty.shape)
    elements = max(1, _LINE * 8 // ir.tvm.DataType(str(buffer.ty.dtype)).bits)
    lines = -(-min(length, _MOST // _LINE * elements) // elements)
    for first in range(0, lines, threads):
        line = lane + first
        place = buffer.ptr_to([*([row] if matrix else []), line * elements])
        with when(line < lines) if first + threads > lines else nullcontext():
            run(ir.cuda_func_call("crossfuse_fetch_line", place, source_code=_FETCH_LINE))


def first_row(plan: KernelPlan, where: Coordinates, rows: RowProgram, number: Any = None) -> Any:
    """The first row of a warp or a warpgroup: those of all CTAs are under way together.

    With a `number`, that of those that a warpgroup makes side by side.
    """
    cta = where.cluster * plan.cluster_size + where.rank
    if number is None:
        number = where.warpgroup - 1 if rows.by_warpgroups else where.warp - FIRST_WARP
    return number * (plan.clusters * plan.cluster_size) + cta


def after_kernel_before(plan: KernelPlan, **places: Any) -> tuple[Any, ...]:
    """Wait for the kernel before, if this one starts early: what loads come from, known then."""
    if not plan.early:
        return tuple(places.values())
    run(ir.script.ptx.griddepcontrol.wait())
    return tuple(let(name, _pinned(each)) for name, each in places.items())


def emit_rows(body: Body, rows: RowProgram, flags: Flags) -> None:
    """Write the warps that make rows.

    Row r is that of warp ``r // ctas`` of CTA ``r % ctas``, so that the first rows of all CTAs are
    under way together. A warp counts each row at the flag of its tile; rows of the last tile that
    the matrix does not have are counted too.

    Parameters
    ----------
    body : Body
        Of the kernel.
    rows : RowProgram
        What to make.
    flags : Flags
        Of the tiles that a product loads.
    """
    where, ctas = body.where, body.plan.clusters * body.plan.cluster_size
    first, lane = after_kernel_before(
        body.plan, row_then=first_row(body.plan, where, rows), lane_then=where.lane
    )
    body.timeline.stamp_rows(ROWS_BEGUN)
    row = Variable("row", "int32", first)
    writer = FlagWriter(body.placed(flags))
    with ir.script.While(row.value < flags.down * flags.rows):
        with when(row.value < rows.rows):
            ir.script.add_to_parent(rows.of(let("own_row", row.value), let("lane", lane)))
        # All lanes have stored their elements.
        run(ir.script.cuda.warp_sync())
        with when(where.lane == 0):
            writer.raise_flag(ir.script.min(row.value, rows.rows - 1), 0)
        row.set(row.value + ROW_WARPS * ctas)
    body.timeline.stamp_rows(ROWS_MADE)


def _pinned(place: Any) -> Any:
    return ir.cuda_func_call("crossfuse_pinned", place, source_code=_PINNED, return_type="int32")
