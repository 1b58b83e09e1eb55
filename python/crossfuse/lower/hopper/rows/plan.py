"""How rows of a left operand are shared out: in chunks, or as corrections of raw rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, TMA_PITCH
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.rows.program import ChunkLoop, RowProgram
from crossfuse.lower.hopper.statements import when
from crossfuse.lower.image import BufferSpec, TensorMap
from crossfuse.lower.refusal import Rule
from crossfuse.planner.kernels.phase import (
    MOST_ROWS,
    ROW_SLOTS,
    ROW_WARPS,
    SUMS_BESIDE_CHUNKS,
    SUMS_BESIDE_ROWS,
    row_batches,
)

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.phase import PhasePlan

_refused = Rule("rows", instead="take other tiles, or make whole rows: leave the chunk out")

# How the CTAs of a kernel share out rows that are made chunk by chunk.
#
# A CTA makes a part of the rows of each tile that it multiplies: CTAs whose tiles have the same
# rows share them. So what is needed first is made first, and a chunk of a tile has one flag, which
# each of these CTAs raises once.

#: The first of the `ROW_WARPS` that make rows; before them one loads, and one raises flags.
FIRST_WARP, FLAG_WARP = 2, 1
#: Elements of a row of a box. PTX ISA, cp.async.bulk.tensor.
BOX = 256


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Which rows a CTA makes by chunks, and the shared memory and registers that this takes."""

    loop: ChunkLoop
    #: Number of a CTA among those whose tiles have the same rows, over the program's places: that
    #: of its tile of columns.
    share: Any
    #: How many these are.
    sharers: int
    #: Rows of a tile.
    tile: int
    #: Rows of a tile that a warp makes, at most: whole batches.
    own: int
    #: Rows that come by one copy, and are made side by side; divides `own`.
    batch: int
    #: Batches of a warp's ring; divides `batches`.
    slots: int
    #: Whether all rows of all warps exist.
    exact: bool
    #: Descriptors of copies of the chunks, and of the factors of a chunk for a tile.
    source: TensorMap
    factors: TensorMap
    #: Bytes of an element of the source.
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
        """Barriers: one of each slot, and two pairs between warps of rows and who raises flags."""
        return ROW_WARPS * self.slots + 4


def plan_chunks(program: TileProgram) -> ChunkPlan | None:
    """Share out the rows of a program that makes them; None if it makes whole ones.

    Refuses plans in which a warp has too many rows, or what they need is nothing that TMA can copy.
    """
    rows, left = program.rows, program.contraction.left
    assert rows is not None
    if rows.chunks is None:
        return None
    loop = rows.chunks
    tile = left.shape[0]
    share, sharers = _share(program)
    batches, batch = row_batches(tile, sharers, loop.size)
    own = batches * batch
    if own > MOST_ROWS or loop.size % BOX or loop.size % left.shape[1]:
        raise _refused(
            f"tile of {tile} rows",
            f"{own} rows of a warp, in chunks of {loop.size}",
            f"{MOST_ROWS} rows, whose states are in registers, and chunks of whole boxes of {BOX} "
            f"and steps of {left.shape[1]} elements",
        )
    exact = own * sharers * ROW_WARPS == tile and not program.has_tail(0)
    item = ir.item_bytes(loop.source.ty.dtype)
    return ChunkPlan(
        loop,
        share,
        sharers,
        tile,
        own,
        batch,
        min(batches, ROW_SLOTS),
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


def _rows_of(loop: ChunkLoop, batch: int) -> TensorMap:
    """A descriptor of copies of a chunk of some rows; they lie in shared memory one by one."""
    rows = _described(loop.source, (BOX, batch))
    boxes = loop.size // BOX
    extents = (BOX, rows.extents[0] // BOX, rows.extents[1])
    strides = (BOX * ir.item_bytes(loop.source.ty.dtype), *rows.strides)
    return replace(
        rows, extents=extents, strides=strides, box=(BOX, boxes, batch), fetch=2 * ROW_BYTES
    )


def _described(buffer: Any, box: tuple[int, int]) -> TensorMap:
    """A descriptor of boxes that lie in shared memory row by row."""
    rows, columns = (int(each) for each in buffer.ty.shape)
    pitch = columns * ir.item_bytes(buffer.ty.dtype)
    if pitch % TMA_PITCH:
        raise _refused(
            f"tensor '{buffer.name}'",
            f"rows of {pitch} bytes",
            f"rows of a multiple of {TMA_PITCH} bytes, which TMA copies",
        )
    name = str(buffer.name)
    return TensorMap(f"{name}_chunk_map", name, (columns, rows), (pitch,), box, 0)


# Whether a product begins with raw rows, while a warpgroup of its own makes the others.
#
# Until the rows of its tile have come, a CTA that waits for them has its tensor cores idle, and
# soon its memory too: the ring of weights is full. Where rows are raw elements times a factor (see
# `scaled`), the first steps multiply what needs no row to be known. They are as many as left stages
# but one: those have all come when weights have, and the one left takes the first tile of rows::
#
#     load          | w w w w  w w w w w ...           | x x x x | made made made ...
#     make rows     | rows of this CTA, their factors, flags
#     multiply      |   gains, x 4 | x w x w x w x w | times factors | made w made w ...
#
# On an H100 a norm before 256 x 4096 by 12288 takes 41.8 us so, and 42.6 if its first step waits;
# the product alone takes 39.4 (docs/hopper-measured.md).

#: Name, before the kernel's number, of the factors of all rows.
FACTORS = "crossfuse_factors"
#: Stages of right tiles on their way at first, until twice as many as the head has steps are asked
#: for: rows, flags and raw tiles wait behind them. On an H100 that norm is as fast with one or
#: three, others are slower with one; with all six at once it takes 0.8 us more.
ON_THEIR_WAY = 2
#: Sums of a thread that leave room in the 128 registers of four warpgroups.
_MOST_SUMS = 96
#: Warpgroups that multiply, and rows that one more makes side by side at most.
MULTIPLYING, _AT_ONCE = 2, 2
#: Words that one of its threads holds of all that these rows are made of: 60 are spilled.
_MOST_WORDS = 56


@dataclass(frozen=True)
class HeadPlan:
    """The first steps of a product, and who makes rows meanwhile."""

    #: Steps of the reduction that multiply raw rows.
    steps: int
    #: Descriptor of copies of the left tiles of these steps.
    raw: TensorMap
    #: Rows that the warpgroup of rows makes side by side: all that the CTA makes.
    at_once: int
    #: The factors of all rows, in global memory.
    factors: BufferSpec


def plan_head(phase: PhasePlan, ctas: int, stages: int, number: int) -> HeadPlan | None:
    """Plan a head, if a product has rows and tiles that allow it.

    None if rows are no raw elements times a factor, their type has fewer exponents than the factor
    needs, or registers are few. The `ctas` of the kernel share all rows; `stages` are those of left
    tiles, `number` is that of the kernel in its function.
    """
    rows, left = phase.program.rows, phase.left
    if rows is None or rows.scaled is None or left is None:
        return None
    source = rows.scaled.source
    loaded = {str(each.ty.dtype) for each in (source, *rows.scaled.vectors)}
    if {left.tile.dtype, *loaded} != {"bfloat16"}:
        return None
    if list(map(int, source.ty.shape)) != list(map(int, rows.buffer.ty.shape)):
        return None
    at_once, steps = -(-rows.rows // ctas), stages - 1
    fits = phase.blocks == 1 and phase.sums <= _MOST_SUMS and phase.consumers == MULTIPLYING
    fits = fits and at_once <= _AT_ONCE and _words(rows, at_once) <= _MOST_WORDS
    if not fits or steps >= phase.program.contraction.steps:
        return None
    raw = replace(left.map, name=f"{source.name}_raw_map", buffer=str(source.name))
    factors = BufferSpec(f"{FACTORS}_{number}", (rows.rows,), "float32", True)
    return HeadPlan(steps, raw, at_once, factors)


def _words(rows: RowProgram, at_once: int) -> int:
    """Registers of a thread that makes rows side by side: what they share, it has once."""
    copies = [at_once if len(each.ty.shape) > 1 else 1 for each in rows.read]
    sizes = [ir.item_bytes(each.ty.dtype) for each in rows.read]
    size = sum(n * size for n, size in zip(copies, sizes, strict=True))
    return rows.columns * size // (4 * rows.threads)


# Registers of a kernel whose loading warpgroup makes rows, too.

#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; 0 leaves them as launched. Together what a CTA has at launch, or they would wait for more
#: forever: multiples of 8 for each thread, so 168 each of three warpgroups, 128 of four.
REGISTERS_BESIDE_ROWS = {1: (0, 0), 2: (72, 216), 3: (80, 144)}
#: The same where rows are made chunk by chunk, several at a time.
BESIDE_CHUNKS = {1: (0, 0), 2: (120, 192), 3: (80, 144)}
#: The same where two warpgroups multiply, and a fourth one makes rows; that has the third number.
BESIDE_HEAD = (40, 184, 104)


def registers_beside(
    rows: RowProgram, usual: dict[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Registers of threads beside what makes rows; the `usual` ones beside no warps that do."""
    if rows.by_warpgroups:
        return usual
    return REGISTERS_BESIDE_ROWS if rows.chunks is None else BESIDE_CHUNKS


def check_row_room(phase: PhasePlan) -> None:
    """Refuse sums beside which the loading warpgroup has no registers for rows."""
    most = SUMS_BESIDE_ROWS if phase.chunks is None else SUMS_BESIDE_CHUNKS
    if phase.chunks is not None and phase.blocks > 1:
        raise _refused(
            f"tile of {phase.rows} x {phase.columns}",
            found=f"{phase.blocks} blocks of 64 rows of a warpgroup",
            limit="one block, whose sums have two factors in a thread",
            instead="take tiles of fewer rows, or make whole rows: leave the chunk out",
        )
    if phase.sums > most:
        raise _refused(
            f"tile of {phase.rows} x {phase.columns}",
            found=f"{phase.sums} registers of a thread for sums",
            limit=f"{most}: warps that make rows have the others",
            instead="take narrower tiles, or make the rows in a kernel of their own",
        )


# Barriers of the warps that make rows chunk by chunk.


@dataclass(frozen=True, eq=False)
class ChunkBarriers:
    """Addresses of the mbarriers of the warps that make rows by chunks."""

    plan: ChunkPlan
    #: From the number of a barrier to its address.
    place: Callable[[Any], Any]

    def full(self, warp: Any, slot: Any) -> Any:
        """Completes when a warp's batch has come."""
        return self.place(warp * self.plan.slots + slot)

    def made(self, parity: Any) -> Any:
        """Completes when all warps have stored a chunk; odd and even chunks take turns."""
        return self.place(ROW_WARPS * self.plan.slots + parity)

    def told(self, parity: Any) -> Any:
        """Completes when its flag is raised: the warps may arrive for the chunk after the next."""
        return self.place(ROW_WARPS * self.plan.slots + 2 + parity)

    def initialise(self, thread: Any) -> None:
        """Initialise all of them, a thread each."""
        made = ROW_WARPS * self.plan.slots
        with when(thread < self.plan.barriers):
            arrivals = _either((thread >= made) & (thread < made + 2), ROW_WARPS, 1)
            mbarrier.initialise(self.place(thread), arrivals)


def _either(condition: Any, one: int, other: int) -> Any:
    return ir.script.Select(condition, ir.script.uint32(one), ir.script.uint32(other))
