"""Rule for one product on tensor cores: a pipelined loop over tiles in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_product
from crossfuse.blocks.scheduled import name_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.schedule.rules.pipelined import bind_epilogue, bind_rows, bind_split
from crossfuse.schedule.rules.tensor_tiles import TensorTiles


@checked
def schedule_tiled_gemm(
    func: AnyFunction, *, tiles: TensorTiles | None = None, constant_weights: bool = False
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

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = schedule_tiled_gemm(prim_func(parse("gemm:M=128,K=256,N=256,weights=nk")))
    >>> "crossfuse.stages" in sch.mod.script()
    True
    """
    sch = ir.Schedule(func)
    bind_product(sch, read_product(sch, "tiled_gemm"), tiles, constant_weights)
    return sch


def bind_product(sch: Any, chain: Chain, tiles: TensorTiles | None, constant: bool) -> None:
    """Bind a chain of one product, as `schedule_tiled_gemm` does.

    It is refused if the reduction is split and the epilogue reads more than the product.
    """
    (product,) = chain.first
    reads_more = len(sch.get_producers(chain.epilogue)) > 1
    chosen = (tiles or TensorTiles()).complete(
        sch, chain, allowed=lambda each: ~np.asarray(each.split, bool) | (not reads_more)
    )
    if chosen.split > 1:
        if reads_more:
            raise _refuse_split(sch, chain, chosen)
        bind_split(sch, product, chain.epilogue, chosen, constant)
        return
    if reads_more:
        bind_epilogue(sch, chain, chosen, constant)
        return
    bind_rows(sch, chain, product, chosen, constant)


def _refuse_split(sch: Any, chain: Chain, tiles: TensorTiles) -> Exception:
    return refuse(
        ScheduleRefused,
        "tiles",
        name_of(sch, chain.epilogue),
        found=f"a reduction split over {tiles.split} CTAs, and an epilogue that reads what an "
        "earlier nest makes",
        limit="one or the other",
        instead="leave out the split",
    )
