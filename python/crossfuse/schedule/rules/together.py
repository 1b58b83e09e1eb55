"""Rule for several products of one operand, as one kernel of the Hopper pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_products
from crossfuse.blocks.scheduled import name_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.markers import SIDE_BY_SIDE
from crossfuse.planner.families.phases import COLUMNS, REDUCTION, ROWS_OF
from crossfuse.planner.families.tiled import together_kernels
from crossfuse.planner.kernels.shape import shape_of_blocks
from crossfuse.schedule.rules.phases import ChainTiles, PhaseTiles, divide


@checked
def schedule_together(
    func: AnyFunction,
    *,
    tiles: ChainTiles | None = None,
    constant_weights: bool = False,
    target: str | Device | None = None,
) -> Any:
    """Schedule products of the same rows for the Hopper pipeline, side by side in one launch.

    Each has a result of its own, such as queries, keys and values. Their tiles are dealt out to
    CTAs one product behind the other, as if they were of one::

        for t in blockIdx.x:                    q0 q1 q2 | k0 | v0      CTA 0 to 4: a tile each
            q[tile] = x Wq                      of eight tiles and five CTAs the first three go on:
        for t in blockIdx.x:                    q0 q1 q2 q3 | k0 k1 | v0 v1
            k[tile] = x Wk                       0  1  2  3    4  0    1  2
        for t in blockIdx.x:
            v[tile] = x Wv

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        See `crossfuse.workload.build.emit_products`; weights are stored as [n, k].
    tiles : ChainTiles | None
        Rows of a tile and CTAs of a cluster, and a phase for all products or for each, along
        columns or rows; None leaves it to the planner.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights.
    target : str | Device | None
        Device that tiles are chosen for.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function has one product, or makes rows, or for other tiles.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> from crossfuse.workload.build import emit_products, form_of
    >>> forms = [form_of(parse(f"gemm:M=128,K=256,N={n},weights=nk")) for n in (256, 64, 64)]
    >>> sch = schedule_together(emit_products(forms))
    >>> "crossfuse.side_by_side" in sch.mod.script()
    True
    """
    sch = ir.Schedule(func)
    chains = read_products(sch, "together")
    chosen = tiles or _chosen(sch, chains, device(target))
    odd = [each for each in chains if each.rows or each.row_sums]
    phases = chosen.phases * (len(chains) if len(chosen.phases) == 1 else 1)
    known = len(phases) == len(chains) > 1
    if odd or not known or any(each.along == REDUCTION for each in phases):
        made = ", of rows that are made" if odd else ""
        raise refuse(
            ScheduleRefused,
            "tiles",
            name_of(sch, chains[0].first[0]),
            found=f"{chosen} for {len(chains)} products{made}",
            limit="two products or more of an input's rows, with a phase for all or for each, of "
            "whole reductions",
            instead="leave the tiles out, or use schedule_tiled_gemm",
        )
    for chain, phase in zip(chains, phases, strict=True):
        divide(sch, chain.layers[0], chosen, phase, constant_weights)
    sch.annotate(sch.get_sblock("root"), SIDE_BY_SIDE, 1)
    return sch


def _chosen(sch: Any, chains: Sequence[Chain], target: Device) -> ChainTiles:
    found = together_kernels([shape_of_blocks(each) for each in chains], target)
    if found:
        return tiles_of(found[0][0].tiles())
    raise refuse(
        ScheduleRefused,
        "tiles",
        name_of(sch, chains[0].first[0]),
        found=" and ".join(shape_of_blocks(each).text for each in chains),
        limit=f"products that the Hopper pipeline has tiles for on {target.name}",
        instead="leave them to a library",
    )


def tiles_of(tiles: Mapping[str, int]) -> ChainTiles:
    """Tiles of one product, as a plan has them, for all."""
    along = ROWS_OF if tiles["cluster"] > 1 else COLUMNS
    return ChainTiles(tiles["rows"], tiles["cluster"], (PhaseTiles(tiles["columns"], along),))
