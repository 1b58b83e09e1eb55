"""Rule for two products on tensor cores whose intermediate never leaves the cluster."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_two_products
from crossfuse.blocks.scheduled import read_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.hardware import Device, device
from crossfuse.schedule.rules.parted_tiles import ClusterTiles
from crossfuse.schedule.rules.pipelined import (
    by_part,
    depth_beside,
    place_products,
    stage_weights,
    store_parts,
    sum_parts,
)


@checked
def schedule_clustered_ffn(
    func: AnyFunction,
    *,
    tiles: ClusterTiles | None = None,
    constant_weights: bool = False,
    target: str | Device | None = None,
) -> Any:
    """Schedule a chain of two products for the Hopper pipeline, the intermediate in DSM.

    Each CTA of a cluster makes a slice of the intermediate; all of them gather all slices and
    make a slice of the output each. With several parts, clusters make different parts of the
    intermediate, and their partial sums are added through L2 in the order of the parts::

        for t in blockIdx.x:                                 # (part, row tile)
            for c in cluster x:
                for k0 in range(K / 64):                     # crossfuse.stages
                    gemm0[tile] += A B                       # A by multicast
                hidden[c, part] = act(gemm0)                 # shared.dsm
            for c in cluster x:
                whole = hidden[:, part]                      # all-gather
                for n0 in range(N / parts / 64):             # crossfuse.stages
                    gemm1[part, tile] += whole D
                partial[part, tile] = gemm1                  # crossfuse.grid_stage, if parts > 1
        for t in blockIdx.x:
            for c in cluster x:
                for e in range(elements of a slice):
                    out[e] = epilogue(sum over part of partial[part, e])

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical chain, see `crossfuse.workload.prim_func`.
    tiles : ClusterTiles | None
        Tile extents; what is left out is chosen.
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
        If the function is no chain of two products, or its extents do not divide.

    Examples
    --------
    >>> from crossfuse.schedule.rules.parted_tiles import ClusterTiles
    >>> from crossfuse.workload import parse, prim_func
    >>> func = prim_func(parse("gemm_chain:M=128,K=256,N=512,L=256,weights=nk"))
    >>> schedule_clustered_ffn(func, tiles=ClusterTiles(cluster=4)).cluster_layout().axes
    (('x', 4),)
    """
    sch = ir.Schedule(func)
    chain = read_two_products(sch, "clustered_ffn")
    chosen = (tiles or ClusterTiles()).complete(sch, chain, device(target))
    consumer = by_part(sch, chain, chosen.parts, chosen.share(chain))
    _lay_out(sch, chain, chosen)
    rank = _second(sch, chain, consumer, chosen, constant_weights)
    store_parts(sch, chain, consumer, rank, chosen.parts)
    if chosen.parts > 1:
        extents = chosen.rows_of_sum(chain), chosen.columns(chain), chosen.cluster
        sum_parts(sch, chain, chosen.parts, *extents)
    _, making, *_ = sch.get_loops(chain.middle)
    place_products(sch, chain.first, making, 0, constant_weights)
    return sch


def _lay_out(sch: Any, chain: Chain, tiles: ClusterTiles) -> None:
    """Divide the intermediate's columns by part; those beyond the last one are zero.

    An activation of zero may be no number, so padding is not even multiplied by zero.
    """
    share = tiles.share(chain)

    def by_part(i: Any, j: Any) -> list[Any]:
        return [j // share, i, j % share]

    if tiles.pads(chain):
        (written,) = sch.get(chain.middle).writes
        zero = ir.tirx.FloatImm(str(written.source.ty.dtype), 0.0)
        sch.transform_layout(chain.middle, ("write", 0), by_part, pad_value=zero)
    elif tiles.parts > 1:
        sch.transform_block_layout(chain.middle, by_part)
        sch.transform_layout(chain.middle, ("write", 0), by_part)


def _second(sch: Any, chain: Chain, consumer: Any, tiles: ClusterTiles, constant: bool) -> Any:
    """Schedule the second product: columns over the CTAs, all slices in their shared memory."""
    *part, i, j, k = sch.get_loops(consumer)
    row_tile, row = sch.split(i, [None, tiles.rows])
    rank, column = sch.split(j, [tiles.cluster, tiles.columns(chain)])
    slices, inside = sch.split(k, [tiles.cluster, tiles.width(chain)])
    sch.reorder(*part, row_tile, rank, slices, inside, row, column)
    sch.bind(sch.fuse(*part, row_tile) if part else row_tile, "blockIdx.x")
    sch.cluster_bind(rank)
    index = read_of(sch, consumer, chain.middle)
    sch.dsm_shuffle(chain.middle, consumer, index, rank, ring=False)
    _, rank, slices, inside, row, column = sch.get_loops(consumer)
    # Steps are as deep as a tile of D, however wide the slices are.
    step, depth = sch.split(sch.fuse(slices, inside), [None, depth_beside(sch, consumer, index)])
    sch.reorder(step, row, column, depth)
    stage_weights(sch, consumer, index, tiles.stages, constant)
    return rank
