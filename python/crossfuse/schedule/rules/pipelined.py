"""Steps of the rules for tensor cores: pipelined loops, and reductions split over a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse.blocks.chain import Chain, is_k_major, is_view
from crossfuse.blocks.scheduled import name_of
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import CONSTANT, STAGES
from crossfuse.planner.kernels.shape import divides_equally
from crossfuse.schedule.rules.tensor_tiles import TensorTiles, row_bytes_depth

#: Tiles of one column of the output that neighbouring clusters compute at the same time, so that
#: they share the columns of B in L2.
_GROUP = 8


def stage_at(sch: Any, product: Any, index: int, at: Any) -> Any:
    """Stage an operand of a product in shared memory at a loop; returns the copying block."""
    source = sch.get(product).reads[index].source
    views = [
        each
        for each in sch.get_producers(product)
        if is_view(sch, each) and sch.get(each).writes[0].source.same_as(source)
    ]
    if views:
        (stage,) = views
        sch.set_scope(stage, 0, "shared.dyn")
    else:
        stage = sch.cache_read(product, index, "shared.dyn", consumer_blocks=[product])
    sch.compute_at(stage, at, preserve_unit_loops=True)
    return stage


def pipeline(sch: Any, product: Any, stages: int, constant: bool = False) -> None:
    """Stage both operands in the loop over steps, the fourth from the inside, and mark it.

    The right one is `constant` if no kernel that may still be running writes it.
    """
    *_, step, _, _, _ = sch.get_loops(product)
    for index in (0, 1):
        # Each product has stages of its own, of operands that several share too.
        stage_at(sch, product, index, step)
    _mark(sch, step, stages, constant)


def stage_weights(sch: Any, product: Any, index: int, stages: int, constant: bool) -> None:
    """Stage the operand that a product multiplies its read `index` by, as `pipeline` does.

    The read itself is there already: in registers, or gathered in shared memory.
    """
    *_, step, _, _, _ = sch.get_loops(product)
    weights = sch.cache_read(product, 1 - index, "shared.dyn", consumer_blocks=[product])
    sch.compute_at(weights, step, preserve_unit_loops=True)
    _mark(sch, step, stages, constant)


def place_products(
    sch: Any, products: Sequence[Any], loop: Any, stages: int, constant: bool
) -> None:
    """Compute products in the loop over tiles of what is made of them, each pipelined."""
    for product in products:
        sch.compute_at(product, loop, preserve_unit_loops=True)
        *_, i, j, k = sch.get_loops(product)
        step, depth = sch.split(k, [None, row_bytes_depth(sch, product)])
        sch.reorder(step, i, j, depth)
        sch.set_scope(product, 0, "local")
        pipeline(sch, product, stages, constant)


def _mark(sch: Any, step: Any, stages: int, constant: bool) -> None:
    sch.annotate(step, STAGES, stages)
    if constant:
        sch.annotate(step, CONSTANT, 1)


def bind_split(
    sch: Any, product: Any, epilogue: Any, tiles: TensorTiles, constant: bool = False
) -> None:
    """Let each CTA sum a part of the reduction, then combine and store a slice of the tile.

    It is refused if a CTA has no part of the reduction.
    """
    i, j, k = sch.get_loops(product)
    m, extent = (int(sch.get(each).extent) for each in (i, k))
    of_step = row_bytes_depth(sch, product)
    if not divides_equally(extent, tiles.split, of_step) or tiles.cluster > 1:
        raise refuse(
            ScheduleRefused,
            "tiles",
            name_of(sch, product),
            found=f"a reduction of {extent} split over {tiles.split} CTAs, in steps of "
            f"{of_step}, in a cluster with {tiles.cluster} rows of tiles",
            limit="a part of as many steps for each CTA, of which the last begins within the "
            "reduction, and one row of tiles",
            instead="choose a smaller split, and cluster=1",
        )
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, beside, column = sch.split(j, [None, tiles.across, tiles.columns])
    rank, step, depth = sch.split(k, [tiles.split, None, of_step])
    sch.reorder(column_tile, row_tile, beside, rank, step, row, column, depth)
    sch.bind(sch.fuse(column_tile, row_tile), "blockIdx.x")
    sch.cluster_bind(beside, "y")
    partial = sch.dsm_reduce(product, rank, whole_rows=has_uneven_rows(m, tiles.rows, tiles.split))
    store = sch.cache_write(partial, 0, "local")
    _, _, rank, *_ = sch.get_loops(partial)
    sch.reverse_compute_at(store, rank, preserve_unit_loops=True)
    pipeline(sch, partial, tiles.stages, constant)
    sch.set_scope(product, 0, "local")
    _, _, slices, *_ = sch.get_loops(product)
    sch.reverse_compute_at(epilogue, slices, preserve_unit_loops=True)


def has_uneven_rows(m: int, rows: int, size: int) -> bool:
    """Whether the CTAs that combine the only tile get different numbers of its rows.

    The output has `m` rows, the tile has `rows`, and `size` CTAs combine it. One row is divided
    too, by its columns.
    """
    return 1 < m < rows and m % size > 0


def bind_rows(
    sch: Any, chain: Chain, product: Any, tiles: TensorTiles, constant: bool = False
) -> None:
    """Let each CTA make a tile of the output; those of a cluster stand below each other.

    So they share the columns of B.
    """
    rank = _bind_tiles(sch, product, chain, tiles)
    pipeline(sch, product, tiles.stages, constant)
    sch.set_scope(product, 0, "local")
    sch.reverse_compute_at(chain.epilogue, rank, preserve_unit_loops=True)


def bind_epilogue(sch: Any, chain: Chain, tiles: TensorTiles, constant: bool = False) -> None:
    """Bind a product as `bind_rows` does, if its epilogue also reads the result of an earlier nest.

    TVM moves no block that reads what stands outside of a loop into it; so tiles are those of the
    epilogue, and the product moves.
    """
    rank = _bind_tiles(sch, chain.epilogue, chain, tiles)
    place_products(sch, chain.first, rank, tiles.stages, constant)


def _bind_tiles(sch: Any, block: Any, chain: Chain, tiles: TensorTiles) -> Any:
    """Bind tile loops to grid and cluster; returns the loop over the cluster's CTAs."""
    i, j, *reduced = sch.get_loops(block)
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, *beside, column = sch.split(
        j, [None, *([tiles.across] if tiles.across > 1 else []), tiles.columns]
    )
    steps = [sch.split(k, [None, row_bytes_depth(sch, block)]) for k in reduced]
    cluster_row, rank = sch.split(row_tile, [None, tiles.cluster])
    outer, inner = grouped(sch, cluster_row)
    around, within = ([each[place] for each in steps] for place in (0, 1))
    sch.reorder(outer, column_tile, inner, *beside, rank, *around, row, column, *within)
    sch.bind(sch.fuse(outer, column_tile, inner), "blockIdx.x")
    for loop in beside:
        sch.cluster_bind(loop, "y")
    sch.cluster_bind(rank)
    return rank


def grouped(sch: Any, rows: Any) -> Any:
    """Split a loop over rows of tiles; those of the inner one come next to one another in L2."""
    count = int(sch.get(rows).extent)
    group = next(each for each in range(_GROUP, 0, -1) if count % each == 0)
    return sch.split(rows, [None, group])


def by_part(sch: Any, chain: Chain, parts: int, share: int) -> Any:
    """Split the second reduction into parts of `share` iterations; returns the block of a part."""
    if parts == 1:
        return chain.second
    *_, reduction = sch.get_loops(chain.second)
    part, _ = sch.split(reduction, [parts, share])
    consumer = sch.rfactor(part, 0)
    i, j, part, _ = sch.get_loops(consumer)
    sch.reorder(part, i, j)
    return consumer


def store_parts(sch: Any, chain: Chain, consumer: Any, place: Any, parts: int) -> None:
    """Store the second product in a loop over its tiles: the output, or one of several parts.

    Parts stay in L2, where `sum_parts` adds them.
    """
    if parts == 1:
        sch.set_scope(consumer, 0, "local")
        sch.reverse_compute_at(chain.epilogue, place, preserve_unit_loops=True)
        return
    store = sch.cache_write(consumer, 0, "local")
    sch.reverse_compute_at(store, place, preserve_unit_loops=True)
    sch.grid_stage(store)


def sum_parts(
    sch: Any, chain: Chain, parts: int, rows: int, columns: int, cluster: int | None = None
) -> None:
    """Schedule the sum of all parts: of each tile a CTA adds as many elements as the others.

    With a `cluster`, its CTAs have the tiles side by side.
    """
    i, j = sch.get_loops(chain.epilogue)
    row_tile, row = sch.split(i, [None, rows])
    column_tile, column = sch.split(j, [cluster, columns])
    sch.reorder(row_tile, column_tile, row, column)
    part, element = sch.split(sch.fuse(row, column), [parts, None])
    sch.reorder(part, row_tile, column_tile, element)
    if cluster is None:
        sch.bind(sch.fuse(part, row_tile, column_tile), "blockIdx.x")
    else:
        sch.bind(sch.fuse(part, row_tile), "blockIdx.x")
        sch.cluster_bind(column_tile)
    sch.compute_at(chain.second, element, preserve_unit_loops=True)
    sch.set_scope(chain.second, 0, "local")


def depth_beside(sch: Any, consumer: Any, index: int) -> int:
    """Elements of the reduction in a step of a block that multiplies its read `index` by weights.

    A row of a tile if these are stored as [n, k]. As [k, n] they have rows of any number, and half
    as many make more stages, for the first product too.
    """
    whole = row_bytes_depth(sch, consumer, index)
    return whole if is_k_major(sch, consumer, index) else whole // 2
