"""Boxes: what one TMA copy moves of a tile. The lowering cuts tiles by these functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from crossfuse.planner.counts import Count

#: Rows that a warpgroup multiplies, M of every wgmma, and so of each box that it stores.
WARPGROUP_ROWS = 64
#: Bytes of a row of a tile in shared memory: one pattern of the 128-byte swizzle. PTX ISA, tensor
#: swizzling modes.
ROW_BYTES = 128
#: Columns of boxes that a tile is stored in. Rows of all but the last are the span of a swizzle;
#: the last one's are of 16 bytes, the least that TMA copies.
WIDTHS = (64, 32, 16, 8)
#: Boxes of a tile that nobody waits for: one is filled while another is copied.
SLOTS = 2
#: Columns of a box that take as long to load as asking for it does.
_COPY = 16
#: Columns that tables reach to: no tile is wider.
_MOST = 256


def box_widths(columns: int, *, staged: bool) -> tuple[int, ...]:
    """Cut a tile of 16-bit elements, a multiple of 8 columns, into widths of boxes, wide to narrow.

    Where boxes are `staged`, all of them are in shared memory at once and the fewest are best;
    others take turns, and narrow ones of one width need the least room.
    """
    *swizzled, _ = WIDTHS
    equal = next((each for each in swizzled if columns % each == 0), 0)
    if equal and not staged:
        return (equal,) * (columns // equal)
    widths: list[int] = []
    for width in WIDTHS:
        count, columns = divmod(columns, width)
        widths += [width] * count
    return tuple(widths)


def box_columns(columns: int, most: int, sharers: int) -> int:
    """Columns of a box of a tile that is stored as [k, n]: those with which least is loaded.

    `most` columns are spanned by the widest pattern; rows of a quarter pattern are for the
    narrowest tiles alone. `sharers` CTAs want the same tile, and each load some boxes of it.
    """

    def cost(width: int) -> float:
        boxes = -(-columns // width)
        return boxes / (1 if boxes % sharers else sharers) * (width + _COPY)

    widths = (most, most // 2, most // 4) if columns <= most // 4 else (most, most // 2)
    return min(widths, key=cost)


def stored_bytes(columns: Count, *, staged: bool) -> Count:
    """Bytes of shared memory of a warpgroup's boxes of 16-bit elements; `staged` as `box_widths`.

    Columns are a multiple of 8 up to 256.
    """
    return _look_up(_stored(staged), columns)


def pages(columns: Count) -> Count:
    """Left stages that hold a warpgroup's tile of two blocks of 64 rows until it is stored."""
    return _look_up(_pages(), columns)


def loaded_columns(columns: Count, sharers: int) -> Count:
    """Columns that are loaded of a [k, n] tile of 16-bit elements: whole boxes."""
    return _look_up(_loaded(sharers)[0], columns)


def load_boxes(columns: Count, sharers: int) -> Count:
    """Boxes of a [k, n] tile of 16-bit elements."""
    return _look_up(_loaded(sharers)[1], columns)


def _look_up(table: np.ndarray, columns: Count) -> Count:
    if isinstance(columns, np.ndarray):
        return table[np.minimum(columns, _MOST).astype(np.int64)].astype(np.float64)
    return int(table[min(columns, _MOST)])


def box_places(widths: Sequence[int], slots: int, page: int = 0) -> tuple[int, ...]:
    """Place boxes of 64 rows, of widths in elements of 16 bits; where each begins, in bytes.

    They use `slots` in turn, whose sizes the first ones set, the widest. None lies in two pages of
    some bytes, if there are any.
    """
    found: list[int] = []
    end = 0
    for number, width in enumerate(widths):
        size = WARPGROUP_ROWS * 2 * width
        if page and end % page + size > page:
            end += page - end % page
        found.append(found[number - slots] if number >= slots else end)
        end = max(end, found[-1] + size)
    return tuple(found)


def _end(widths: Sequence[int], slots: int, page: int = 0) -> int:
    """Bytes of boxes that lie in such places."""
    places = box_places(widths, slots, page)
    sizes = (WARPGROUP_ROWS * 2 * each for each in widths)
    return max(map(sum, zip(places, sizes, strict=True)))


@cache
def _stored(staged: bool) -> np.ndarray:
    table = np.zeros(_MOST + 1, np.int64)
    for columns in range(8, _MOST + 1, 8):
        widths = box_widths(columns, staged=staged)
        table[columns] = _end(widths, len(widths) if staged else SLOTS)
    return table


@cache
def _loaded(sharers: int) -> np.ndarray:
    table = np.zeros((2, _MOST + 1), np.int64)
    for columns in range(8, _MOST + 1, 8):
        width = box_columns(columns, 64, sharers)
        boxes = -(-columns // width)
        table[:, columns] = boxes * width, boxes
    return table


@cache
def _pages() -> np.ndarray:
    """Tabulate pages of 128 rows of 128 bytes: boxes lie one behind the other, each in one page."""
    page = 2 * WARPGROUP_ROWS * ROW_BYTES
    table = np.zeros(_MOST + 1, np.int64)
    for columns in range(8, _MOST + 1, 8):
        widths = box_widths(columns, staged=True) * 2
        table[columns] = -(-_end(widths, len(widths), page) // page)
    return table
