"""Rule for two products on tensor cores, gated or not, in one kernel or one each."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.schedule.facts import name_of
from crossfuse.schedule.install import install
from crossfuse.schedule.rules.chain import Chain, read_two_products
from crossfuse.schedule.rules.pipelined import bind_split, pipeline
from crossfuse.schedule.rules.tensor_tiles import TensorTiles, row_bytes_depth


def schedule_tiled_ffn(
    func: Any,
    *,
    first: TensorTiles | None = None,
    second: TensorTiles | None = None,
    staged: bool = True,
    constant_weights: bool = False,
) -> Any:
    """Schedule a chain of two products for the Hopper pipeline, in two phases.

    The intermediate goes through global memory, where the second phase finds it in L2::

        for t in blockIdx.x:                                 # a tile of the intermediate
            for c in cluster x:                              # columns; all share the tile of A
                for k0 in range(K / 64):                     # crossfuse.stages
                    gate[tile] += A B_gate; up[tile] += A B_up
                hidden[tile] = silu(gate) * up
        for t in blockIdx.x:                                 # a tile of the output
            for r in cluster x:                              # a part of the reduction
                ...                                          # as `schedule_tiled_gemm` splits it

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical chain, see `crossfuse.workload.prim_func`.
    first, second : TensorTiles | None
        Tile extents of either phase; what is left out is chosen.
    staged : bool
        Whether both phases are one persistent kernel, see `grid_stage`; else they are two.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights: they are then loaded before
        the kernel before is over (programmatic dependent launch).

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no chain of two products.
    """
    install()
    sch = ir.Schedule(func)
    chain = read_two_products(sch, "tiled_ffn")
    tiles = (first or TensorTiles()).of_first(sch, chain, staged)
    if tiles.split > 1:
        _check_split(sch, chain, tiles)
        bind_split(sch, chain.first[0], chain.middle, tiles, constant_weights)
    else:
        _first(sch, chain, tiles, constant_weights)
    # An axis has one extent in a function: both phases have clusters of one shape.
    chosen = (second or TensorTiles()).of_second(sch, chain, tiles)
    bind_split(sch, chain.second, chain.epilogue, chosen, constant_weights)
    if staged:
        sch.grid_stage(chain.middle)
    return sch


def _check_split(sch: Any, chain: Chain, tiles: TensorTiles) -> None:
    """Only one product's sums are exchanged."""
    if len(chain.first) > 1:
        raise refuse(
            ScheduleRefused,
            "tiles",
            name_of(sch, chain.first[0]),
            found=f"reductions of {len(chain.first)} products split over {tiles.split} CTAs",
            limit="one product, of which they exchange the sums",
            instead="leave out the split of the first products",
        )


def _first(sch: Any, chain: Chain, tiles: TensorTiles, constant: bool) -> None:
    """The intermediate: all first products of a tile in one nest, then their expression."""
    rows, columns = sch.get_loops(chain.middle)
    row_tile, row = sch.split(rows, [None, tiles.rows])
    column_tile, beside, rank, column = sch.split(
        columns, [None, tiles.across, tiles.cluster, tiles.columns]
    )
    sch.reorder(column_tile, row_tile, beside, rank, row, column)
    sch.bind(sch.fuse(column_tile, row_tile), "blockIdx.x")
    sch.cluster_bind(beside, "y")
    sch.cluster_bind(rank)
    for product in chain.first:
        sch.compute_at(product, rank, preserve_unit_loops=True)
        *_, i, j, k = sch.get_loops(product)
        step, depth = sch.split(k, [None, row_bytes_depth(sch, product)])
        sch.reorder(step, i, j, depth)
        sch.set_scope(product, 0, "local")
        pipeline(sch, product, tiles.stages, constant)
