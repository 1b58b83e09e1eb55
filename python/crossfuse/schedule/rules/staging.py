"""Steps that the rules share: threads over loops, operands staged in shared memory."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.operands import is_view
from crossfuse.blocks.scheduled import constant_extent
from crossfuse.schedule.rules.tiles import Tiles


def stage_operand(sch: Any, block: Any, index: int, at: Any, tiles: Tiles, vector: int = 1) -> Any:
    """Stage read buffer `index` of `block` in shared memory at loop `at`, by all threads."""
    stage = stage_at(sch, block, index, at)
    copy_by_threads(sch, stage, 2, tiles, vector)
    # Rows one bank apart: threads that read one column of different rows do not collide.
    word = max(1, 32 // int(ir.tvm.DataType(str(sch.get(stage).writes[0].source.ty.dtype)).bits))
    sch.storage_align(stage, 0, axis=-2, factor=32 * word, offset=word)
    return stage


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


def copy_by_threads(sch: Any, stage: Any, dims: int, tiles: Tiles, vector: int = 1) -> None:
    """Bind the innermost `dims` loops of a copying block to all threads of the CTA.

    `vector` elements go together where the row length allows it; threads that are left over are
    masked by the exact bound of the fused loop.
    """
    loops = list(sch.get_loops(stage))[-dims:]
    row = constant_extent(sch, "rule", loops[-1])
    lanes = vector if row % vector == 0 else 1
    fused = sch.fuse(*loops) if dims > 1 else loops[0]
    factors = [None, tiles.threads_y, tiles.threads_x, lanes]
    _, y, x, v = sch.split(fused, factors)
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    if lanes > 1:
        sch.vectorize(v)


def tile_columns(sch: Any, rows: Any, columns: Any, tiles: Tiles) -> tuple[Any, ...]:
    """Split a tile for threads: column chunk, thread y, thread x, rows and columns a thread has."""
    y, i = sch.split(rows, [tiles.threads_y, None])
    chunk, x, j = sch.split(columns, [None, tiles.threads_x, tiles.columns])
    return chunk, y, x, i, j
