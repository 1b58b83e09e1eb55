"""How tiles lie: operands in stages, slices and registers; results in boxes that TMA stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, product
from math import prod

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, TMA_PITCH, WARPGROUP_ROWS
from crossfuse.lower.hopper.program.tile import (
    Gather,
    Place,
    Tile,
    WindowTile,
    window_map,
)
from crossfuse.lower.hopper.program.tile_program import Contraction, TileProgram
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse
from crossfuse.planner.families.parted import REGISTERS
from crossfuse.planner.kernels.phase import SLOTS, WIDTHS, box_columns, box_places, box_widths

#: Most rows of a box. PTX ISA, cp.async.bulk.tensor.
MAX_BOX = 256
#: Columns of 16 bits that one wgmma multiplies and one stmatrix stores, and the registers of a
#: thread that hold them.
GROUP, GROUP_REGISTERS = 16, 4
#: Types of which two are converted into one register, with PTX's name of the pair.
PACKED_TYPES = {"float16": "f16x2", "bfloat16": "bf16x2"}


@dataclass(frozen=True)
class Operand:
    """How a tile of a product's operand lies in a stage, and who loads which part of it.

    The tile is cut into boxes along its inner dimension. A K-major operand has one box in a stage,
    with rows of 128 bytes; one that is stored as [k, n] has one for every 64 or, where that leaves
    less beside the tile, 32 or 16 columns, each with the rows of the whole stage.
    """

    tile: Tile
    #: Descriptor of one copy.
    map: TensorMap
    #: Whether the reduction is the inner dimension.
    k_major: bool
    #: Boxes of a stage.
    boxes: int
    #: Bytes of a stage.
    size: int
    #: Places in the cluster whose CTAs need the same tile: each loads its part for all of them.
    shared_by: tuple[Place, ...]
    #: Whether each tile is loaded by one cluster alone, so that nobody finds it in L2 again.
    streamed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a box, and of its swizzle pattern."""
        return self.map.swizzle

    @property
    def sharers(self) -> int:
        """Number of CTAs that need the same tile."""
        return prod(each.extent for each in self.shared_by)

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy moves."""
        return prod(self.map.box) * ir.item_bytes(self.tile.dtype)

    @property
    def copies(self) -> int:
        """Number of copies that one CTA issues in a step."""
        return self.size // (self.box_bytes * self.sharers)


def make_operand(program: TileProgram, tile: Tile, *, k_major: bool) -> Operand:
    """Decide how a tile is loaded.

    Refused if TMA or wgmma cannot take the tensor as it is stored.
    """
    item = ir.item_bytes(tile.dtype)
    width = ROW_BYTES // item
    rows, columns = tile.shape
    _check_stored(tile, k_major)
    shared_by = _absent(program.cluster, tile)
    sharers = prod(each.extent for each in shared_by)
    if not k_major:
        width = box_columns(columns, width, sharers)
    boxes, row_bytes = -(-columns // width), width * item
    # Parts of a multicast start on a swizzle pattern of eight rows, or are whole boxes.
    divisible = rows % (8 * sharers) == 0 if k_major else boxes % sharers == 0
    if not divisible:
        shared_by, sharers = (), 1
    box_rows = rows // sharers if k_major else rows
    while box_rows > MAX_BOX:
        box_rows //= 2
    streamed = _is_streamed(program, tile, columns % width == 0)
    # The next step loads what follows in each row: memory is faster by larger pieces.
    fetch = 2 * ROW_BYTES if streamed and k_major else ROW_BYTES
    if isinstance(tile, WindowTile) and not tile.is_plain:
        described = window_map(tile, width, box_rows, item, ROW_BYTES)
    else:
        described = tensor_map(tile, (width, box_rows), row_bytes, fetch)
    return Operand(
        tile,
        described,
        k_major,
        boxes,
        boxes * rows * row_bytes,
        shared_by,
        streamed,
    )


def _check_stored(tile: Tile, k_major: bool) -> None:
    """Refuse operands whose storage order or type wgmma cannot multiply."""
    item, columns = ir.item_bytes(tile.dtype), tile.shape[1]
    width = ROW_BYTES // item
    if k_major and columns != width:
        raise _refuse(
            tile,
            f"{columns} elements of the reduction in a step",
            f"{width} elements ({ROW_BYTES} bytes)",
            f"split the reduction by {width}",
        )
    if not k_major and item != 2:
        raise _refuse(
            tile,
            f"a {tile.dtype} operand stored as [k, n]",
            "operands of 8 bits stored as [n, k]",
            "transpose the weight once, or use a 16-bit type",
        )


def tensor_map(tile: Tile, box: tuple[int, int], swizzle: int, fetch: int = ROW_BYTES) -> TensorMap:
    """Descriptor of copies of a row-major matrix; its rows must start on multiples of 16 bytes."""
    rows, columns = tile.extents
    pitch = columns * ir.item_bytes(tile.dtype)
    if pitch % TMA_PITCH:
        raise _refuse(
            tile,
            f"rows of {pitch} bytes",
            f"rows of a multiple of {TMA_PITCH} bytes, which TMA copies",
            "pad the rows, or leave the stages out for the general lowering",
        )
    name = str(tile.buffer.name)
    return TensorMap(f"{name}_map", name, (columns, rows), (pitch,), box, swizzle, fetch)


def _is_streamed(program: TileProgram, tile: Tile, whole: bool) -> bool:
    """Whether nobody else loads the tile; boxes that are not `whole` reach into a neighbour's.

    Windows of a convolution overlap: their pixels are loaded again.
    """
    if isinstance(tile, WindowTile) and not tile.is_plain:
        return False
    return whole and not _absent(program.grid, tile) and _is_one_to_one(program, tile)


def _is_one_to_one(program: TileProgram, tile: Tile) -> bool:
    """Whether clusters differ in the tile's origin: a loop over rows and columns names both."""
    known, seen = ir.sym.Analyzer(), set()
    grid = [each.var for each in program.grid]
    # Of one step, in the first CTA of the cluster.
    others = {var for each in tile.origin for var in ir.variables(each)} - set(grid)
    first = [ir.at_zero(each, *others) for each in tile.origin]
    for indices in product(*(range(each.extent) for each in program.grid)):
        values = (ir.tirx.IntImm(str(v.ty), i) for v, i in zip(grid, indices, strict=True))
        cluster = dict(zip(grid, values, strict=True))
        origin = tuple(ir.constant(known.simplify(ir.substitute(e, cluster))) for e in first)
        if origin in seen:
            return False
        seen.add(origin)
    return True


def _absent(places: tuple[Place, ...], tile: Tile) -> tuple[Place, ...]:
    """Places that the tile's origin does not depend on."""
    used = {var for index in tile.origin for var in ir.variables(index)}
    return tuple(each for each in places if each.extent > 1 and each.var not in used)


def _refuse(tile: Tile, found: str, limit: str, instead: str) -> Exception:
    return refuse(
        "tile-operand", f"tensor '{tile.buffer.name}'", found=found, limit=limit, instead=instead
    )


# Slices that a cluster gathers, [rank, row, column], as one matrix [row, column].
#
# In shared memory each multiplying warpgroup has its 64 rows by themselves, as core matrices of
# wgmma without a swizzle: eight columns (16 bytes) of all rows, then the next eight. So a slice is
# one piece, whatever its width.

#: Bytes of eight columns of a warpgroup's 64 rows.
CHUNK = 64 * 16


def share_bytes(gather: Gather) -> int:
    """Bytes of the intermediate that one warpgroup multiplies."""
    return gather.extents[1] // 8 * CHUNK


def slice_bytes(gather: Gather) -> int:
    """Bytes of one slice that one warpgroup multiplies."""
    return gather.width // 8 * CHUNK


def check_gather(gather: Gather, dtype: str) -> None:
    """Refuse slices that are no whole groups of 16 columns of 16-bit floats."""
    if gather.width % GROUP or dtype not in PACKED_TYPES:
        raise refuse(
            "tile-gather",
            f"tensor '{gather.slab.name}'",
            found=f"{gather.place.extent} slices of {gather.width} columns of {dtype}",
            limit=f"slices of a multiple of {GROUP} columns, of {' or '.join(PACKED_TYPES)}",
            instead="choose another cluster size, or keep the intermediate in L2 (grid_stage)",
        )


def check_depth(gather: Gather, depth: int) -> None:
    """Refuse steps that do not divide the gathered matrix: behind it there is nothing to multiply.

    Steps must be whole groups of columns, too.
    """
    columns = gather.extents[1]
    if columns % depth or depth % GROUP:
        raise refuse(
            "tile-gather",
            f"tensor '{gather.slab.name}'",
            found=f"{columns} columns in steps of {depth}",
            limit=f"whole steps of a multiple of {GROUP} columns",
            instead="split the reduction by another factor, or choose another cluster size",
        )


# An intermediate that stays in registers, as the left operand of the next product.
#
# What a thread holds of a wgmma's sums is what the next wgmma takes of its left operand, if pairs
# of neighbours are rounded to 16 bits and share a register. PTX ISA, wgmma, register fragments for
# A and D.


def kept_registers(columns: int) -> int:
    """Registers of a thread that hold some columns of the 64 rows of its warpgroup."""
    return columns // GROUP * GROUP_REGISTERS


def check_kept(tile: Tile) -> None:
    """Refuse tiles that wgmma cannot take from registers.

    Columns must be whole groups, and elements 16-bit floats.
    """
    if tile.shape[1] % GROUP or tile.dtype not in PACKED_TYPES:
        raise refuse(
            "tile-registers",
            f"tensor '{tile.buffer.name}'",
            found=f"{tile.shape[1]} columns of {tile.dtype} in registers",
            limit=f"a multiple of {GROUP} columns, of {' or '.join(PACKED_TYPES)}: sums lie in "
            "registers as operands of 16 bits do, and of no other width",
            instead="keep the intermediate in L2 (grid_stage), or store it to global memory",
        )


def check_kept_room(contraction: Contraction, consumers: int) -> None:
    """Refuse a product whose left operand and sums do not fit in registers together.

    `consumers` are the warpgroups that multiply. Steps must be whole groups of columns, too.
    """
    kept = kept_registers(contraction.steps * contraction.depth)
    sums = contraction.columns // 2 * len(contraction.products)
    most = REGISTERS[consumers]
    if kept + sums > most or contraction.depth % GROUP:
        raise refuse(
            "tile-registers",
            f"tensor '{contraction.left.buffer.name}'",
            found=f"{kept} registers of it beside {sums} sums, in steps of {contraction.depth} "
            "columns",
            limit=f"{most} registers a thread with {consumers} multiplying warpgroups, steps of a "
            f"multiple of {GROUP}",
            instead="make more parts of the intermediate, or narrower tiles of the output",
        )


# How a tile leaves registers: the boxes by which TMA stores it, and where they lie meanwhile.


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
    pitch = tile.extents[1] * ir.item_bytes(tile.dtype)
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


def _placed(tile: Tile, widths: tuple[int, ...], slots: int, page: int = 0) -> tuple[StoreBox, ...]:
    """Boxes side by side, in the places of `box_places`.

    Widths are counted in elements of 16 bits.
    """
    columns = {each: 2 * each // ir.item_bytes(tile.dtype) for each in widths}
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
