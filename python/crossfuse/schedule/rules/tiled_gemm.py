"""Rule for one product on tensor cores: a pipelined loop over tiles in shared memory."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.schedule.install import install
from crossfuse.schedule.rules.chain import Chain, read_product
from crossfuse.schedule.rules.pipelined import bind_split, pipeline
from crossfuse.schedule.rules.tensor_tiles import TensorTiles

#: Tiles of one column of the output that neighbouring clusters compute at the same time, so that
#: they share columns of B in L2.
_GROUP = 8


def schedule_tiled_gemm(
    func: Any, *, tiles: TensorTiles | None = None, constant_weights: bool = False
) -> Any:
    """Schedule one matrix product for the Hopper pipeline.

    Tile rows over the CTAs of a cluster (which then share each tile of B), tile columns and
    clusters over the grid, the reduction serial in tiles of 128 bytes::

        for t in blockIdx.x:                                 # (row group, column, row) of a tile
            for c in cluster x:
                for k0 in range(K / 64):                     # crossfuse.stages
                    A_shared, B_shared = tiles of A and B
                    gemm0[tile] += A_shared B_shared         # registers
                out[tile] = epilogue(gemm0[tile])

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical product, see `crossfuse.workload.prim_func`.
    tiles : TensorTiles | None
        Tile extents; what is left out is chosen.
    constant_weights : bool
        Whether no kernel that may still be running writes B: it is then loaded before the kernel
        before is over (programmatic dependent launch).

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no single product.
    """
    install()
    sch = ir.Schedule(func)
    chain = read_product(sch, "tiled_gemm")
    (product,) = chain.first
    chosen = (tiles or TensorTiles()).complete(sch, chain)
    if chosen.split > 1:
        bind_split(sch, product, chain.epilogue, chosen, constant_weights)
        return sch
    rank = _bind_tiles(sch, product, chain, chosen)
    pipeline(sch, product, chosen.stages, constant_weights)
    sch.set_scope(product, 0, "local")
    sch.reverse_compute_at(chain.epilogue, rank, preserve_unit_loops=True)
    return sch


def _bind_tiles(sch: Any, product: Any, chain: Chain, tiles: TensorTiles) -> Any:
    """Bind tile loops to grid and cluster; returns the loop over the cluster's CTAs."""
    i, j, k = sch.get_loops(product)
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, column = sch.split(j, [None, tiles.columns])
    step, depth = sch.split(k, [None, tiles.depth])
    cluster_row, rank = sch.split(row_tile, [None, tiles.cluster])
    cluster_rows = -(-chain.m // (tiles.rows * tiles.cluster))
    group = next(each for each in range(_GROUP, 0, -1) if cluster_rows % each == 0)
    outer, inner = sch.split(cluster_row, [None, group])
    sch.reorder(outer, column_tile, inner, rank, step, row, column, depth)
    sch.bind(sch.fuse(outer, column_tile, inner), "blockIdx.x")
    sch.cluster_bind(rank)
    return rank
