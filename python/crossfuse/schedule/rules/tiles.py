"""Tile sizes of the hand-written rules: given by the caller, or chosen so that they divide."""

from __future__ import annotations

from dataclasses import dataclass, fields

from crossfuse.errors import ScheduleRefused, refuse


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
    """

    rows: int = 0
    threads_x: int = 0
    threads_y: int = 0
    columns: int = 0
    depth: int = 0


def largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of `number` that is at most `limit` (at least 1).

    Examples
    --------
    >>> largest_divisor(688, 64)
    43
    """
    return max(each for each in range(1, max(1, min(number, limit)) + 1) if number % each == 0)


def staged_depth(extent: int, limit: int = 64) -> int:
    """Part of a reduction of `extent` to stage at a time: an exact divisor where one is useful.

    A part that does not divide is masked, and TVM then stages the whole extent.

    Examples
    --------
    >>> staged_depth(420), staged_depth(101)
    (60, 64)
    """
    divisor = largest_divisor(extent, limit)
    return divisor if divisor >= min(8, extent) else min(limit, extent)


def choose_tiles(given: Tiles, *, rows: int, widths: tuple[int, ...], depth: int) -> Tiles:
    """Fill in what the caller left open.

    Parameters
    ----------
    given : Tiles
        Zeros are chosen; anything else is taken and checked.
    rows : int
        Rows of the problem.
    widths : tuple[int, ...]
        Columns that one CTA computes in each of its nests; thread tiles divide all of them.
    depth : int
        Width of a slice of the intermediate (or the reduction's extent): staged parts divide it.

    Returns
    -------
    Tiles
        Complete.

    Raises
    ------
    ScheduleRefused
        If a given size does not divide what it must.
    """
    tile_rows = given.rows or min(16, rows)
    threads_y = given.threads_y or largest_divisor(tile_rows, 16)
    common = _gcd(widths)
    threads_x = given.threads_x or largest_divisor(common, 32 if threads_y <= 8 else 16)
    columns = given.columns or largest_divisor(common // max(threads_x, 1), 4)
    staged = given.depth or largest_divisor(depth, 64)
    chosen = Tiles(tile_rows, threads_x, threads_y, columns, staged)
    _positive(chosen)
    _divides("rows by threads_y", threads_y, tile_rows)
    for width in widths:
        _divides("columns of a CTA by threads_x * columns", threads_x * columns, width)
    _divides("staged depth", staged, depth)
    return chosen


def _gcd(numbers: tuple[int, ...]) -> int:
    from math import gcd

    return gcd(*numbers)


def _positive(tiles: Tiles) -> None:
    for field in fields(tiles):
        value = getattr(tiles, field.name)
        if value < 1:
            raise refuse(
                ScheduleRefused,
                "tiles",
                field.name,
                found=value,
                limit="a positive number",
                instead="leave the size out to have it chosen",
            )


def _divides(what: str, part: int, whole: int) -> None:
    if whole % part:
        divisors = [each for each in range(1, whole + 1) if whole % each == 0]
        raise refuse(
            ScheduleRefused,
            "tiles",
            what,
            found=f"{part}, which does not divide {whole}",
            limit=f"a divisor of {whole}",
            instead=f"take one of {', '.join(map(str, divisors[:12]))}, or leave the size out",
        )
