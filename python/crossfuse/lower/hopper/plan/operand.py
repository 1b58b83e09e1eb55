"""How a tile of an operand lies in a stage, and who loads which part of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import TMA_PITCH
from crossfuse.lower.hopper.program.tile import Place, Tile
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.program.window_tile import WindowTile, window_map
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES, box_columns

#: Rows of a box at most. PTX ISA, cp.async.bulk.tensor.
MAX_BOX = 256


@dataclass(frozen=True)
class Operand:
    """A tile of a product's operand in shared memory.

    The tile is cut into boxes along its inner dimension. A K-major operand has one box in a stage,
    with rows of 128 bytes; one that is stored as [k, n] has one for every 64 or, where that leaves
    less beside the tile, 32 or 16 columns, each with the rows of the whole stage.

    Attributes
    ----------
    tile : Tile
        What is loaded.
    map : TensorMap
        Descriptor of one copy.
    k_major : bool
        Whether the reduction is the inner dimension.
    boxes : int
        Boxes of a stage.
    size : int
        Bytes of a stage.
    shared_by : tuple[Place, ...]
        Places in the cluster whose CTAs want the same tile: each loads its part for all of them.
    streamed : bool
        Whether each tile is loaded by one cluster alone, so that nobody finds it in L2 again.
    """

    tile: Tile
    map: TensorMap
    k_major: bool
    boxes: int
    size: int
    shared_by: tuple[Place, ...]
    streamed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a box, and of its swizzle pattern."""
        return self.map.swizzle

    @property
    def sharers(self) -> int:
        """CTAs that want the same tile."""
        return prod(each.extent for each in self.shared_by)

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy moves."""
        return prod(self.map.box) * item_bytes(self.tile.dtype)

    @property
    def copies(self) -> int:
        """Copies that one CTA issues in a step."""
        return self.size // (self.box_bytes * self.sharers)


def item_bytes(dtype: str) -> int:
    """Bytes of an element."""
    return int(ir.tvm.DataType(dtype).bits) // 8


def make_operand(
    program: TileProgram, tile: Tile, *, k_major: bool, apart: Place | None = None
) -> Operand:
    """Decide how a tile is loaded; CTAs that differ in place `apart` share nothing.

    Raises
    ------
    LoweringRefused
        If TMA or wgmma cannot take the tensor as it is stored.
    """
    item = item_bytes(tile.dtype)
    width = ROW_BYTES // item
    rows, columns = tile.shape
    _check_stored(tile, k_major)
    shared_by = tuple(each for each in _sharing(program, tile) if each is not apart)
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
    """Refuse what wgmma cannot multiply as it is stored."""
    item, columns = item_bytes(tile.dtype), tile.shape[1]
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
    """Descriptor of copies of a row-major matrix.

    Raises
    ------
    LoweringRefused
        If its rows do not start on multiples of 16 bytes.
    """
    rows, columns = tile.extents
    pitch = columns * item_bytes(tile.dtype)
    if pitch % TMA_PITCH:
        raise _refuse(
            tile,
            f"rows of {pitch} bytes",
            f"rows of a multiple of {TMA_PITCH} bytes, which TMA copies",
            "pad the rows, or leave the stages out for the general lowering",
        )
    name = str(tile.buffer.name)
    return TensorMap(f"{name}_map", name, (columns, rows), (pitch,), box, swizzle, fetch)


def _sharing(program: TileProgram, tile: Tile) -> tuple[Place, ...]:
    """Places of the cluster that the tile's origin does not depend on."""
    return _absent(program.cluster, tile)


def _is_streamed(program: TileProgram, tile: Tile, whole: bool) -> bool:
    """Whether nobody else loads the tile; boxes that are not `whole` reach into a neighbour's.

    Windows overlap: their pixels are loaded again.
    """
    if isinstance(tile, WindowTile) and not tile.is_plain:
        return False
    return whole and not _absent(program.grid, tile) and _is_one_to_one(program, tile)


def _is_one_to_one(program: TileProgram, tile: Tile) -> bool:
    """Whether clusters differ in the tile's origin: a loop over rows and columns names both."""
    known, seen = ir.sym.Analyzer(), set()
    for indices in product(*(range(each.extent) for each in program.grid)):
        cluster = {
            each.var: ir.tirx.IntImm(str(each.var.ty), index)
            for each, index in zip(program.grid, indices, strict=True)
        }

        def value(var: Any, cluster: dict[Any, Any] = cluster) -> Any:
            return cluster.get(var, ir.tirx.IntImm(str(var.ty), 0))

        origin = tuple(
            ir.constant(known.simplify(ir.substitute(each, value))) for each in tile.origin
        )
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
