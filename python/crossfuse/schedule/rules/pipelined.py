"""What the rules for tensor cores share: pipelined loops, and reductions split over a cluster."""

from __future__ import annotations

from typing import Any

from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.schedule.facts import name_of
from crossfuse.schedule.markers import CONSTANT, STAGES
from crossfuse.schedule.rules.operands import stage_at
from crossfuse.schedule.rules.tensor_tiles import TensorTiles


def pipeline(sch: Any, product: Any, stages: int, constant: bool = False) -> None:
    """Stage both operands in the loop over steps, the fourth from the inside, and mark it.

    The right one is `constant` if no kernel that may still be running writes it.
    """
    *_, step, _, _, _ = sch.get_loops(product)
    for index in (0, 1):
        # Each product has stages of its own, of operands that several share too.
        stage_at(sch, product, index, step)
    sch.annotate(step, STAGES, stages)
    if constant:
        sch.annotate(step, CONSTANT, 1)


def bind_split(
    sch: Any, product: Any, epilogue: Any, tiles: TensorTiles, constant: bool = False
) -> None:
    """Each CTA sums a part of the reduction, then combines and stores a slice of the tile.

    Raises
    ------
    ScheduleRefused
        If the parts are not whole steps.
    """
    i, j, k = sch.get_loops(product)
    extent = int(sch.get(k).extent)
    if extent % (tiles.split * tiles.depth) or tiles.cluster > 1:
        raise refuse(
            ScheduleRefused,
            "tiles",
            name_of(sch, product),
            found=f"a reduction of {extent} split over {tiles.split} CTAs, in steps of "
            f"{tiles.depth}, in a cluster with {tiles.cluster} rows of tiles",
            limit="parts of whole steps, and one row of tiles",
            instead="choose a split that divides the steps, and cluster=1",
        )
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, beside, column = sch.split(j, [None, tiles.across, tiles.columns])
    rank, step, depth = sch.split(k, [tiles.split, None, tiles.depth])
    sch.reorder(column_tile, row_tile, beside, rank, step, row, column, depth)
    sch.bind(sch.fuse(column_tile, row_tile), "blockIdx.x")
    sch.cluster_bind(beside, "y")
    partial = sch.dsm_reduce(product, rank)
    store = sch.cache_write(partial, 0, "local")
    _, _, rank, *_ = sch.get_loops(partial)
    sch.reverse_compute_at(store, rank, preserve_unit_loops=True)
    pipeline(sch, partial, tiles.stages, constant)
    sch.set_scope(product, 0, "local")
    _, _, slices, *_ = sch.get_loops(product)
    sch.reverse_compute_at(epilogue, slices, preserve_unit_loops=True)
