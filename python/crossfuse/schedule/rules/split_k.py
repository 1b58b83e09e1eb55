"""Rule for one product: its reduction is split over the CTAs of a cluster."""

from __future__ import annotations

from math import gcd
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_product
from crossfuse.calls import AnyFunction, ClusterSize, checked
from crossfuse.errors import Rule, ScheduleRefused, refuse
from crossfuse.markers import MAX_CLUSTER
from crossfuse.schedule.rules.tiles import (
    Tiles,
    bind_threads,
    check_tiles,
    largest_divisor,
    stage_operand,
    staged_depth,
    tile_columns,
)

_refused = Rule(ScheduleRefused, "tiles")


@checked
def schedule_split_k(
    func: AnyFunction, *, cluster: ClusterSize, tiles: Tiles | None = None, scatter: bool = True
) -> Any:
    """Schedule one matrix product with its reduction split over `cluster` CTAs.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical product, see `crossfuse.workload.prim_func`.
    cluster : int
        CTAs in a cluster, 1 to 16.
    tiles : Tiles | None
        Tile sizes; what is left out is chosen.
    scatter : bool
        Reduce-scatter, or all-exchange, see `dsm_reduce`.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no single product or a size does not fit.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = schedule_split_k(prim_func(parse("gemm:M=64,K=256,N=64")), cluster=4)
    >>> sch.cluster_layout().axes
    (('x', 4),)
    """
    sch = ir.Schedule(func)
    chain = read_product(sch, "split_k")
    extents = (chain.m, chain.n, chain.k)
    chosen = choose_split_tiles(tiles or Tiles(), extents, cluster, scatter=scatter)
    sch_rule = _scatter if scatter else _all_exchange
    sch_rule(sch, chain, cluster, chosen)
    return sch


def choose_split_tiles(
    given: Tiles, extents: tuple[int, int, int], cluster: int, *, scatter: bool = True
) -> Tiles:
    """Tiles that divide over the CTAs, so that every thread of a slice has an element.

    `extents` are rows, columns and what is summed over.
    """
    rows, columns, summed = extents
    if not 1 <= cluster <= MAX_CLUSTER:
        raise refuse(
            ScheduleRefused,
            "rule",
            "split_k",
            found=f"cluster size {cluster}",
            limit=f"1 to {MAX_CLUSTER} CTAs",
            instead=f"pass a cluster size of at most {MAX_CLUSTER}",
        )
    rows, width = _tile_shape(given, rows, columns, cluster, scatter)
    share = rows * width // cluster
    threads_x = given.threads_x or largest_divisor(gcd(width, share), 64)
    threads_y = given.threads_y or largest_divisor(gcd(rows, share // threads_x), 16)
    if share % (threads_x * threads_y):
        raise _refused(
            "threads",
            found=f"{threads_x} x {threads_y} threads for {share} elements a CTA",
            limit="threads that divide each CTA's share of the tile",
            instead="leave threads_x and threads_y out to have them chosen",
        )
    depth = given.depth or staged_depth(-(-summed // cluster))
    tiles = Tiles(rows, threads_x, threads_y, width // threads_x, depth)
    check_tiles(tiles, widths=(width,), depth=depth)
    return tiles


def _tile_shape(given: Tiles, m: int, n: int, cluster: int, scatter: bool) -> tuple[int, int]:
    """Rows and columns of a tile whose elements divide over the CTAs.

    After an all-exchange each CTA stores whole rows or whole columns of the tile.
    """

    def divides(rows: int, width: int) -> bool:
        parts = (rows * width,) if scatter else (rows, width)
        return any(each % cluster == 0 for each in parts)

    rows = given.rows or min(16, m)
    most = 64 if rows > 4 else 256
    width = largest_divisor(n, most)
    width = width if 2 * width >= min(most, n) else min(most, n)
    if not divides(rows, width) and not given.rows and m >= cluster:
        rows = cluster * max(1, min(16, m) // cluster)
    if not divides(rows, width) and n >= cluster:
        width = cluster * max(1, width // cluster)
    if not divides(rows, width) or rows > m:
        raise _refused(
            f"product of {m} rows and {n} columns",
            found=f"a tile of {rows} x {width} elements for {cluster} CTAs",
            limit="a tile within the product whose elements divide over the CTAs"
            + ("" if scatter else ", by rows or by columns"),
            instead="choose rows that the cluster size divides, or another cluster size",
        )
    return rows, width


def _tile(sch: Any, block: Any, tiles: Tiles) -> tuple[Any, ...]:
    """Split the output loops of a block: tile loops outside, loops within the tile inside."""
    rows, columns, *rest = sch.get_loops(block)
    row_tile, row = sch.split(rows, [None, tiles.rows])
    column_tile, column = sch.split(columns, [None, tiles.width])
    sch.reorder(row_tile, column_tile, *rest, row, column)
    return row_tile, column_tile, row, column, *rest


def _bind_grid(sch: Any, row_tile: Any, column_tile: Any) -> None:
    sch.bind(row_tile, "blockIdx.y")
    sch.bind(column_tile, "blockIdx.x")


def _scatter(sch: Any, chain: Chain, cluster: int, tiles: Tiles) -> None:
    (product,) = chain.first
    row_tile, column_tile, row, column, depth = _tile(sch, product, tiles)
    rank, rest = sch.split(depth, [cluster, None])
    sch.reorder(row_tile, column_tile, rank, rest, row, column)
    _bind_grid(sch, row_tile, column_tile)
    partial = sch.dsm_reduce(product, rank)
    _, _, _, rest, row, column = sch.get_loops(partial)
    multiply(sch, partial, row, column, rest, tiles)
    _, _, _, element, ranks = sch.get_loops(product)
    _, y, x = sch.split(element, [None, tiles.threads_y, tiles.threads_x])
    bind_threads(sch, y, x)
    sch.set_scope(product, 0, "local")
    sch.reverse_compute_at(chain.epilogue, x, preserve_unit_loops=True)
    sch.decompose_reduction(product, ranks)


def _all_exchange(sch: Any, chain: Chain, cluster: int, tiles: Tiles) -> None:
    (product,) = chain.first
    row_tile, column_tile, row, column = _tile(sch, chain.epilogue, tiles)
    _bind_grid(sch, row_tile, column_tile)
    if tiles.rows % cluster == 0:
        nest, row = sch.split(row, [cluster, None])
    else:
        nest, column = sch.split(column, [cluster, None])
    sch.reorder(nest, row, column)
    sch.cluster_bind(nest)
    _, y, x = sch.split(sch.fuse(row, column), [None, tiles.threads_y, tiles.threads_x])
    bind_threads(sch, y, x)
    row_tile, column_tile, row, column, depth = _tile(sch, product, tiles)
    rank, rest = sch.split(depth, [cluster, None])
    sch.reorder(row_tile, column_tile, rank, rest, row, column)
    partial = sch.dsm_reduce(product, rank, scatter=False)
    _, _, _, row, column, rest = sch.get_loops(partial)
    multiply(sch, partial, row, column, rest, tiles)
    *_, ranks, row, column = sch.get_loops(product)
    _, y, x = sch.split(sch.fuse(row, column), [None, tiles.threads_y, tiles.threads_x])
    sch.reorder(y, x, ranks)
    bind_threads(sch, y, x)
    sch.decompose_reduction(product, ranks)


def multiply(sch: Any, partial: Any, row: Any, column: Any, depth: Any, tiles: Tiles) -> None:
    """Schedule one CTA's share of the product: threads over the tile, operands staged.

    Its sums are in registers.
    """
    store = sch.cache_write(partial, 0, "local")
    chunk, y, x, i, j = tile_columns(sch, row, column, tiles)
    outer, inner = sch.split(depth, [None, tiles.depth])
    sch.reorder(chunk, y, x, outer, inner, i, j)
    bind_threads(sch, y, x)
    sch.reverse_compute_at(store, x, preserve_unit_loops=True)
    for index in (0, 1):
        stage_operand(sch, partial, index, outer, tiles)
    sch.decompose_reduction(partial, outer)
