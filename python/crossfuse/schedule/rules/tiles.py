"""Tile sizes of the hand-written rules: given by the caller, or chosen so that they divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import gcd
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import constant_extent
from crossfuse.calls import checked
from crossfuse.errors import Rule, ScheduleRefused
from crossfuse.hardware import MAX_SHARED_BYTES
from crossfuse.schedule.rules.pipelined import stage_at

_refused = Rule(ScheduleRefused, "tiles")


@checked
@dataclass(frozen=True)
class Tiles:
    """How a CTA's work is divided. Zero means: choose.

    Attributes
    ----------
    rows : int
        Rows of the output tile of a cluster.
    threads_x, threads_y : int
        Threads over columns and over rows.
    columns : int
        Columns a thread computes at a time.
    depth : int
        Elements of the reduction staged in shared memory at a time.

    Examples
    --------
    >>> from crossfuse.schedule.rules.split_k import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> func = prim_func(parse("gemm:M=64,K=256,N=64"))
    >>> sch = schedule_split_k(func, cluster=4, tiles=Tiles(rows=32, columns=32))
    >>> sch.cluster_layout().axes
    (('x', 4),)
    """

    rows: int = 0
    threads_x: int = 0
    threads_y: int = 0
    columns: int = 0
    depth: int = 0

    @property
    def width(self) -> int:
        """Columns that all threads compute at a time."""
        return self.threads_x * self.columns


def largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of `number` that is at most `limit` (at least 1).

    Examples
    --------
    >>> largest_divisor(688, 64)
    43
    """
    return max(each for each in range(1, max(1, min(number, limit)) + 1) if number % each == 0)


def staged_depth(extent: int, limit: int = 64) -> int:
    """Part of a reduction of `extent` to stage at a time.

    A divisor that is a multiple of 8 elements, so that rows of the stage are copied 16 bytes at a
    time; else the largest divisor, or all of a short reduction that has no useful one. Never a
    part that leaves a remainder: TVM masks it and stages the whole extent nevertheless.

    Examples
    --------
    >>> staged_depth(768), staged_depth(688), staged_depth(420), staged_depth(101)
    (64, 16, 60, 101)
    """
    vectors = [each for each in range(16, limit + 1, 8) if extent % each == 0]
    divisor = vectors[-1] if vectors else largest_divisor(extent, limit)
    return extent if divisor < 8 and extent <= 8 * limit else divisor


def choose_tiles(
    given: Tiles,
    *,
    rows: int,
    widths: tuple[int, ...],
    depth: int,
    shared_bytes: Callable[[Tiles], int],
) -> Tiles:
    """Choose the sizes that the caller left open, and check the others.

    The problem has `rows`. `widths` are columns that one CTA computes in each of its nests: thread
    tiles divide all of them. `depth` is the width of a slice of the intermediate (or the
    reduction's extent): staged parts divide it. Rows are halved, down to one, until the shared
    memory of a CTA fits; the lowering refuses what does not. A given size that does not divide what
    it must is refused.
    """
    tile_rows = min(16, rows)
    chosen = _complete(given, tile_rows, gcd(*widths), depth)
    while not given.rows and tile_rows > 1 and shared_bytes(chosen) > MAX_SHARED_BYTES:
        tile_rows = -(-tile_rows // 2)
        chosen = _complete(given, tile_rows, gcd(*widths), depth)
    check_tiles(chosen, widths=widths, depth=depth)
    return chosen


def check_tiles(tiles: Tiles, *, widths: tuple[int, ...], depth: int) -> None:
    """Refuse complete tiles of which one does not divide what it must, with the divisors."""
    _positive(tiles)
    _divides("rows by threads_y", tiles.threads_y, tiles.rows)
    for width in widths:
        _divides("columns of a CTA by threads_x * columns", tiles.width, width)
    _divides("staged depth", tiles.depth, depth)


def _complete(given: Tiles, rows: int, common: int, depth: int) -> Tiles:
    """Threads for 256 columns and rows at most, a few of them next to each other."""
    tile_rows = given.rows or rows
    threads_y = given.threads_y or largest_divisor(tile_rows, 16)
    limit = max(16, min(128, 256 // max(threads_y, 1)))
    threads_x = given.threads_x or largest_divisor(common, limit)
    most = max(1, min(4, 256 // max(threads_x, 1)))
    columns = given.columns or largest_divisor(common // max(threads_x, 1), most)
    return Tiles(tile_rows, threads_x, threads_y, columns, given.depth or staged_depth(depth))


def _positive(tiles: Tiles) -> None:
    for field in fields(tiles):
        value = getattr(tiles, field.name)
        if value < 1:
            raise _refused(
                field.name,
                found=value,
                limit="a positive number",
                instead="leave the size out to have it chosen",
            )


def _divides(what: str, part: int, whole: int) -> None:
    if whole % part:
        divisors = [each for each in range(1, whole + 1) if whole % each == 0]
        raise _refused(
            what,
            found=f"{part}, which does not divide {whole}",
            limit=f"a divisor of {whole}",
            instead=f"take one of {', '.join(map(str, divisors[:12]))}, or leave the size out",
        )


# Steps that the rules share: threads over loops, operands staged in shared memory.


def bind_threads(sch: Any, y: Any, x: Any) -> None:
    """Bind two loops to the threads of a CTA."""
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")


def stage_operand(sch: Any, block: Any, index: int, at: Any, tiles: Tiles) -> None:
    """Stage read buffer `index` of `block` in shared memory at loop `at`, by all threads."""
    stage = stage_at(sch, block, index, at)
    copy_by_threads(sch, stage, 2, tiles)
    # Rows one bank apart: threads that read one column of different rows do not collide.
    word = max(1, 32 // int(ir.tvm.DataType(str(sch.get(stage).writes[0].source.ty.dtype)).bits))
    sch.storage_align(stage, 0, axis=-2, factor=32 * word, offset=word)


def copy_by_threads(sch: Any, stage: Any, dims: int, tiles: Tiles, vector: int = 1) -> None:
    """Bind the innermost `dims` loops of a copying block to all threads of the CTA.

    `vector` elements go together where the row length allows it; threads that are left over are
    masked by the exact bound of the fused loop.
    """
    loops = list(sch.get_loops(stage))[-dims:]
    row = constant_extent(sch, "rule", loops[-1])
    lanes = vector if row % vector == 0 else 1
    factors = [None, tiles.threads_y, tiles.threads_x, lanes]
    _, y, x, v = sch.split(sch.fuse(*loops), factors)
    bind_threads(sch, y, x)
    if lanes > 1:
        sch.vectorize(v)


def tile_columns(sch: Any, rows: Any, columns: Any, tiles: Tiles) -> tuple[Any, ...]:
    """Split a tile for threads: column chunk, thread y, thread x, rows and columns a thread has."""
    y, i = sch.split(rows, [tiles.threads_y, None])
    chunk, x, j = sch.split(columns, [None, tiles.threads_x, tiles.columns])
    return chunk, y, x, i, j
