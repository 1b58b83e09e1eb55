"""How a tile leaves registers: the boxes that TMA stores it in, and where they wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from crossfuse.lower.hopper.operand import PITCH, WARPGROUP_ROWS, item_bytes, tensor_map
from crossfuse.lower.hopper.tile import Tile
from crossfuse.lower.hopper.tile_program import TileProgram
from crossfuse.lower.image import TensorMap

#: Types of which two are converted into one register, by what PTX calls the pair.
PACKED_TYPES = {"bfloat16": "bf16x2", "float16": "f16x2"}
#: Columns of boxes. Rows of all but the last are the span of a swizzle; the last one's are of 16
#: bytes, the least that TMA copies: those of eight rows lie in different banks as they are.
_WIDTHS = (64, 32, 16, 8)
#: Boxes of a tile that nobody waits for: one is filled while another is copied.
_SLOTS = 2


@dataclass(frozen=True)
class StoreBox:
    """What one copy stores: some columns of the rows of a warpgroup.

    Attributes
    ----------
    first, columns : int
        First column in the tile, and number of columns.
    map : TensorMap
        Descriptor of the copy.
    offset : int
        Bytes from the first box of a warpgroup to this one. Boxes of one offset take turns.
    """

    first: int
    columns: int
    map: TensorMap
    offset: int

    @property
    def pitch(self) -> int:
        """Bytes of a row."""
        return 2 * self.columns

    @property
    def size(self) -> int:
        """Bytes in shared memory: a multiple of 1024, so that each swizzle pattern is whole."""
        return WARPGROUP_ROWS * self.pitch


@dataclass(frozen=True)
class StorePlan:
    """How a tile leaves registers.

    Attributes
    ----------
    boxes : tuple[StoreBox, ...]
        Staged in shared memory and stored by TMA, in the order of their columns; none stores
        elements directly.
    """

    boxes: tuple[StoreBox, ...] = ()

    @property
    def slots(self) -> int:
        """Boxes of a warpgroup that are in shared memory at a time."""
        return len({each.offset for each in self.boxes})

    @property
    def slot_bytes(self) -> int:
        """Bytes of the boxes of one warpgroup."""
        return max((each.offset + each.size for each in self.boxes), default=0)

    @property
    def batches(self) -> tuple[tuple[StoreBox, ...], ...]:
        """Boxes that leave together: all if there is room for all of them, else each alone."""
        if self.slots == len(self.boxes):
            return (self.boxes,)
        return tuple((each,) for each in self.boxes)

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        """Descriptors of all boxes, each once."""
        return tuple(dict.fromkeys(each.map for each in self.boxes))

    def pending(self, batch: int) -> int:
        """Batches before one that may still be read while it is filled.

        Parameters
        ----------
        batch : int
            Number of the one that is filled.
        """
        # An odd number of boxes ends with the slot that the next tile begins with.
        again = batch == 0 and len(self.boxes) % self.slots
        return 0 if again or len(self.batches) == 1 else self.slots - 1

    def with_maps(self, change: Callable[[TensorMap], TensorMap]) -> StorePlan:
        """Return the same boxes with other descriptors."""
        return StorePlan(tuple(replace(each, map=change(each.map)) for each in self.boxes))


def plan_store(program: TileProgram) -> StorePlan:
    """Plan a store: by TMA where elements are 16 bits wide and rows of the output can be copied.

    Parameters
    ----------
    program : TileProgram
        The program that stores; the columns of its tile are a multiple of 8.
    """
    tile = program.store.tile
    pitch = tile.extents[1] * item_bytes(tile.dtype)
    elsewhere = program.exchange is not None or program.gives is not None or program.keeps
    if tile.dtype not in PACKED_TYPES or pitch % PITCH or elsewhere:
        return StorePlan()
    widths = box_widths(tile.shape[1], staged=program.staged)
    # Others wait for a tile that is staged: all its boxes leave at once.
    return StorePlan(_placed(tile, widths, len(widths) if program.staged else _SLOTS))


def box_widths(columns: int, *, staged: bool) -> tuple[int, ...]:
    """Cut a tile into boxes, from wide to narrow.

    Parameters
    ----------
    columns : int
        Of the tile: a multiple of 8.
    staged : bool
        Whether all boxes are in shared memory at once. The fewest are best then; others take turns,
        and narrow ones of one width need the least room.

    Returns
    -------
    tuple[int, ...]
        Columns of each box.
    """
    *swizzled, _ = _WIDTHS
    equal = next((each for each in swizzled if columns % each == 0), 0)
    if equal and not staged:
        return (equal,) * (columns // equal)
    widths: list[int] = []
    for width in _WIDTHS:
        count, columns = divmod(columns, width)
        widths += [width] * count
    return tuple(widths)


def _placed(tile: Tile, widths: tuple[int, ...], slots: int) -> tuple[StoreBox, ...]:
    """Boxes side by side that go round the slots; the first ones, the widest, are their sizes."""
    firsts = accumulate(widths, initial=0)
    maps = {each: tensor_map(tile, (each, WARPGROUP_ROWS), _swizzle(each)) for each in widths}
    boxes: list[StoreBox] = []
    end = 0
    for number, (first, width) in enumerate(zip(firsts, widths, strict=False)):
        offset = boxes[number - slots].offset if number >= slots else end
        boxes.append(StoreBox(first, width, maps[width], offset))
        end = max(end, offset + boxes[-1].size)
    return tuple(boxes)


def _swizzle(width: int) -> int:
    """Bytes that the swizzle of a box spans."""
    return 0 if width == _WIDTHS[-1] else 2 * width
