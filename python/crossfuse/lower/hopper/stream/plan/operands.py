"""How the tiles of a stream are copied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from crossfuse.hardware import TMA_PITCH
from crossfuse.lower.hopper.plan.operands import item_bytes
from crossfuse.lower.hopper.recover.function import identifier
from crossfuse.lower.hopper.stream.program import Box, StreamProgram
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

#: Columns of a box: of 16 bits, one pattern of the 128-byte swizzle.
_WIDTH = ROW_BYTES // 2
#: Rows that the pattern of a swizzle repeats after.
_PATTERN = 8


@dataclass(frozen=True)
class Operand:
    """A tile that TMA copies, in boxes of some columns one behind the other."""

    box: Box
    #: Descriptor of a copy.
    map: TensorMap
    #: Number of boxes.
    copies: int
    #: Rows of a box in shared memory; TMA may copy fewer.
    height: int
    #: CTAs that copy some of the rows each, for all of them.
    parts: int = 1

    @property
    def pitch(self) -> int:
        """Bytes from one box to the next."""
        return self.height * self.map.swizzle

    @property
    def size(self) -> int:
        """Bytes of all boxes."""
        return self.copies * self.pitch


#: Queries, keys, values, and what is stored.
Operands = tuple[Operand, Operand, Operand, Operand]


def plan_operands(program: StreamProgram) -> Operands:
    """Decide how tiles are copied.

    Refuses tensors that TMA or wgmma cannot take as they are stored.
    """
    output = program.output
    width = gcd(_WIDTH, output.columns)
    queries = _operand("queries", program.queries, program.queries.rows, _WIDTH)
    rows, parts = program.keys.rows, _parts(program)
    keys = _operand("keys", program.keys, rows // parts, _WIDTH, rows)
    keys = values = replace(keys, parts=parts)
    if not program.shares_tile:
        values = _operand("values", program.values, rows // parts, _WIDTH, rows)
        values = replace(values, parts=parts)
    return (
        queries,
        keys,
        values,
        # What is stored has been written before: no box reaches beyond the columns.
        _operand("output", output, min(WARPGROUP_ROWS, output.rows), width, WARPGROUP_ROWS),
    )


def _parts(program: StreamProgram) -> int:
    """CTAs that go through the same tiles: each loads some keys for all of them."""
    rows, place = program.keys.rows, program.beside
    if place is None:
        return 1
    if rows % (_PATTERN * place.extent):
        raise refuse(
            "stream-operand",
            f"loop '{place.var.name}'",
            found=f"{rows} keys a tile, of which {place.extent} CTAs load a part each",
            limit=f"parts of a multiple of {_PATTERN} keys, the repeat of the swizzle",
            instead="take other numbers of keys, or of CTAs side by side (CascadeTiles.share)",
        )
    return place.extent


def _operand(name: str, box: Box, rows: int, width: int, height: int = 0) -> Operand:
    """How a tile is copied: dimensions of the tensor, columns and rows first."""
    item = item_bytes(box.dtype)
    strides, stride = [], item
    for extent in reversed(box.shape):
        strides.append(stride)
        stride *= extent
    strides.reverse()
    if box.columns * item % TMA_PITCH or box.columns % 16:
        raise refuse(
            "stream-operand",
            f"tensor '{box.buffer.name}'",
            found=f"rows of {box.columns} elements",
            limit="a multiple of 16 elements, which wgmma multiplies and TMA copies",
            instead="pad the rows with zeros",
        )
    axes = dimensions(box)
    map_ = TensorMap(
        f"{identifier(box.buffer)}_{name}_map",
        str(box.buffer.name),
        (box.columns, *(box.shape[each] for each in axes)),
        tuple(strides[each] for each in axes),
        (width, rows, *(1 for _ in axes[1:])),
        width * item,
        2 * ROW_BYTES,
    )
    return Operand(box, map_, -(-box.columns // width), height or rows)


def dimensions(box: Box) -> tuple[int, ...]:
    """Dimensions of a tensor map behind that of the columns: the rows, then those of matrices."""
    others = range(len(box.shape) - 2, -1, -1)
    return (box.axis, *(each for each in others if each != box.axis and box.shape[each] > 1))
