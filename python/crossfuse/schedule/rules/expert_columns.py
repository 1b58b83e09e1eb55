"""How threads multiply one row by weights whose columns lie side by side, [k, n].

A load of 16 bytes has eight columns of one step of the reduction, which are no operand of tensor
cores. One row has so little to multiply that threads do it by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse.planner.families.skinny import VECTOR, SkinnyKernel

#: The loop over steps of the reduction among those of a product: behind CTAs, matrices, lanes that
#: share columns, and those beside them; and once threads are bound.
_APART, _STEP = 4, 3
#: Where a block is put among those of a loop: as far in front as its operands allow.
_FIRST = -2
#: Sums that a thread stores at once.
_STORED = 4


def divide_columns(
    sch: Any, products: Sequence[Any], epilogue: Any, tiles: SkinnyKernel, experts: int
) -> tuple[Any, Any, list[Any]]:
    """Divide products over threads, whose sums are stored in shared memory.

    The loops over CTAs and over warps, and the blocks of what threads sum.
    """
    sums = [_divided(sch, each, tiles, experts) for each in products]
    if len(sums) > 1:
        # What adds up sums of threads follows both: it may not stand between what is merged.
        at = sch.get_loops(epilogue)[0]
        for each in products:
            sch.compute_at(each, at, preserve_unit_loops=True)
        sch.merge(*(sch.get_loops(each)[_APART] for each in sums))
    stored = [sch.cache_write(each, 0, "local") for each in sums]
    grid, matrix, lane, side, *_ = sch.get_loops(sums[0])
    part, lane = sch.split(lane, [None, tiles.lanes])
    sch.reorder(matrix, part, lane, side)
    warp, thread = sch.fuse(matrix, part), sch.fuse(lane, side)
    sch.bind(warp, "threadIdx.y")
    sch.bind(thread, "threadIdx.x")
    for each in stored:
        sch.reverse_compute_at(each, thread, preserve_unit_loops=True)
        sch.set_scope(each, 0, "shared.dyn")
        _, vector = sch.split(sch.get_loops(each)[-1], [None, _STORED])
        sch.vectorize(vector)
    return grid, warp, sums


def multiply_columns(sch: Any, sums: Sequence[Any]) -> None:
    """Load weights and rows step by step, and let threads multiply them."""
    # Each is put in front of those before it: weights in front of rows, of gate in front of up.
    for each in reversed(sums):
        for read in (0, 1):
            loaded = sch.cache_read(each, read, "local", [each])
            step = sch.get_loops(each)[_STEP]
            sch.compute_at(loaded, step, preserve_unit_loops=True, index=_FIRST)
            *_, load, vector = sch.get_loops(loaded)
            sch.vectorize(vector)
            sch.unroll(load)
    for each in sums:
        sch.decompose_reduction(each, sch.get_loops(each)[_STEP])
        for loop in sch.get_loops(each)[_STEP + 1 :]:
            sch.unroll(loop)


def _divided(sch: Any, product: Any, tiles: SkinnyKernel, experts: int) -> Any:
    """Divide a product; the block of what each thread sums."""
    pair, row, j, k = sch.get_loops(product)
    token, expert = sch.split(pair, [None, experts])
    grid, side, column = sch.split(j, [None, tiles.groups, VECTOR])
    parts = int(tiles.warps) // experts
    # Neighbours of the reduction are one thread's, which loads them of its row at once.
    step, part, lane, load = sch.split(k, [None, parts, tiles.lanes, tiles.loads])
    sch.reorder(grid, token, expert, part, lane, side, step, load, row, column)
    sch.fuse(grid, token)
    return sch.rfactor(sch.fuse(part, lane), 0)
