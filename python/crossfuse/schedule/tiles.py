"""Measures the tile of a buffer that one iteration of a loop works on."""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import binds, in_loops, position, span, written_buffer
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import MAX_SHARED_BYTES
from crossfuse.markers import DSM_DTYPES
from crossfuse.schedule.extents import is_sampled


def written_starts(sch: Any, block: Any) -> list[Any]:
    """First index that a block writes, by dimension, in terms of its loops."""
    return [in_loops(sch, block, each.min) for each in sch.get(block).writes[0].region]


def tile_extents(sch: Any, block: Any, loop: Any) -> tuple[int, ...]:
    """Extents of the region that a block writes in one iteration of `loop`, by buffer dimension."""
    inner = [sch.get(each) for each in _inside(sch, block, loop)]
    return tuple(span(start, inner) for start in written_starts(sch, block))


def is_sampled_tile(sch: Any, block: Any, loop: Any) -> bool:
    """Whether a mutation of the trace may change `tile_extents`."""
    starts = written_starts(sch, block)
    return any(
        is_sampled(sch, each)
        for each in _inside(sch, block, loop)
        if any(binds(sch.get(each).loop_var, start) for start in starts)
    )


def _inside(sch: Any, block: Any, loop: Any) -> list[Any]:
    """The loops of a block inside one of them."""
    loops, depth = position(sch, "tile", block, loop)
    return loops[depth + 1 :]


def check_dtype(rule: str, where: str, buffer: Any) -> None:
    """Refuse an element type that has no DSM access."""
    dtype = str(buffer.ty.dtype)
    if dtype not in DSM_DTYPES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"element type {dtype}",
            limit=", ".join(DSM_DTYPES),
            instead="compute the exchanged tile in one of these types and cast afterwards",
        )


def check_slab(sch: Any, rule: str, where: str, block: Any, rank: Any) -> None:
    """Refuse a slab, written by `block` in one iteration of loop `rank`, that no CTA can hold."""
    dtype = str(written_buffer(sch, block).ty.dtype)
    # The leading extent is the rank's: one, in one iteration.
    extents = tile_extents(sch, block, rank)[1:]
    size = prod(extents) * (int(ir.tvm.DataType(dtype).bits) // 8)
    if size > MAX_SHARED_BYTES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"a slab of {' x '.join(map(str, extents))} {dtype}, {size} bytes",
            limit=f"{MAX_SHARED_BYTES} bytes of shared memory in a CTA",
            instead="split the output loops and reorder the parts outside the exchange, so that "
            "a smaller tile is exchanged at a time",
        )
