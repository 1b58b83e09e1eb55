"""Rule for a product whose reduction is split over GPUs, each of which gets all of the result."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import function
from crossfuse.calls import AnyFunction, checked
from crossfuse.schedule.install import install
from crossfuse.schedule.rules.split_k import multiply
from crossfuse.schedule.rules.tiles import Tiles, choose_tiles, largest_divisor

#: Threads of a CTA that adds parts, and elements of each: 16 bytes of float32 are loaded at a time.
_ADDERS, _VECTOR = 128, 4
#: Bytes of a float32, which stages hold at most.
_WIDE = 4


@checked
def schedule_row_parallel(func: AnyFunction, *, tiles: Tiles | None = None) -> Any:
    """Schedule a row-parallel product: a kernel of partial products, then one that adds them.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        What `crossfuse.workload.row_parallel` makes.
    tiles : Tiles | None
        Tile sizes of the product; what is left out is chosen.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If a size does not fit.

    Examples
    --------
    >>> from crossfuse.workload import row_parallel
    >>> sch = schedule_row_parallel(row_parallel(m=16, k=128, n=64, ranks=2))
    >>> [each.scope() for each in sch.get(sch.get_sblock("root")).alloc_buffers][:2]
    ['local', 'global.peer']
    """
    install()
    sch = ir.Schedule(func)
    product, result = sch.get_sblock("product"), sch.get_sblock("out")
    *_, ranks, _ = sch.get_loops(product)
    partial = sch.rank_reduce(product, ranks)
    _, _, depth = (int(each) for each in function(sch).params[0].ty.shape)
    rows, columns = (int(each) for each in function(sch).params[2].ty.shape)
    chosen = choose_tiles(
        tiles or Tiles(),
        rows=rows,
        widths=(largest_divisor(columns, 64),),
        depth=depth,
        shared_bytes=lambda each: (each.rows + each.width) * each.depth * _WIDE,
    )
    _multiply(sch, partial, chosen)
    _add(sch, product, result, columns)
    return sch


def _multiply(sch: Any, partial: Any, tiles: Tiles) -> None:
    """Schedule the products of each GPU, tile by tile."""
    ranks, i, j, k = sch.get_loops(partial)
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, column = sch.split(j, [None, tiles.width])
    sch.reorder(ranks, row_tile, column_tile, k, row, column)
    sch.bind(row_tile, "blockIdx.y")
    sch.bind(column_tile, "blockIdx.x")
    multiply(sch, partial, row, column, k, tiles)


def _add(sch: Any, product: Any, result: Any, columns: int) -> None:
    """Schedule the sums of all GPUs' products, which every GPU makes."""
    vector = largest_divisor(columns, _VECTOR)
    row, column = sch.get_loops(result)
    factors = [None, largest_divisor(columns // vector, _ADDERS), vector]
    cta, thread, element = sch.split(column, factors)
    sch.bind(row, "blockIdx.y")
    sch.bind(cta, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(element)
    sch.set_scope(product, 0, "local")
    sch.compute_at(product, thread, preserve_unit_loops=True)
    *_, ranks, _, element = sch.get_loops(product)
    sch.vectorize(element)
    sch.decompose_reduction(product, ranks)
