"""Rule for a product whose reduction is split over GPUs, each of which gets all of the result."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import function
from crossfuse.calls import AnyFunction, ClusterSize, checked
from crossfuse.schedule.rules.split_k import choose_split_tiles, multiply
from crossfuse.schedule.rules.tiles import Tiles, bind_threads, largest_divisor

#: Threads of a CTA that adds parts, and elements of each: 16 bytes of float32 are loaded at a time.
_ADDERS, _VECTOR = 128, 4
#: Elements of the reduction that a stage has at least, and of partial results that keep 132
#: multiprocessors busy: two tiles of 1024 for each of them.
_STAGE, _ENOUGH = 16, 264 << 10


@checked
def schedule_row_parallel(
    func: AnyFunction, *, cluster: ClusterSize | None = None, tiles: Tiles | None = None
) -> Any:
    """Schedule a row-parallel product: a kernel of partial products, then one that adds them.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        What `crossfuse.workload.row_parallel` makes.
    cluster : int | None
        CTAs over which each GPU splits its part of the reduction again, see `schedule_split_k`. By
        default as many as give a GPU of 132 multiprocessors enough to do.
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
    sch = ir.Schedule(func)
    product, result = sch.get_sblock("product"), sch.get_sblock("out")
    *_, ranks, _ = sch.get_loops(product)
    partial = sch.rank_reduce(product, ranks)
    _, _, depth = (int(each) for each in function(sch).params[0].ty.shape)
    rows, columns = (int(each) for each in function(sch).params[2].ty.shape)
    ctas = cluster or _cluster(rows * columns, depth)
    chosen = choose_split_tiles(tiles or Tiles(), (rows, columns, depth), ctas)
    _multiply(sch, partial, ctas, chosen)
    _add(sch, product, result, columns)
    return sch


def _cluster(elements: int, depth: int) -> int:
    """CTAs of a cluster: many where there are few tiles, with parts that stages divide."""
    fitting = (each for each in (8, 4, 2) if depth % (each * _STAGE) == 0)
    return next((each for each in fitting if elements * each <= _ENOUGH), 1)


def _multiply(sch: Any, partial: Any, cluster: int, tiles: Tiles) -> None:
    """Schedule the products of each GPU, tile by tile, each of them by a cluster."""
    ranks, i, j, k = sch.get_loops(partial)
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, column = sch.split(j, [None, tiles.width])
    share, rest = sch.split(k, [cluster, None])
    sch.reorder(ranks, row_tile, column_tile, share, rest, row, column)
    sch.bind(row_tile, "blockIdx.y")
    sch.bind(column_tile, "blockIdx.x")
    parts = sch.dsm_reduce(partial, share)
    *_, rest, row, column = sch.get_loops(parts)
    multiply(sch, parts, row, column, rest, tiles)
    *_, element, shares = sch.get_loops(partial)
    _, y, x = sch.split(element, [None, tiles.threads_y, tiles.threads_x])
    bind_threads(sch, y, x)
    store = sch.cache_write(partial, 0, "local")
    sch.reverse_compute_at(store, x, preserve_unit_loops=True)
    sch.decompose_reduction(partial, shares)


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
