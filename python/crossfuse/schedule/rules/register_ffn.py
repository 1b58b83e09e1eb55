"""Rule for two products on tensor cores whose intermediate never leaves registers."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_two_products
from crossfuse.blocks.scheduled import read_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.hardware import Device, device
from crossfuse.schedule.rules.parted_tiles import RegisterTiles
from crossfuse.schedule.rules.pipelined import (
    by_part,
    depth_beside,
    has_uneven_rows,
    place_products,
    stage_weights,
    store_parts,
    sum_parts,
)


@checked
def schedule_register_ffn(
    func: AnyFunction,
    *,
    tiles: RegisterTiles | None = None,
    constant_weights: bool = False,
    target: str | Device | None = None,
) -> Any:
    """Schedule a chain of two products for the Hopper pipeline, the intermediate in registers.

    Each CTA makes the columns of the intermediate that it multiplies; every warpgroup multiplies
    the rows that it has made, so that nobody waits between the products. With several parts, CTAs
    make different columns, and their partial sums are added in the order of the parts, through L2::

        for t in blockIdx.x:                                 # (part, row tile, column tile)
            for k0 in range(K / 64):                         # crossfuse.stages
                gemm0[tile] += A B                           # local
            hidden[tile] = act(gemm0)                        # local
            for n0 in range(N / parts / 64):                 # crossfuse.stages
                gemm1[part, tile] += hidden D
            partial[part, tile] = gemm1                      # crossfuse.grid_stage, if parts > 1
        for t in blockIdx.x:
            for e in range(elements of a slice):
                out[e] = epilogue(sum over part of partial[part, e])

    or, where the parts are the CTAs of a cluster, through DSM (`dsm_reduce`).

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical chain, see `crossfuse.workload.prim_func`.
    tiles : RegisterTiles | None
        Tile extents; what is left out is chosen.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights: they are then loaded before
        the kernel before is over (programmatic dependent launch).
    target : str | Device | None
        Device whose CTAs the choice counts.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no chain of two products, or its extents do not divide.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> func = prim_func(parse("gemm_chain:M=128,K=256,N=512,L=256,weights=nk"))
    >>> "crossfuse.stages" in schedule_register_ffn(func).mod.script()
    True
    """
    sch = ir.Schedule(func)
    chain = read_two_products(sch, "register_ffn")
    chosen = (tiles or RegisterTiles()).complete(sch, chain, device(target))
    if chosen.cluster > 1:
        _first(sch, chain, _in_cluster(sch, chain, chosen, constant_weights), constant_weights)
        return sch
    consumer = by_part(sch, chain, chosen.parts, chosen.width(chain))
    place = _second(sch, chain, consumer, chosen, constant_weights)
    store_parts(sch, chain, consumer, place, chosen.parts)
    if chosen.parts > 1:
        sum_parts(sch, chain, chosen.parts, chosen.rows_of_sum(chain), chosen.columns)
    _first(sch, chain, place, constant_weights)
    return sch


def _second(sch: Any, chain: Chain, consumer: Any, tiles: RegisterTiles, constant: bool) -> Any:
    """Schedule the second product, whose left operand is in registers."""
    *part, i, j, k = sch.get_loops(consumer)
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, column = sch.split(j, [None, tiles.columns])
    index = read_of(sch, consumer, chain.middle)
    step, depth = sch.split(k, [None, depth_beside(sch, consumer, index)])
    sch.reorder(*part, row_tile, column_tile, step, row, column, depth)
    place = sch.fuse(*part, row_tile, column_tile)
    sch.bind(place, "blockIdx.x")
    stage_weights(sch, consumer, index, tiles.stages, constant)
    return place


def _in_cluster(sch: Any, chain: Chain, tiles: RegisterTiles, constant: bool) -> Any:
    """Split the second product's reduction over a cluster; returns the loop over its CTAs."""
    i, j, k = sch.get_loops(chain.second)
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, column = sch.split(j, [None, tiles.columns])
    depth = depth_beside(sch, chain.second, read_of(sch, chain.second, chain.middle))
    rank, step, inside = sch.split(k, [tiles.cluster, tiles.width(chain) // depth, depth])
    sch.reorder(row_tile, column_tile, rank, step, row, column, inside)
    sch.bind(sch.fuse(row_tile, column_tile), "blockIdx.x")
    uneven = has_uneven_rows(chain.m, tiles.rows, tiles.cluster)
    partial = sch.dsm_reduce(chain.second, rank, whole_rows=uneven)
    store = sch.cache_write(partial, 0, "local")
    _, rank, *_ = sch.get_loops(partial)
    sch.reverse_compute_at(store, rank, preserve_unit_loops=True)
    index = read_of(sch, partial, chain.middle)
    stage_weights(sch, partial, index, tiles.stages, constant)
    sch.set_scope(chain.second, 0, "local")
    _, slices, *_ = sch.get_loops(chain.second)
    sch.reverse_compute_at(chain.epilogue, slices, preserve_unit_loops=True)
    return rank


def _first(sch: Any, chain: Chain, place: Any, constant: bool) -> None:
    """Place the first products: each CTA makes the columns that it multiplies."""
    sch.set_scope(chain.middle, 0, "local")
    sch.compute_at(chain.middle, place, preserve_unit_loops=True)
    place_products(sch, chain.first, place, 0, constant)
