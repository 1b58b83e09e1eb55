"""Rule for chains of two products, plain or gated: the intermediate never leaves the cluster.

Each cluster owns a tile of rows. Its CTAs make one slice each of the intermediate's columns, hold
it in their own shared memory, and pass the slices around while each makes its slice of the output's
columns.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_chain
from crossfuse.blocks.scheduled import position, read_of
from crossfuse.calls import AnyFunction, ClusterSize, checked
from crossfuse.errors import Rule, ScheduleRefused
from crossfuse.schedule.rules.tiles import (
    Tiles,
    bind_threads,
    choose_tiles,
    copy_by_threads,
    stage_operand,
    staged_depth,
    tile_columns,
)

_refused = Rule(ScheduleRefused, "rule")


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
        raise _refused(
            "ffn",
            found="one matrix product",
            limit="two products with one elementwise block between them",
            instead="use the split_k rule",
        )
    fitting = [c for c in range(1, 17) if chain.n % c == 0 and chain.l % c == 0]
    if cluster not in fitting:
        raise _refused(
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
