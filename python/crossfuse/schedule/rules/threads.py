"""Rules for kernels of ordinary instructions, one product or two, and their tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import gcd
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_chain, read_product
from crossfuse.blocks.scheduled import constant_extent, position, read_of
from crossfuse.calls import AnyFunction, ClusterSize, checked
from crossfuse.errors import Rule, ScheduleRefused, refuse
from crossfuse.hardware import MAX_SHARED_BYTES
from crossfuse.markers import MAX_CLUSTER
from crossfuse.planner.kernels.shape import largest_divisor
from crossfuse.schedule.rules.pipelined import stage_at

_refused = Rule(ScheduleRefused, "tiles")


@checked
@dataclass(frozen=True)
class Tiles:
    """How a CTA's work is divided. Zero means: choose.

    Attributes
    ----------
    rows : int
        Rows of the output tile of a cluster.
    threads_x, threads_y : int
        Threads over columns and over rows.
    columns : int
        Columns a thread computes at a time.
    depth : int
        Elements of the reduction staged in shared memory at a time.

    Examples
    --------
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> func = prim_func(parse("gemm:M=64,K=256,N=64"))
    >>> sch = schedule_split_k(func, cluster=4, tiles=Tiles(rows=32, columns=32))
    >>> sch.cluster_layout().axes
    (('x', 4),)
    """

    rows: int = 0
    threads_x: int = 0
    threads_y: int = 0
    columns: int = 0
    depth: int = 0

    @property
    def width(self) -> int:
        """Columns that all threads compute at a time."""
        return self.threads_x * self.columns


def staged_depth(extent: int, limit: int = 64) -> int:
    """Part of a reduction of `extent` to stage at a time.

    A divisor that is a multiple of 8 elements, so that rows of the stage are copied 16 bytes at a
    time; else the largest divisor, or all of a short reduction that has no useful one. Never a
    part that leaves a remainder: TVM masks it and stages the whole extent nevertheless.

    Examples
    --------
    >>> staged_depth(768), staged_depth(688), staged_depth(420), staged_depth(101)
    (64, 16, 60, 101)
    """
    vectors = [each for each in range(16, limit + 1, 8) if extent % each == 0]
    divisor = vectors[-1] if vectors else largest_divisor(extent, limit)
    return extent if divisor < 8 and extent <= 8 * limit else divisor


def choose_tiles(
    given: Tiles,
    *,
    rows: int,
    widths: tuple[int, ...],
    depth: int,
    shared_bytes: Callable[[Tiles], int],
) -> Tiles:
    """Choose the sizes that the caller left open, and check the others.

    The problem has `rows`. `widths` are columns that one CTA computes in each of its nests: thread
    tiles divide all of them. `depth` is the width of a slice of the intermediate (or the
    reduction's extent): staged parts divide it. Rows are halved, down to one, until the shared
    memory of a CTA fits; the lowering refuses what does not. A given size that does not divide what
    it must is refused.
    """
    tile_rows = min(16, rows)
    chosen = _complete(given, tile_rows, gcd(*widths), depth)
    while not given.rows and tile_rows > 1 and shared_bytes(chosen) > MAX_SHARED_BYTES:
        tile_rows = -(-tile_rows // 2)
        chosen = _complete(given, tile_rows, gcd(*widths), depth)
    check_tiles(chosen, widths=widths, depth=depth)
    return chosen


def check_tiles(tiles: Tiles, *, widths: tuple[int, ...], depth: int) -> None:
    """Refuse complete tiles of which one does not divide what it must, with the divisors."""
    _positive(tiles)
    _divides("rows by threads_y", tiles.threads_y, tiles.rows)
    for width in widths:
        _divides("columns of a CTA by threads_x * columns", tiles.width, width)
    _divides("staged depth", tiles.depth, depth)


def _complete(given: Tiles, rows: int, common: int, depth: int) -> Tiles:
    """Threads for 256 columns and rows at most, a few of them next to each other."""
    tile_rows = given.rows or rows
    threads_y = given.threads_y or largest_divisor(tile_rows, 16)
    limit = max(16, min(128, 256 // max(threads_y, 1)))
    threads_x = given.threads_x or largest_divisor(common, limit)
    most = max(1, min(4, 256 // max(threads_x, 1)))
    columns = given.columns or largest_divisor(common // max(threads_x, 1), most)
    return Tiles(tile_rows, threads_x, threads_y, columns, given.depth or staged_depth(depth))


def _positive(tiles: Tiles) -> None:
    for field in fields(tiles):
        value = getattr(tiles, field.name)
        if value < 1:
            raise _refused(
                field.name,
                found=value,
                limit="a positive number",
                instead="leave the size out to have it chosen",
            )


def _divides(what: str, part: int, whole: int) -> None:
    if whole % part:
        divisors = [each for each in range(1, whole + 1) if whole % each == 0]
        raise _refused(
            what,
            found=f"{part}, which does not divide {whole}",
            limit=f"a divisor of {whole}",
            instead=f"take one of {', '.join(map(str, divisors[:12]))}, or leave the size out",
        )


# Steps that the rules share: threads over loops, operands staged in shared memory.


def bind_threads(sch: Any, y: Any, x: Any) -> None:
    """Bind two loops to the threads of a CTA."""
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")


def stage_operand(sch: Any, block: Any, index: int, at: Any, tiles: Tiles) -> None:
    """Stage read buffer `index` of `block` in shared memory at loop `at`, by all threads."""
    stage = stage_at(sch, block, index, at)
    copy_by_threads(sch, stage, 2, tiles)
    # Rows one bank apart: threads that read one column of different rows do not collide.
    word = max(1, 32 // int(ir.tvm.DataType(str(sch.get(stage).writes[0].source.ty.dtype)).bits))
    sch.storage_align(stage, 0, axis=-2, factor=32 * word, offset=word)


def copy_by_threads(sch: Any, stage: Any, dims: int, tiles: Tiles, vector: int = 1) -> None:
    """Bind the innermost `dims` loops of a copying block to all threads of the CTA.

    `vector` elements go together where the row length allows it; threads that are left over are
    masked by the exact bound of the fused loop.
    """
    loops = list(sch.get_loops(stage))[-dims:]
    row = constant_extent(sch, "rule", loops[-1])
    lanes = vector if row % vector == 0 else 1
    factors = [None, tiles.threads_y, tiles.threads_x, lanes]
    _, y, x, v = sch.split(sch.fuse(*loops), factors)
    bind_threads(sch, y, x)
    if lanes > 1:
        sch.vectorize(v)


def tile_columns(sch: Any, rows: Any, columns: Any, tiles: Tiles) -> tuple[Any, ...]:
    """Split a tile for threads: column chunk, thread y, thread x, rows and columns a thread has."""
    y, i = sch.split(rows, [tiles.threads_y, None])
    chunk, x, j = sch.split(columns, [None, tiles.threads_x, tiles.columns])
    return chunk, y, x, i, j


# Rule for chains of two products, plain or gated: the intermediate never leaves the cluster.
#
# Each cluster owns a tile of rows. Its CTAs make one slice each of the intermediate's columns, hold
# it in their own shared memory, and pass the slices around while each makes its slice of the
# output's
# columns.


_rule_refused = Rule(ScheduleRefused, "rule")


@checked
def schedule_ffn(
    func: AnyFunction, *, cluster: ClusterSize, tiles: Tiles | None = None, ring: bool = True
) -> Any:
    """Schedule a GEMM chain or gated FFN on clusters of `cluster` CTAs.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical chain, see `crossfuse.workload.prim_func`.
    cluster : int
        CTAs in a cluster; must divide the intermediate's width and the output's.
    tiles : Tiles | None
        Tile sizes; what is left out is chosen.
    ring : bool
        Whether slices pass in ring order, see `dsm_shuffle`.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no such chain or a size does not divide.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = schedule_ffn(prim_func(parse("gated_ffn:M=16,K=64,N=128,L=64")), cluster=4)
    >>> sch.cluster_layout().axes
    (('x', 4),)
    """
    sch = ir.Schedule(func)
    chain = read_chain(sch)
    _check_cluster(chain, cluster)
    hidden, out = chain.n // cluster, chain.l // cluster
    chosen = choose_tiles(
        tiles or Tiles(),
        rows=chain.m,
        widths=(hidden, out),
        depth=hidden,
        shared_bytes=lambda each: _shared_bytes(sch, chain, hidden, each),
    )
    _second(sch, chain, cluster, chosen, ring)
    _first(sch, chain, chosen)
    return sch


def _check_cluster(chain: Chain, cluster: int) -> None:
    if chain.second is None:
        raise _rule_refused(
            "ffn",
            found="one matrix product",
            limit="two products with one elementwise block between them",
            instead="use the split_k rule",
        )
    fitting = [c for c in range(1, 17) if chain.n % c == 0 and chain.l % c == 0]
    if cluster not in fitting:
        raise _rule_refused(
            f"chain with intermediate width {chain.n} and output width {chain.l}",
            found=f"cluster size {cluster}",
            limit="1 to 16 CTAs that divide both widths",
            instead=f"take one of {', '.join(map(str, fitting))}",
        )


def _shared_bytes(sch: Any, chain: Chain, hidden: int, tiles: Tiles) -> int:
    """Shared memory of a CTA: its slab, and the operands of every product, none overlapping."""
    # Rows of a stage are padded by up to two elements.
    depths = [tiles.depth, *(staged_depth(chain.k) for _ in chain.first)]
    stages = sum((tiles.rows + tiles.width + 2) * (depth + 2) for depth in depths)
    return _bytes(sch, chain.middle) * (tiles.rows * hidden + stages)


def _second(sch: Any, chain: Chain, cluster: int, tiles: Tiles, ring: bool) -> None:
    """Schedule the second product: columns over the CTAs, slices of the intermediate from DSM."""
    block = chain.second
    rows, columns, depth = sch.get_loops(block)
    grid, rows = sch.split(rows, [None, tiles.rows])
    rank, columns = sch.split(columns, [cluster, None])
    step, depth = sch.split(depth, [cluster, None])
    outer, inner = sch.split(depth, [None, tiles.depth])
    chunk, y, x, i, j = tile_columns(sch, rows, columns, tiles)
    sch.reorder(grid, rank, chunk, y, x, step, outer, inner, i, j)
    sch.bind(grid, "blockIdx.x" if cluster == 1 else "blockIdx.y")
    sch.cluster_bind(rank)
    bind_threads(sch, y, x)
    index = read_of(sch, block, chain.middle)
    stage = sch.dsm_shuffle(chain.middle, block, index, outer, ring=ring)
    copy_by_threads(sch, stage, 3, tiles, 16 // _bytes(sch, chain.middle))
    stage_operand(sch, block, 1 - index, outer, tiles)
    sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(chain.epilogue, x, preserve_unit_loops=True)
    sch.decompose_reduction(block, step)


def _first(sch: Any, chain: Chain, tiles: Tiles) -> None:
    """Schedule the first products and their activation: one slice of columns in each CTA."""
    _, _, *loops = sch.get_loops(chain.middle)
    rows, columns = loops
    chunk, y, x, i, j = tile_columns(sch, rows, columns, tiles)
    sch.reorder(chunk, y, x, i, j)
    bind_threads(sch, y, x)
    depth = staged_depth(chain.k)
    for product in chain.first:
        sch.set_scope(product, 0, "local")
        sch.compute_at(product, x, preserve_unit_loops=True)
        _, at = position(sch, "rule", product, x)
        i, j, k = list(sch.get_loops(product))[at + 1 :]
        outer, inner = sch.split(k, [None, depth])
        sch.reorder(outer, inner, i, j)
        for index in (0, 1):
            stage_operand(sch, product, index, outer, tiles)
        sch.decompose_reduction(product, outer)


def _bytes(sch: Any, block: Any) -> int:
    """Size of an element of the block's output."""
    return ir.item_bytes(sch.get(block).writes[0].source.ty.dtype)


# Rule for one product: its reduction is split over the CTAs of a cluster.


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
