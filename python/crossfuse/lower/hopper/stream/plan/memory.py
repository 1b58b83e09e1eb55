"""How the tiles of a stream are copied, and how shared memory is divided among them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from crossfuse.hardware import TMA_PITCH, Device
from crossfuse.lower.hopper.plan.memory import Arena
from crossfuse.lower.hopper.plan.operands import item_bytes
from crossfuse.lower.hopper.program.tile import identifier
from crossfuse.lower.hopper.stream.common_subexpressions import reads
from crossfuse.lower.hopper.stream.plan.registers import RegisterPlan
from crossfuse.lower.hopper.stream.program import Box, Kind, StreamProgram
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

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

#: Bytes of an element of a state, which is float32.
FLOAT_BYTES = 4


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
        return self.size * self.rows * (self.columns + 2 * self.pairs) * FLOAT_BYTES

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
        return self.boxes * BOX + count * WARPGROUP_ROWS * FLOAT_BYTES

    @property
    def of_rows(self) -> int:
        """Offset in bytes of the rows' values."""
        return self.boxes * BOX


def plan_handoff(program: StreamProgram, registers: RegisterPlan) -> HandoffLayout:
    """Find which values of rows are read where the sums are."""

    def read_by(values: list[Any]) -> tuple[Any, ...]:
        return tuple(each for each in registers.rows if any(reads(v, each) for v in values))

    return HandoffLayout(
        -(-program.tile[1] // BOX_KEYS),
        read_by([each.value for each in program.carries]),
        read_by([program.result]),
    )


# Divides shared memory: slots of queries, stages of keys and of values, and what is passed on.

#: Stages of keys and values that are of use; where few rows are computed, memory is what counts.
_MOST_STAGES, _MOST_OF_FEW_ROWS = 4, 12
#: Bytes of what `pin_sums` may write to, and of an mbarrier.
_SCRATCH, _BARRIER = 16, 8


def divide_memory(
    program: StreamProgram,
    operands: Operands,
    between: Mailbox | HandoffLayout | None,
    device: Device,
) -> tuple[int, int, Arena]:
    """Decide slots of queries, stages of keys and values, and all regions of shared memory.

    Two stages come first, then two slots if they fit, then as many stages as do. `between` is what
    CTAs hand over, or warpgroups to one another. Refuses a stream of which not even the fewest
    stages fit, or that asks for fewer than can work.
    """
    wanted = program.stream.stages
    most = _MOST_OF_FEW_ROWS if program.output.rows < WARPGROUP_ROWS else _MOST_STAGES
    least = _least_stages(program, between)
    choices = [wanted] if wanted else range(most, least - 1, -1)
    for slots, stages in sorted(
        # A CTA that shares keys with others has one tile of queries; where warpgroups share
        # columns, results leave from there.
        ((slots, stages) for slots in ((2, 1) if between is None else (1,)) for stages in choices),
        key=lambda each: (each[1] >= 2, each[0], each[1]),
        reverse=True,
    ):
        arena = _arena(program, operands, between, slots, stages)
        if arena.size <= device.max_shared_bytes:
            return slots, stages, arena
    fewest = min(choices)
    raise refuse(
        "shared-memory",
        "kernel",
        found=f"{_arena(program, operands, between, 1, fewest).size} bytes for {fewest} stages of "
        "keys and values",
        limit=f"{device.max_shared_bytes} bytes on {device.name}",
        instead="use fewer stages or smaller tiles",
    )


def _least_stages(program: StreamProgram, between: Mailbox | HandoffLayout | None) -> int:
    """Stages without which a kernel would deadlock.

    A warpgroup that does all multiplies keys of a tile before the values of the one before it.
    """
    least = 2 if program.shares_tile and not isinstance(between, HandoffLayout) else 1
    wanted = program.stream.stages
    if 0 < wanted < least:
        raise refuse(
            "stream-stages",
            f"loop '{program.stream.var.name}'",
            found=f"{wanted} stage of a tile that is keys and values",
            limit=f"{least}: keys of a tile are multiplied before the values of the one before",
            instead=f"annotate the loop with {least} stages, or 0 for as many as fit",
        )
    return least


def _arena(
    program: StreamProgram,
    operands: Operands,
    between: Mailbox | HandoffLayout | None,
    slots: int,
    stages: int,
) -> Arena:
    queries, keys, values, output = operands
    pattern, rings = 8 * ROW_BYTES, 1 if program.shares_tile else 2
    of_queries = slots * queries.size
    if between is None:
        leaving = ("boxes", output.size * program.tile[0] // WARPGROUP_ROWS)
    elif isinstance(between, Mailbox):
        leaving = ("inbox", 0 if between.in_memory else between.bytes)
    else:
        of_queries, leaving = max(of_queries, output.size), ("passed", between.bytes)
    arena = Arena()
    for name, size in (
        ("queries", of_queries),
        ("keys", stages * keys.size),
        ("values", (rings - 1) * stages * values.size),
        leaving,
        ("barriers", 2 * _BARRIER * (slots + rings * stages) + _BARRIER * (leaving[0] == "inbox")),
        ("scratch", _SCRATCH),
    ):
        arena = arena.with_region(name, size, pattern if name not in ("barriers", "scratch") else 8)
    return arena
