"""Rules for several GPUs: row-parallel products, and collectives of one shot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import function
from crossfuse.calls import AnyFunction, AtLeastOne, ClusterSize, checked
from crossfuse.hardware import Device, device
from crossfuse.planner.cost.collectives import shares
from crossfuse.planner.kernels.shape import largest_divisor
from crossfuse.schedule.rules.threads import (
    Tiles,
    bind_threads,
    choose_split_tiles,
    multiply,
)

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


# Collectives: each GPU shows its tensor, then takes what the others have for it.


@checked
def schedule_collective(
    func: AnyFunction,
    *,
    threads: AtLeastOne | None = None,
    target: str | Device | None = None,
) -> Any:
    """Schedule a sum over GPUs, an all-gather, a reduce-scatter or an all-to-all, in one shot.

    A CTA fills its part of the slab of its GPU, waits for the CTAs of its number, and reads their
    parts: nothing is waited for but one exchange::

        before, for instance           after
        for g, r, e:                   for g in rank(2):
            out[g, r, e] = A[r, e]         for t in blockIdx.x:  P[g, t, :] = A[g, part t]
                                       for g in rank(2):
                                           for t in blockIdx.x:
                                               for r:  out[g, r, part t] = P[r, t, :]

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        What `crossfuse.workload.all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all` makes.
    threads : int | None
        Threads of a CTA at most, as they divide the elements; each takes 16 bytes. By default 256
        to 1024, more of larger tensors.
    target : str | Device | None
        Device whose multiprocessors the CTAs fit on, all at the same time.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If a primitive does not fit the function.

    Examples
    --------
    >>> from crossfuse.workload import all_reduce
    >>> sch = schedule_collective(all_reduce(elements=4096, ranks=2))
    >>> [each.scope() for each in sch.get(sch.get_sblock("root")).alloc_buffers]
    ['local', 'global.peer', 'local']
    """
    sch = ir.Schedule(func)
    *sums, result = sch.get_child_blocks(sch.get_sblock("root"))
    for block in (*sums, result):
        sch.rank_bind(sch.get_loops(block)[0])
    copy = sch.rank_gather((*sums, result)[0], 0)
    _, step = _in_parts(sch, (copy, result), threads, target)
    for total in sums:
        _add_at(sch, total, step)
    _by_cta(sch, copy)
    return sch


def _add_at(sch: Any, total: Any, step: Any) -> None:
    """Let a thread load what it adds, then add it, in each step."""
    sch.set_scope(total, 0, "local")
    sch.compute_at(total, step, preserve_unit_loops=True)
    loads = sch.cache_read(total, 0, "local")
    *_, element, ranks = sch.get_loops(total)
    sch.reorder(ranks, element)
    sch.compute_at(loads, step, preserve_unit_loops=True)
    # All loads are under way before the first sum: each takes as long as NVLink does.
    *_, ranks_of_loads, element_of_loads = sch.get_loops(loads)
    sch.unroll(ranks_of_loads)
    sch.vectorize(element_of_loads)
    for loop in (ranks, element):
        sch.unroll(loop)
    sch.decompose_reduction(total, ranks)


def _in_parts(
    sch: Any, blocks: Sequence[Any], threads: int | None, target: str | Device | None
) -> list[Any]:
    """Let threads take 16 bytes at a time of what blocks go through; their innermost loops."""
    given = function(sch, blocks[0]).params[0].ty
    item = ir.item_bytes(str(given.dtype))
    found = shares(int(given.shape[-1]), item, device(target).sms, threads)
    steps = []
    for block in blocks:
        _, *slices, element = sch.get_loops(block)
        factors = [None, found.steps, found.threads, found.vector]
        cta, step, thread, inner = sch.split(element, factors)
        sch.reorder(cta, thread, step, *slices, inner)
        sch.bind(cta, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        sch.vectorize(inner)
        steps.append(step)
    return steps


def _by_cta(sch: Any, copy: Any) -> None:
    """Let slabs have the CTA as their second dimension: these exchange what they have filled."""
    elements = int(sch.get(copy).writes[0].source.ty.shape[-1])
    *_, cta = (each for each in map(sch.get, sch.get_loops(copy)) if _is_cta(each))
    part = elements // int(cta.extent)

    def by_cta(rank: Any, *others: Any) -> list[Any]:
        *slices, element = others
        return [rank, element // part, *slices, element % part]

    sch.transform_layout(copy, ("write", 0), by_cta)


def _is_cta(loop: Any) -> bool:
    return loop.thread_binding is not None and str(loop.thread_binding.thread_tag) == "blockIdx.x"
