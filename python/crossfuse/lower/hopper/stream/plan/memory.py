"""How the tiles of a stream are copied, and how shared memory is divided among them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, TMA_PITCH, WARPGROUP_ROWS, Device
from crossfuse.lower.hopper.program.tile import identifier
from crossfuse.lower.hopper.stream.program import Box, Kind, StreamProgram
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.memory import (
    FLOAT_BYTES,
    Arena,
    StreamMemory,
    handoff_bytes,
    mailbox_bytes,
)

if TYPE_CHECKING:
    from crossfuse.lower.hopper.stream.plan.kernel import RegisterPlan


# How the tiles of a stream are copied.

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
    item = ir.item_bytes(box.dtype)
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
        (box.shape[-1], *(box.shape[each] for each in axes)),
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


# Divides shared memory of a stream: queries, stages, what is passed on or received.

# Where the states of CTAs that share keys are handed over.


@dataclass(frozen=True)
class Mailbox:
    """Slots for the states of all CTAs, in the order of ranks: the columns that one CTA merges.

    In the shared memory of that CTA; or in global memory, all columns of a tile of rows.
    """

    #: CTAs that share the keys.
    size: int
    #: Rows that are stored; others are not handed over.
    rows: int
    #: Columns of a slice; the last CTAs may have fewer.
    columns: int
    #: Columns of all slices.
    all_columns: int
    #: Slabs of values of rows. They lie side by side, padded to pairs, behind the columns of all
    #: slots.
    of_rows: tuple[Any, ...]
    #: The slab of the second product's sums.
    of_elements: Any
    #: Whether it lies in global memory, one for each tile of rows.
    in_memory: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of values of a row."""
        return -(-len(self.of_rows) // 2)

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return mailbox_bytes(self.size, self.rows, self.columns, len(self.of_rows))

    def element(self, slot: Any, row: Any, column: Any) -> Any:
        """Offset in bytes of an element of a slot."""
        return ((slot * self.rows + row) * self.columns + column) * FLOAT_BYTES

    def of_row(self, slot: Any, row: Any, pair: int) -> Any:
        """Offset in bytes of a pair of values of a row."""
        behind = self.size * self.rows * self.columns
        return (behind + ((slot * self.rows + row) * self.pairs + pair) * 2) * FLOAT_BYTES

    def expected(self, width: Any) -> Any:
        """Bytes that a CTA receives whose slice has `width` columns."""
        return (width + 2 * self.pairs) * (self.size * self.rows * FLOAT_BYTES)


def plan_mailbox(program: StreamProgram) -> Mailbox | None:
    """Lay the mailbox of a stream out; None if its CTAs share no keys.

    Refuses slices with odd numbers of columns, as a thread sends pairs.
    """
    split = program.split
    if split is None:
        return None
    if split.columns % 2:
        raise refuse(
            "stream-split",
            f"loop '{split.place.var.name}'",
            found=f"slices of {split.columns} columns for {split.place.extent} CTAs",
            limit="slices of an even number of columns, since threads send pairs",
            instead="pass another number of CTAs a cluster, such as a power of two",
        )
    of_rows = tuple(each.target for each in split.slabs if each.kind is Kind.ROW)
    sums = [each for each in split.slabs if each.kind is not Kind.ROW]
    if len(sums) != 1:
        raise refuse(
            "stream-split",
            f"loop '{split.place.var.name}'",
            found=f"{len(sums)} slabs of rows and columns",
            limit="one, that of the second product's sums",
            instead="hand over one slab of columns",
        )
    return Mailbox(
        split.place.extent,
        program.output.rows,
        split.columns,
        program.output.columns,
        of_rows,
        sums[0].target,
        split.in_memory,
    )


# What the warpgroup that makes scores hands to those that add: weights and values of rows.

#: Bytes of 64 rows of weights in a row of a swizzled tile each.
BOX = WARPGROUP_ROWS * ROW_BYTES
#: Weights of 16 bits in such a row.
BOX_KEYS = ROW_BYTES // 2


@dataclass(frozen=True)
class HandoffLayout:
    """Layout of what the scoring warpgroup passes on, in shared memory."""

    #: Boxes of weights, each of 64 keys.
    boxes: int
    #: Buffers of rows that sums are multiplied by before a tile is added.
    carried: tuple[Any, ...]
    #: Buffers of rows that results are made of, behind the last tile.
    finished: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all of it: weights, then rows of float32."""
        count = len(self.carried) + len(self.finished)
        return handoff_bytes(self.boxes * BOX_KEYS, count)

    @property
    def of_rows(self) -> int:
        """Offset in bytes of the rows' values."""
        return self.boxes * BOX


def plan_handoff(program: StreamProgram, registers: RegisterPlan) -> HandoffLayout:
    """Find which values of rows are read where the sums are."""

    def read_by(values: list[Any]) -> tuple[Any, ...]:
        return tuple(each for each in registers.rows if any(ir.mentions(v, each) for v in values))

    return HandoffLayout(
        -(-program.tile[1] // BOX_KEYS),
        read_by([each.value for each in program.carries]),
        read_by([program.result]),
    )


def divide_memory(
    program: StreamProgram,
    operands: Operands,
    between: Mailbox | HandoffLayout | None,
    device: Device,
) -> tuple[int, int, Arena]:
    """Decide slots of queries, stages of keys and values, and all regions of shared memory.

    `between` is what CTAs hand over, or warpgroups to one another. Refuses a stream of which not
    even the fewest stages fit, or that asks for fewer than can work.
    """
    needs = _needs(program, operands, between)
    wanted = program.stream.stages
    if 0 < wanted < needs.least:
        raise refuse(
            "stream-stages",
            f"loop '{program.stream.var.name}'",
            found=f"{wanted} stage of a tile that is keys and values",
            limit=f"{needs.least}: keys of a tile are multiplied before the values of the one "
            "before",
            instead=f"annotate the loop with {needs.least} stages, or 0 for as many as fit",
        )
    found = needs.divide(wanted, device.max_shared_bytes)
    if found is not None:
        return (*found, needs.arena(*found))
    fewest = wanted or needs.least
    raise refuse(
        "shared-memory",
        "kernel",
        found=f"{needs.size(1, fewest)} bytes for {fewest} stages of keys and values",
        limit=f"{device.max_shared_bytes} bytes on {device.name}",
        instead="use fewer stages or smaller tiles",
    )


def _needs(
    program: StreamProgram, operands: Operands, between: Mailbox | HandoffLayout | None
) -> StreamMemory:
    queries, keys, values, output = operands
    handed = None
    if isinstance(between, Mailbox):
        handed = ("inbox", 0 if between.in_memory else between.bytes)
    elif between is not None:
        handed = ("passed", between.bytes)
    return StreamMemory(
        program.tile[0],
        program.output.rows,
        queries.size,
        keys.size,
        0 if program.shares_tile else values.size,
        output.size,
        handed,
    )
