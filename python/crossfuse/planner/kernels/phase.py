"""A phase of a kernel as numbers: what each CTA loads, multiplies, exchanges and stores, in boxes.

All families are made of the same phases, as in the lowering: a loop over tiles in which a ring of
left tiles and one of right tiles are filled by TMA and emptied by wgmma. So shared memory and time
are functions of phases, and a family only says how its tiles make them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from crossfuse.hardware import ROW_BYTES, WARPGROUP_ROWS
from crossfuse.planner.kernels.shape import Count, Flag, Shape, TileRule, ceil_div, choose, least

#: Float32 registers of a thread for sums where the loading warpgroup makes rows, too.
SUMS_BESIDE_ROWS = 160
#: The same where rows are made chunk by chunk, and the most rows of a tile then: one block of 64
#: for each of three warpgroups, whose sums have two factors in a thread.
SUMS_BESIDE_CHUNKS, TALLEST_BY_CHUNKS = 128, 192
#: Warps that make rows, and rows of one at most where it makes them chunk by chunk: it keeps their
#: states in registers. Rows that come by one copy then.
ROW_WARPS, MOST_ROWS, _TOGETHER = 2, 16, 4
#: Elements of a batch of rows at most, unless it is one row: a thread has 64 of them in registers,
#: or 32 beside the sums of tiles of more rows.
_ELEMENTS, _FEW_ROWS = 2048, 128
#: Batches of a warp's ring at most: one comes while the one before is made to rows.
ROW_SLOTS = 2
#: Registers of a thread for the sums of both products of a kernel, by how many warpgroups multiply:
#: ptxas keeps both. Beyond them it spilt 900 to 2600 bytes and made products wait for each other
#: (C7512): with 176 sums in three warpgroups a kernel took 10 times as long on an H200, with 200 in
#: two 6 times; 116 and 196 were as fast as ever.
SUMS_OF_BOTH = {1: 240, 2: 196, 3: 132}
#: Groups of rows that parts of a multicast start on.
_PATTERN = 8


@dataclass(frozen=True)
class Phase:
    """One phase, of one candidate or of many."""

    #: Of a CTA's tile, of one product.
    rows: Count
    columns: Count
    #: Right tiles that a left tile is multiplied by.
    products: int
    #: Elements of the reduction in a step.
    depth: Count
    #: Steps of a CTA for a tile.
    steps: Count
    #: Tiles that a cluster makes at a time, in the whole phase.
    tiles: Count
    #: Bytes of a stage; 0 for a left operand that is gathered, or in registers.
    left: Count
    right: Count
    #: CTAs that each load a part of a tile for all of them.
    left_sharers: Count = 1
    right_sharers: Count = 1
    #: Copies that a CTA issues in a step.
    copies: Count = 2
    #: Clusters that read each of the weights: tiles one below the other.
    readers: Count = 1
    #: CTAs of a cluster that each sum a part of the reduction.
    split: Count = 1
    #: Bytes of a place for the tiles that a warpgroup stores.
    boxes: Count = 0
    #: Left stages in which tiles of 256 rows wait for their store instead.
    pages: Count = 0
    #: Bytes of partial sums that the CTAs of a cluster send to one of them.
    received: Count = 0
    #: Bytes of the intermediate in each CTA.
    gathered: Count = 0
    #: Whether it makes slices that the cluster gathers, or an intermediate in registers.
    gathers: bool = False
    keeps: bool = False
    #: Cycles of the functions of a warp's results, see `crossfuse.planner.chain.spec.Product`.
    functions: Count = 0

    @property
    def warpgroups(self) -> Count:
        """Warpgroups that multiply: one for 64 rows, of 256 rows two with 128 each."""
        return warpgroups_of(self.rows)

    @property
    def blocks(self) -> Count:
        """Blocks of 64 rows of each warpgroup."""
        return blocks_of(self.rows)

    @property
    def sums(self) -> Count:
        """Float32 registers of a thread that hold sums."""
        return self.blocks * self.products * self.columns // 2


def warpgroups_of(rows: Count) -> Count:
    """Warpgroups that multiply a tile of some rows, 64 to 256, a multiple of 64.

    More than three leave a thread 112 registers.
    """
    return least(ceil_div(rows, WARPGROUP_ROWS), choose(rows > 192, 2, 3))


def blocks_of(rows: Count) -> Count:
    """Blocks of 64 rows that each of them multiplies, one below the other."""
    return choose(rows > 192, 2, 1)


def by_warpgroups(table: Mapping[int, int], groups: Count) -> Count:
    """Look up what a table has for one, two or three warpgroups that multiply."""
    return choose(groups > 2, table[3], choose(groups > 1, table[2], table[1]))


def hold_both(first: Phase, second: Phase) -> TileRule:
    """Make the rule that registers hold the sums of two products of one kernel."""
    most = by_warpgroups(SUMS_OF_BOTH, first.warpgroups)
    text = "registers hold the sums of both products"
    return TileRule("registers", text, first.sums + second.sums <= most)


def stored(
    rows: Count, columns: Count, steps: Count, item: int, *, staged: bool
) -> tuple[Count, Count]:
    """Bytes of the boxes of a warpgroup, and left stages that they lie in.

    Tiles of fewer `steps` than their boxes need stages are stored without any. `item` is bytes of
    an element; only those of 16 bits leave by TMA. `staged` is whether others wait for the tile.
    """
    if item != 2:
        return 0, 0
    tall = rows > 192
    needed = pages(columns)
    own = choose(tall, 0, stored_bytes(columns, staged=staged))
    return own, choose(tall & (needed <= steps), needed, 0)


def widest(rows: int, products: int = 1) -> int:
    """Columns of a tile that registers have room for, of each of several products."""
    return (256 if rows <= 128 else 192) // products // 8 * 8


def widest_of(rows: Count, products: int = 1) -> Count:
    """`widest` of many, whose rows are 64, 128, 192 or 256."""
    return choose(rows <= 128, widest(64, products), widest(256, products))


def left_tile(rows: Count, sharers: Count) -> tuple[Count, Count]:
    """Bytes of a stage of left tiles, and how many CTAs really share it.

    Rows of a part start on a swizzle pattern; else each CTA loads all of its tile.
    """
    return rows * ROW_BYTES, choose(rows % (_PATTERN * sharers) == 0, sharers, 1)


def right_tile(shape: Shape, columns: Count, depth: Count, sharers: Count) -> tuple[Count, Count]:
    """Bytes of a stage of one product's right tile, and how many CTAs really share it."""
    if shape.k_major:
        divides = columns % (_PATTERN * sharers) == 0
        return columns * ROW_BYTES, choose(divides, sharers, 1)
    return _as_stored(shape, columns, depth, sharers)


def copies_of(shape: Shape, columns: Count, sharers: Count) -> Count:
    """Copies of a right tile in a step that one of the CTAs which share it issues."""
    if shape.k_major:
        return 1
    boxes: Any = load_boxes(columns, 1)
    return ceil_div(boxes, sharers)


def _as_stored(shape: Shape, columns: Count, depth: Count, sharers: Count) -> tuple[Count, Count]:
    """`right_tile` of weights stored as [k, n], whose boxes have widths of their own."""
    if not isinstance(sharers, np.ndarray):
        width, boxes = loaded_columns(columns, sharers), load_boxes(columns, sharers)
        return width * depth * shape.item, choose(boxes % sharers == 0, sharers, 1)
    size: Any = np.zeros(np.broadcast(sharers, columns, depth).shape)
    shared: Any = np.ones_like(size)
    for each in np.unique(sharers):
        count, here = int(each), sharers == each
        width, boxes = loaded_columns(columns, count), load_boxes(columns, count)
        size = np.where(here, width * depth * shape.item, size)
        shared = np.where(here & (boxes % count == 0), count, shared)
    return size, shared


def sums_received(shape: Shape, rows: Count, columns: Count, width: Count, split: Count) -> Count:
    """Bytes of float32 partial sums that a CTA receives of all CTAs of its cluster.

    `width` is columns of the output, `split` the CTAs that share the reduction; nothing is sent
    where it is 1.
    """
    inside = least(rows, shape.m)
    # Of one row, each CTA sums some columns; of several, as many rows as the others.
    whole = choose(shape.m > 1, ceil_div(inside, split) * split, inside)
    return choose(split > 1, whole * least(columns, width) * 4, 0)


def divides_sums(shape: Shape, rows: Count, columns: Count, split: Count) -> Flag:
    """Whether CTAs that share a reduction can each sum a slice of a tile: whole rows, or pairs.

    Registers hold pairs of a row's `columns`, which are those of the tile that the product has.
    """
    if shape.m == 1:
        return columns % (2 * split) == 0
    paired = columns % 2 == 0
    inside = least(rows, shape.m)
    even = inside % split == 0
    # The only tile of rows may have slices that end before it does.
    short = (shape.m < rows) & (ceil_div(inside, split) * split <= rows)
    return paired & (even | short)


def row_batches(tile: int, sharers: int, chunk: int) -> tuple[int, int]:
    """Batches of rows that a warp makes of a chunk for a tile, and rows of each.

    `sharers` CTAs share the rows of their `tile`.
    """
    most = (_ELEMENTS if tile <= _FEW_ROWS else _ELEMENTS // 2) // chunk
    rows = -(-tile // (sharers * ROW_WARPS))
    batches = -(-rows // max(min(_TOGETHER, most), 1))
    if batches > ROW_SLOTS:
        batches = -(-batches // ROW_SLOTS) * ROW_SLOTS
    return batches, -(-rows // batches)


# Boxes: what one TMA copy moves of a tile. The lowering cuts tiles by these functions.

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
