"""How a tile leaves registers: the boxes by which TMA stores it, and where they lie meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from crossfuse.hardware import ROW_BYTES, TMA_PITCH, WARPGROUP_ROWS
from crossfuse.lower.hopper.plan.operands import PACKED_TYPES, item_bytes, tensor_map
from crossfuse.lower.hopper.program.tile import Tile
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.image import TensorMap
from crossfuse.planner.kernels.phase import SLOTS, WIDTHS, box_places, box_widths

#: Boxes of float32 sums in shared memory at once where one warpgroup multiplies: 32 KiB at most.
#: Where there are two, ptxas spills the addresses of so many: they take turns.
_SLOTS_OF_SUMS = 4


@dataclass(frozen=True)
class StoreBox:
    """What one copy stores: some columns of a block of 64 rows."""

    #: First column in the tile.
    first: int
    #: Number of columns.
    columns: int
    #: Bytes of a row: the span of the swizzle, or 16 without one.
    pitch: int
    #: Descriptor of the copy.
    map: TensorMap
    #: Bytes from the first box of a warpgroup to this one. Boxes of one offset take turns.
    offset: int
    #: Number of the block among those of the warpgroup.
    block: int = 0

    @property
    def size(self) -> int:
        """Bytes in shared memory: a multiple of 1024, so that each swizzle pattern is whole."""
        return WARPGROUP_ROWS * self.pitch


@dataclass(frozen=True)
class StorePlan:
    """How a tile leaves registers: by boxes, or element by element."""

    #: Staged in shared memory and stored by TMA, block by block in the order of their columns;
    #: without any, elements are stored directly.
    boxes: tuple[StoreBox, ...] = ()
    #: Bytes of a warpgroup's share of a left stage, if boxes lie in the stages that it multiplied
    #: last: offsets count through one page after another, and no box lies in two. 0 if boxes have a
    #: place of their own.
    page: int = 0

    @property
    def slots(self) -> int:
        """Number of a warpgroup's boxes that are in shared memory at a time."""
        return len({each.offset for each in self.boxes})

    @property
    def slot_bytes(self) -> int:
        """Bytes of the boxes of one warpgroup."""
        return max((each.offset + each.size for each in self.boxes), default=0)

    @property
    def pages(self) -> int:
        """Number of left stages in whose place boxes lie."""
        return -(-self.slot_bytes // self.page) if self.page else 0

    @property
    def own_bytes(self) -> int:
        """Bytes of one warpgroup's boxes in a place of their own."""
        return 0 if self.page else self.slot_bytes

    @property
    def batches(self) -> tuple[tuple[StoreBox, ...], ...]:
        """Boxes that leave together: those of a block if there is room for all, else one by one."""
        if self.slots == len(self.boxes):
            blocks = groupby(self.boxes, key=lambda each: each.block)
            return tuple(tuple(boxes) for _, boxes in blocks)
        return tuple((each,) for each in self.boxes)

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        """Descriptors of all boxes, each once."""
        return tuple(dict.fromkeys(each.map for each in self.boxes))

    def pending(self, batch: int) -> int:
        """How many preceding batches may still be read by TMA while `batch` is filled."""
        if self.slots == len(self.boxes):
            return batch  # all of this tile, and none of the one before
        # An odd number of boxes ends with the slot that the next tile begins with.
        again = batch == 0 and len(self.boxes) % self.slots
        return 0 if again else self.slots - 1

    def with_maps(self, change: Callable[[TensorMap], TensorMap]) -> StorePlan:
        """The same boxes with other descriptors."""
        boxes = tuple(replace(each, map=change(each.map)) for each in self.boxes)
        return replace(self, boxes=boxes)


def plan_store(program: TileProgram, blocks: int = 1) -> StorePlan:
    """Plan a store: by TMA where elements are 16 bits wide and rows of the output can be copied.

    The columns of a tile are a multiple of 8. Tiles of several `blocks` of 64 rows for each
    warpgroup leave no room for boxes beside the rings, so these lie in left stages. So do those of
    tiles whose rows are made first: while rows are made, memory delivers no more weights than there
    are stages for. A norm before 256 x 4096 by 12288 took 44.8 us instead of 46.5 on an H100.
    """
    tile = program.store.tile
    pitch = tile.extents[1] * item_bytes(tile.dtype)
    if program.store.adds:
        return _plan_addition(tile, program.contraction.rows > WARPGROUP_ROWS)
    elsewhere = program.exchange is not None or program.gives is not None or program.keeps
    if tile.dtype not in PACKED_TYPES or pitch % TMA_PITCH or elsewhere:
        return StorePlan()
    by_chunks = program.rows is not None and program.rows.chunks is not None
    if blocks > 1 or (program.rows is not None and not by_chunks):
        found = _in_stages(program, blocks)
        if found.boxes or blocks > 1:
            return found
    columns = tile.shape[1]
    widths = box_widths(columns, staged=program.staged)
    # Rows that are made chunk by chunk come to shared memory, too: boxes leave them room.
    if by_chunks and columns % WIDTHS[1] == 0:
        widths = (WIDTHS[1],) * (columns // WIDTHS[1])
    # Others wait for a tile that is staged: all its boxes leave at once.
    return StorePlan(_placed(tile, widths, len(widths) if program.staged else SLOTS))


def _in_stages(program: TileProgram, blocks: int) -> StorePlan:
    """Boxes of all blocks in the left stages that were multiplied last.

    Nobody else reads a warpgroup's rows of a stage, and it releases the stage once the boxes in it
    have left. What a tile does not multiply is not its to use: tiles of fewer steps than their
    boxes need are stored without any.
    """
    tile, contraction = program.store.tile, program.contraction
    page = blocks * WARPGROUP_ROWS * ROW_BYTES
    widths = box_widths(tile.shape[1], staged=True)
    boxes = _placed(tile, widths * blocks, blocks * len(widths), page)
    boxes = tuple(
        replace(each, first=boxes[number % len(widths)].first, block=number // len(widths))
        for number, each in enumerate(boxes)
    )
    plan = StorePlan(boxes, page)
    stages = min(contraction.steps, contraction.stages or contraction.steps)
    return plan if plan.pages <= stages else StorePlan()


def _plan_addition(tile: Tile, in_turns: bool) -> StorePlan:
    """Boxes of float32 sums, which are added rather than stored."""
    widths = box_widths(2 * tile.shape[1], staged=True)
    slots = SLOTS if in_turns else _SLOTS_OF_SUMS
    return StorePlan(_placed(tile, widths, min(len(widths), slots)))


def _placed(tile: Tile, widths: tuple[int, ...], slots: int, page: int = 0) -> tuple[StoreBox, ...]:
    """Boxes side by side, in the places of `box_places`.

    Widths are counted in elements of 16 bits.
    """
    columns = {each: 2 * each // item_bytes(tile.dtype) for each in widths}
    firsts = accumulate((columns[each] for each in widths), initial=0)
    maps = {
        each: tensor_map(tile, (columns[each], WARPGROUP_ROWS), _swizzle(each)) for each in widths
    }
    return tuple(
        StoreBox(first, columns[width], 2 * width, maps[width], offset)
        for first, width, offset in zip(
            firsts, widths, box_places(widths, slots, page), strict=False
        )
    )


def _swizzle(width: int) -> int:
    """Bytes that the swizzle of a box spans."""
    return 0 if width == WIDTHS[-1] else 2 * width
