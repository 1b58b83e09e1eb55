"""How the CTAs of a kernel share out rows that are made chunk by chunk.

A CTA makes a part of the rows of each tile that it multiplies: CTAs whose tiles have the same rows
share them. So what is needed first is made first, and a chunk of a tile has one flag, which each of
these CTAs raises once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import TMA_PITCH
from crossfuse.lower.hopper.plan.operand import item_bytes
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.rows.program import ChunkLoop
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES

#: Warps that make rows, and the first of them; before them one loads, and one raises flags.
ROW_WARPS, FIRST_WARP, FLAG_WARP = 2, 2, 1
#: Rows of a warp at most, whose states it keeps in registers, and those that come by one copy.
_MOST, _TOGETHER = 16, 4
#: Elements of a batch at most, unless it is one row: a thread has 64 of them in registers, or 32
#: beside the sums of tiles of more rows (see `room.BESIDE_CHUNKS`).
_ELEMENTS, _FEW_ROWS = 2048, 128
#: Batches of a warp's ring at most: one comes while the one before is made to rows.
_SLOTS = 2
#: Elements of a row of a box. PTX ISA, cp.async.bulk.tensor.
BOX = 256


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Which rows a CTA makes, and what it keeps for them.

    Attributes
    ----------
    loop : ChunkLoop
        The chunks.
    share : Any
        Which of the CTAs whose tiles have the same rows one is, over the program's places: the
        number of its tile of columns.
    sharers : int
        How many these are.
    tile : int
        Rows of a tile.
    own : int
        Rows of a tile that a warp makes, at most: whole batches.
    batch : int
        Rows that come by one copy, and are made side by side; divides `own`.
    slots : int
        Batches of a warp's ring; divides `batches`.
    exact : bool
        Whether all rows of all warps exist.
    source, factors : TensorMap
        Descriptors of copies of the chunks, and of the factors of a chunk for a tile.
    item : int
        Bytes of an element of the source.
    """

    loop: ChunkLoop
    share: Any
    sharers: int
    tile: int
    own: int
    batch: int
    slots: int
    exact: bool
    source: TensorMap
    factors: TensorMap
    item: int

    @property
    def batches(self) -> int:
        """Copies that bring a warp's rows of a chunk."""
        return self.own // self.batch

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch."""
        return self.batch * self.loop.size * self.item

    @property
    def ring_bytes(self) -> int:
        """Bytes of the rings of all warps."""
        return ROW_WARPS * self.slots * self.batch_bytes

    @property
    def barriers(self) -> int:
        """Barriers: of each place, and two pairs between the warps that make rows and the flags."""
        return ROW_WARPS * self.slots + 4


def plan_chunks(program: TileProgram) -> ChunkPlan | None:
    """Share out the rows of a program.

    Parameters
    ----------
    program : TileProgram
        From `recover`.

    Returns
    -------
    ChunkPlan | None
        None if no rows are made chunk by chunk.

    Raises
    ------
    LoweringRefused
        If a warp would have too many rows, or TMA cannot copy what they need.
    """
    rows, left = program.rows, program.contraction.left
    if rows is None or rows.chunks is None:
        return None
    loop = rows.chunks
    tile = left.shape[0]
    share, sharers = _share(program)
    elements = _ELEMENTS if tile <= _FEW_ROWS else _ELEMENTS // 2
    batches, batch = _batches(-(-tile // (sharers * ROW_WARPS)), elements // loop.size)
    own = batches * batch
    if own > _MOST or loop.size % BOX or loop.size % left.shape[1]:
        raise _refused(
            f"tile of {tile} rows",
            f"{own} rows of a warp, in chunks of {loop.size}",
            f"{_MOST} rows, whose states are in registers, and chunks of whole boxes of {BOX} and "
            f"steps of {left.shape[1]} elements",
        )
    exact = own * sharers * ROW_WARPS == tile and not program.has_tail(0)
    item = item_bytes(str(loop.source.ty.dtype))
    return ChunkPlan(
        loop,
        share,
        sharers,
        tile,
        own,
        batch,
        min(batches, _SLOTS),
        exact,
        _rows_of(loop, batch),
        _described(loop.factors, (tile, 1)),
        item,
    )


def _share(program: TileProgram) -> tuple[Any, int]:
    """Which tile of columns a CTA has, and how many there are, each with all rows."""
    known = program.analyzer
    result = program.contraction.result(program.contraction.left.buffer)
    numbers = [ir.tirx.floordiv(e, n) for e, n in zip(result.origin, result.shape, strict=True)]
    down, across = (int(known.const_int_bound(each).max_value) + 1 for each in numbers)
    tiles = program.tiles * program.cluster_size
    if down * across != tiles:
        raise _refused(
            f"grid of {tiles} tiles",
            f"{down} x {across} tiles of rows and columns",
            "each tile once: CTAs share out the rows of their tiles",
        )
    return known.simplify(numbers[1]), across


def _batches(rows: int, most: int) -> tuple[int, int]:
    """Batches that have a warp's rows of a chunk, and rows of each."""
    batches = -(-rows // max(min(_TOGETHER, most), 1))
    if batches > _SLOTS:
        batches = -(-batches // _SLOTS) * _SLOTS
    return batches, -(-rows // batches)


def _rows_of(loop: ChunkLoop, batch: int) -> TensorMap:
    """A descriptor of copies of a chunk of some rows; they lie in shared memory one by one."""
    rows = _described(loop.source, (BOX, batch))
    boxes = loop.size // BOX
    extents = (BOX, rows.extents[0] // BOX, rows.extents[1])
    strides = (BOX * item_bytes(str(loop.source.ty.dtype)), *rows.strides)
    return replace(
        rows, extents=extents, strides=strides, box=(BOX, boxes, batch), fetch=2 * ROW_BYTES
    )


def _described(buffer: Any, box: tuple[int, int]) -> TensorMap:
    """A descriptor of boxes that lie in shared memory row by row."""
    rows, columns = (int(each) for each in buffer.ty.shape)
    pitch = columns * item_bytes(str(buffer.ty.dtype))
    if pitch % TMA_PITCH:
        raise _refused(
            f"tensor '{buffer.name}'",
            f"rows of {pitch} bytes",
            f"rows of a multiple of {TMA_PITCH} bytes, which TMA copies",
        )
    name = str(buffer.name)
    return TensorMap(f"{name}_chunk_map", name, (columns, rows), (pitch,), box, 0)


def _refused(where: str, found: str, limit: str) -> Exception:
    return refuse(
        "rows",
        where,
        found=found,
        limit=limit,
        instead="take other tiles, or make whole rows: leave the chunk out",
    )
