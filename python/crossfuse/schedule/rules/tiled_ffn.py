"""Rule for two products on tensor cores, gated or not, in one kernel or one each."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_two_products
from crossfuse.blocks.scheduled import name_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.schedule.rules.pipelined import bind_rows, bind_split, place_products
from crossfuse.schedule.rules.tensor_tiles import TensorTiles, complete_pair


@checked
def schedule_tiled_ffn(
    func: AnyFunction,
    *,
    first: TensorTiles | None = None,
    second: TensorTiles | None = None,
    staged: bool = True,
    constant_weights: bool = False,
    target: str | Device | None = None,
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
    target : str | Device | None
        Device whose clusters the choice counts.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no chain of two products.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> func = prim_func(parse("gated_ffn:M=128,K=256,N=512,L=256,weights=nk"))
    >>> "crossfuse.stages" in schedule_tiled_ffn(func).mod.script()
    True
    """
    sch = ir.Schedule(func)
    chain = read_two_products(sch, "tiled_ffn")
    open_tiles = TensorTiles()
    tiles = complete_pair(
        sch, chain, first or open_tiles, second or open_tiles, device(target), staged=staged
    )
    bind_two_products(sch, chain, *tiles, staged, constant_weights)
    return sch


def bind_two_products(
    sch: Any,
    chain: Chain,
    first: TensorTiles,
    second: TensorTiles,
    staged: bool,
    constant: bool,
) -> None:
    """Bind a chain of two products in tiles that are all chosen."""
    if first.split > 1:
        _check_split(sch, chain, first)
        bind_split(sch, chain.first[0], chain.middle, first, constant)
    else:
        _first(sch, chain, first, constant)
    if second.split == 1:
        bind_rows(sch, chain, chain.second, second, constant)
    else:
        bind_split(sch, chain.second, chain.epilogue, second, constant)
    if staged:
        sch.grid_stage(chain.middle)


def _check_split(sch: Any, chain: Chain, tiles: TensorTiles) -> None:
    """Refuse to split several first products: only one product's sums are exchanged."""
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
    """Schedule the intermediate: all first products of a tile in one nest, then the activation."""
    divide = _stacked if tiles.stacked else _along_columns
    row_tile, column_tile, beside, rank, row, column = divide(sch, chain, tiles)
    sch.reorder(column_tile, row_tile, beside, rank, row, column)
    sch.bind(sch.fuse(column_tile, row_tile), "blockIdx.x")
    sch.cluster_bind(beside, "y")
    sch.cluster_bind(rank)
    place_products(sch, chain.first, rank, tiles.stages, constant)


def _along_columns(sch: Any, chain: Chain, tiles: TensorTiles) -> tuple[Any, ...]:
    """Give each CTA of a cluster columns of its own; all share rows of A."""
    rows, columns = sch.get_loops(chain.middle)
    row_tile, row = sch.split(rows, [None, tiles.rows])
    column_tile, beside, rank, column = sch.split(
        columns, [None, tiles.across, tiles.cluster, tiles.columns]
    )
    return row_tile, column_tile, beside, rank, row, column


def _stacked(sch: Any, chain: Chain, tiles: TensorTiles) -> tuple[Any, ...]:
    """Stack the CTAs of a cluster one below the other; all share columns of the weights."""
    rows, columns = sch.get_loops(chain.middle)
    row_tile, rank, row = sch.split(rows, [None, tiles.cluster, tiles.rows])
    column_tile, beside, column = sch.split(columns, [None, tiles.across, tiles.columns])
    return row_tile, column_tile, beside, rank, row, column
