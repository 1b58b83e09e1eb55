"""Reads the loop over chunks of a row off the statements that make it."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper.rows.program import ChunkLoop
from crossfuse.lower.refusal import refuse
from crossfuse.markers import CHUNKS


def is_chunk_loop(loop: Any) -> bool:
    """Whether a loop goes through chunks of a row."""
    return CHUNKS in loop.annotations


def read_chunks(body: Any, row: Any, lane: Any, factors: Any) -> tuple[Any, ChunkLoop]:
    """Read the loop over chunks.

    Parameters
    ----------
    body : Any
        Statements of a row: what it begins with, then the loop.
    row : tvm.ir.Var
        Number of the row.
    lane : tvm.ir.Var
        Of the thread.
    factors : Any
        The matrix that sums of the product are corrected by.

    Returns
    -------
    tuple[tvm.tirx.For, ChunkLoop]
        The loop, and what is to be known of it.

    Raises
    ------
    LoweringRefused
        If there is anything behind the loop, or a chunk reads more than elements of one matrix.
    """
    *before, loop = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    if not isinstance(loop, ir.For) or not is_chunk_loop(loop):
        raise _refused("rows", "statements behind the loop over chunks", "a loop, and nothing else")
    carried = tuple(each.buffer for each in before if isinstance(each, ir.AllocBuffer))
    others = [each for each in before if not isinstance(each, ir.AllocBuffer)]
    size, count = int(loop.annotations[CHUNKS]), ir.constant(loop.extent)
    source = _source(loop, row, lane, size)
    begin = ir.SeqStmt(others) if len(others) > 1 else others[0]
    return loop, ChunkLoop(loop.loop_var, count or 0, size, begin, carried, source, factors)


def _source(loop: Any, row: Any, lane: Any, size: int) -> Any:
    """The matrix whose elements of the chunk are read."""
    loads: list[Any] = []
    ir.walk(loop.body, (ir.TensorLoad, loads.append))
    given = [each for each in loads if str(each.source.scope()) == "global"]
    sources = list(dict.fromkeys(each.source for each in given))
    name = f"loop '{loop.loop_var.name}'"
    if len(sources) != 1 or len(sources[0].ty.shape) != 2:
        names = ", ".join(f"'{each.name}'" for each in sources)
        raise _refused(name, f"loads of {names}", "loads of one matrix, which has the rows")
    known = known_in(loop, lane)
    for each in given:
        place = known.simplify(each.indices[1] - loop.loop_var * size)
        bound = known.const_int_bound(place)
        inside = bound.min_value >= 0 and bound.max_value < size
        if not each.indices[0].same_as(row) or not inside:
            raise _refused(
                name,
                f"a load of '{each.source.name}{list(each.indices)}'",
                f"elements of the row in the {size} of the chunk",
            )
    return sources[0]


def known_in(body: Any, lane: Any) -> Any:
    """An analyzer that knows the ranges of all loops of some statements, and of lanes."""
    known = ir.sym.Analyzer()
    known.bind(lane, ir.tvm.ir.Range(0, WARP))

    def visit(loop: Any) -> None:
        known.bind(loop.loop_var, ir.tvm.ir.Range.from_min_extent(loop.min, loop.extent))

    ir.walk(body, (ir.For, visit))
    return known


def _refused(where: str, found: str, limit: str) -> Exception:
    return refuse(
        "rows",
        where,
        found=found,
        limit=limit,
        instead="schedule as schedule_rows_gemm does, or make whole rows: leave the chunk out",
    )
