"""Shared memory of a CTA: as many stages as fit beside everything else in it.

The lowering divides it by the same `divide`, and places regions in an `Arena`, see `plan_memory` of
`crossfuse.lower.hopper.plan.kernel`; `_Needs` has the sums of that, over arrays. Tests hold the two
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from crossfuse.hardware import (
    MMA_GROUPS,
    MMA_ROWS,
    ROW_BYTES,
    SM_CTAS,
    SM_REGISTERS,
    SM_THREADS,
    WARP,
    WARPGROUP_ROWS,
    Device,
)
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.shape import Count, Flag, ceil_div, choose, least, most

#: Of tiles in shared memory, in bytes: a pattern of the 128-byte swizzle is eight rows.
ALIGNMENT = 1024
#: Stages at least, without which no tile is loaded while another is multiplied, and at most.
LEAST_STAGES, _MAX_STAGES = 2, 12
#: Bytes of weights that a CTA has in flight at least: 3 TB/s through 132 SMs for 3 us, the
#: latency of a busy memory. Measured, see docs/hopper-measured.md.
ON_THEIR_WAY = 72 << 10
#: The same before the rows of the first left tile are made, which wait behind it; all others are
#: asked for once these are there. Of a norm before 256 x 4096 by 12288 on an H100 the first tiles
#: came at 6.7 us where 12 KiB at a time were in flight until the ring was full, and at 4.3 so.
BEFORE_ROWS = 12 << 10
#: Stages of left tiles that cover the latency of L2, from which they mostly come.
_LEFT_STAGES = 4


#: Bytes of an mbarrier, of those of a stage of left tiles and one of right tiles each, and of those
#: through which CTAs exchange sums.
BARRIER, STAGE_BARRIERS, EXCHANGE_BARRIERS = 8, 16, 16


# Where things lie, region by region.


@dataclass(frozen=True)
class Region:
    """A named piece of shared memory, in bytes."""

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.size


@dataclass(frozen=True)
class Piece:
    """Shared memory that a feature of a kernel asks for."""

    name: str
    #: In bytes, as its alignment is.
    size: int
    alignment: int = BARRIER


@dataclass(frozen=True)
class Arena:
    """Regions one after another, in the order of their addition, and aliases in their place."""

    regions: tuple[Region, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        return max((each.end for each in self.regions), default=0)

    def __contains__(self, name: str) -> bool:
        return any(each.name == name for each in self.regions)

    def __getitem__(self, name: str) -> Region:
        return next(each for each in self.regions if each.name == name)

    def with_pieces(self, pieces: Iterable[Piece]) -> Arena:
        """An arena that has some more regions."""
        return reduce(lambda arena, x: arena.with_region(x.name, x.size, x.alignment), pieces, self)

    def with_region(self, name: str, size: int, alignment: int) -> Arena:
        """An arena that has one more region, of `size` bytes.

        The `alignment` of its offset is 1024 for tiles with a 128-byte swizzle, 8 for barriers.
        """
        offset = -(-self.size // alignment) * alignment
        return Arena((*self.regions, Region(name, offset, size)))

    def with_alias(self, name: str, other: str, size: int) -> Arena:
        """An arena with a region that begins where another does, which is not in use any more then.

        At most of its size.
        """
        return Arena((*self.regions, Region(name, self[other].offset, size)))


# How many stages fit, of one candidate or of many.


@dataclass(frozen=True)
class Memory:
    """Shared memory of a kernel's CTA."""

    #: Stages of left and of right tiles.
    left: Count
    right: Count
    #: Bytes in all.
    size: Count
    #: Whether two stages of each fit.
    fits: Flag


@dataclass(frozen=True)
class _Needs:
    """Bytes of a CTA that do not depend on the stages, and bytes of a stage."""

    left: Count
    right: Count
    before: Count
    received: Count
    #: Whether a warpgroup multiplies several blocks of rows.
    tall: Flag
    #: Those of no ring.
    barriers: Count
    held: Count

    def size(self, left: Count, right: Count) -> Count:
        """Bytes with these numbers of stages."""
        lefts = left * self.left
        room, _ = place_of_received(lefts, right * self.right, self.received, self.tall)
        return self.before + lefts + room + self.barriers + STAGE_BARRIERS * (left + right)


def place_of_received(left: Count, right: Count, received: Count, tall: Flag) -> tuple[Count, Flag]:
    """Find the bytes of the place of right tiles, if that of what peers send is theirs.

    Also whether that takes the place of left tiles too: where rows are `tall`, of several blocks
    each warpgroup, and right tiles do not suffice. All are bytes.
    """
    spread = tall & (received > right)
    return most(right, received - choose(spread, left, 0)), spread


def memory(phases: Sequence[Phase], device: Device, *, waits: Flag = False) -> Memory:
    """Divide shared memory among the rings of a kernel with the given phases.

    `waits` is whether there is one more barrier: for partial tiles that CTAs add at the end, or for
    rows that are made before right tiles are loaded.
    """
    needs = _needs(phases, waits)
    left, right = divide(needs.size, needs.held, device.max_shared_bytes)
    fits = (right >= LEAST_STAGES) & (left >= LEAST_STAGES)
    return Memory(left, right, needs.size(left, right), fits)


def divide(size: Callable[[Count, Count], Count], held: Count, limit: int) -> tuple[Count, Count]:
    """Choose the stages of left and of right tiles; 0 where no two of each fit in `limit` bytes.

    Right tiles come from far away: as many of their stages as fit with four left ones, for which L2
    is near enough; then as many left ones as fit beside them, but no more than right ones. `held`
    is the least number of left stages, in which tiles wait for their store; `size` are bytes by
    left and right stages.
    """
    right: Count = 0
    for stages in range(LEAST_STAGES, _MAX_STAGES + 1):
        fewest = most(least(_LEFT_STAGES, stages), held)
        possible = (size(fewest, stages) <= limit) & (held <= stages)
        right = choose(possible, stages, right)
    left: Count = 0
    for stages in range(LEAST_STAGES, _MAX_STAGES + 1):
        possible = (size(stages, right) <= limit) & (stages <= right)
        left = choose(possible & (stages >= held), stages, left)
    return left, right


def uses(phases: Sequence[Phase], room: Memory) -> dict[str, int]:
    """Break down the shared memory of one candidate's CTA: bytes by use, which add up to all."""
    needs = _needs(phases, False)
    left, right = int(room.left * needs.left), int(room.right * needs.right)
    _, over = place_of_received(left, right, needs.received, needs.tall)
    found = {
        "left tiles": left,
        "right tiles": right,
        "intermediate": int(reduce(most, [each.gathered for each in phases])),
        "stores": int(reduce(most, [each.boxes for each in phases]) * phases[0].warpgroups),
        # They take the place of tiles, once these have been multiplied.
        "sums beyond tiles": max(int(needs.received) - right - (left if over else 0), 0),
    }
    found["barriers and padding"] = int(room.size) - sum(found.values())
    return {name: size for name, size in found.items() if size}


def _needs(phases: Sequence[Phase], waits: Flag) -> _Needs:
    groups = phases[0].warpgroups
    boxes = reduce(most, [each.boxes for each in phases]) * groups
    gathered = reduce(most, [each.gathered for each in phases])
    received = reduce(most, [each.received for each in phases])
    barriers = choose(gathered > 0, BARRIER * groups, 0)
    before = ceil_div(boxes + gathered + barriers, ALIGNMENT) * ALIGNMENT
    return _Needs(
        reduce(most, [each.left for each in phases]),
        reduce(most, [each.right for each in phases]),
        before,
        received,
        phases[0].blocks > 1,
        choose(received > 0, EXCHANGE_BARRIERS, 0) + choose(waits, BARRIER, 0),
        reduce(most, [each.pages for each in phases]),
    )


def resident(device: Device, size: Count) -> Count:
    """Clusters of a size that run at once, one CTA an SM; see `Device.resident_clusters`.

    Sizes go up to 16 CTAs; of larger clusters, which rules leave out, 1 is assumed.
    """
    table = _table(device)
    if isinstance(size, np.ndarray):
        return table[np.minimum(size, len(table) - 1).astype(np.int64)]
    return int(table[min(int(size), len(table) - 1)])


@lru_cache(maxsize=8)
def _table(device: Device) -> np.ndarray:
    sizes = range(1, device.max_cluster + 1)
    return np.array([device.sms, *map(device.resident_clusters, sizes), 1], np.float64)


def cached_level(size: int, device: Device) -> str:
    """Level of a tensor that one kernel stores and the next reads.

    What L2 has no room for goes to memory and comes back.
    """
    return "l2" if size <= device.l2_bytes // 2 else "hbm"


# Registers and shared memory of a CTA that streams tiles between two products.
#
# The lowering counts by the same functions: what the planner says fits is what it builds.


#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; 0 leaves them as launched. And what scores, weights and sums may take beside addresses.
#: Together at most 64 Ki a CTA.
REGISTERS = {1: (0, 0, 176), 2: (24, 240, 184), 3: (32, 160, 132)}
#: The same by the number of warpgroups that share columns: of the loading one, of that of scores,
#: of those of sums; and how many of the second scores and weights may take.
SHARED_REGISTERS = {1: (24, 240, 240, 184), 2: (24, 120, 184, 80)}
#: Columns that a warpgroup can sum, the most of a wgmma, and those that begin with a box of 16-bit
#: values.
MAX_COLUMNS, BOX_COLUMNS = 256, ROW_BYTES // 2


def element_registers(keys: int, arrays: int) -> int:
    """Registers of a thread for arrays of scores, and for their weights of 16 bits."""
    return arrays * keys // 2 + keys // 4


def adders_of(rows: int, keys: int, columns: int, arrays: int, *, split: bool) -> int | None:
    """Warpgroups that share the columns of a tile's sums, beside one that makes scores.

    0 if each warpgroup has registers for all of its own 64 rows, None if neither has them. CTAs
    that `split` the keys hand over sums, weights and rows of one warpgroup.
    """
    elements = element_registers(keys, arrays)
    if columns <= MAX_COLUMNS and elements + columns // 2 <= REGISTERS[rows // WARPGROUP_ROWS][-1]:
        return 0
    adders = -(-columns // MAX_COLUMNS)
    fits = rows == WARPGROUP_ROWS and not split and divide_columns(columns, adders)
    return adders if fits and elements <= SHARED_REGISTERS[adders][-1] else None


def divide_columns(columns: int, adders: int) -> bool:
    """Whether so many warpgroups can share columns: each begins with a box."""
    return adders in SHARED_REGISTERS and (adders == 1 or columns % (adders * BOX_COLUMNS) == 0)


# Shared memory: slots of queries, stages of keys and of values, and what is passed on.

#: Bytes of barriers, and of what alignment leaves free, at most, of a product beside a stream.
BESIDE_STREAM = 4096
#: Bytes of an element of a state, which is float32.
FLOAT_BYTES = 4
#: Bytes of what `pin_sums` may write to.
_SCRATCH = 16
#: Stages of keys and values that are of use; where few rows are computed, memory is what counts.
_MOST_STAGES, _MOST_OF_FEW_ROWS = 4, 12


def tile_bytes(rows: int, columns: int, item: int) -> int:
    """Bytes of rows in boxes of 64 columns one behind the other, the last one whole."""
    return -(-columns // BOX_COLUMNS) * BOX_COLUMNS * rows * item


def mailbox_bytes(size: int, rows: int, columns: int, of_rows: int) -> int:
    """Bytes of the states of `size` CTAs: columns that one of them merges, and values of a row.

    These are padded to pairs.
    """
    return size * rows * (columns + -(-of_rows // 2) * 2) * FLOAT_BYTES


def handoff_bytes(keys: int, of_rows: int) -> int:
    """Bytes of the weights of 64 rows, and of values of a row, that pass between warpgroups."""
    return tile_bytes(WARPGROUP_ROWS, keys, 2) + of_rows * WARPGROUP_ROWS * FLOAT_BYTES


@dataclass(frozen=True)
class StreamMemory:
    """What a CTA of a stream has in shared memory, in bytes."""

    #: Rows of a tile, and those of them that are stored.
    rows: int
    stored: int
    #: A tile of queries, of keys and of values; no values of their own where keys are these.
    queries: int
    keys: int
    values: int
    #: Boxes of 64 rows of results.
    output: int
    #: What CTAs of a cluster hand over (``inbox``), or warpgroups to one another (``passed``).
    handed: tuple[str, int] | None = None

    @property
    def least(self) -> int:
        """Stages without which a kernel would deadlock.

        A warpgroup that does all multiplies keys of a tile before the values of the one before it.
        """
        passed = self.handed is not None and self.handed[0] == "passed"
        return 1 if self.values or passed else 2

    def arena(self, slots: int, stages: int) -> Arena:
        """All regions in their order, with so many tiles of queries and stages of the others."""
        queries, leaving = slots * self.queries, self.handed
        if leaving is None:
            leaving = ("boxes", self.output * self.rows // WARPGROUP_ROWS)
        elif leaving[0] == "passed":
            queries = max(queries, self.output)
        rings = 2 if self.values else 1
        barriers = 2 * (slots + rings * stages) + (leaving[0] == "inbox")
        tiles = (
            ("queries", queries),
            ("keys", stages * self.keys),
            ("values", stages * self.values),
            leaving,
        )
        plain = (Piece("barriers", BARRIER * barriers), Piece("scratch", _SCRATCH))
        return Arena().with_pieces([*(Piece(*each, ALIGNMENT) for each in tiles), *plain])

    def size(self, slots: int, stages: int) -> int:
        """Bytes of all regions."""
        return self.arena(slots, stages).size

    def divide(self, wanted: int, limit: int) -> tuple[int, int] | None:
        """Choose slots of queries, and stages: `wanted`, or as many as fit in `limit` bytes.

        Two stages come first, then two slots if they fit, then as many stages as do. None where not
        even the fewest do.
        """
        most = _MOST_OF_FEW_ROWS if self.stored < WARPGROUP_ROWS else _MOST_STAGES
        choices = [wanted] if wanted else range(most, self.least - 1, -1)
        # A CTA that shares keys with others has one tile of queries; where warpgroups share
        # columns, results leave from there.
        slots = (2, 1) if self.handed is None else (1,)
        pairs = [(each, stages) for each in slots for stages in choices]
        ordered = sorted(pairs, key=lambda each: (each[1] >= 2, *each), reverse=True)
        return next((each for each in ordered if self.size(*each) <= limit), None)


# What a CTA takes whose warps stream keys each by itself, for few rows of queries.
#
# The lowering counts by the same functions: what the planner says fits is what it builds.

#: Rows of a tile: the eight columns of an ``mma.m16n8k16``, or two of these.
ROWS = (MMA_GROUPS, 2 * MMA_GROUPS)
#: Warps of a CTA: whole warpgroups.
WARPS = (4, 8)
#: Elements of a row of queries and keys, and of values, that all lanes load at once.
DEPTH_STEP, COLUMN_STEP = 32, 64
#: Keys of a warp in one tile, where there are enough: a word of flags, see `key_flags`.
_MOST_KEYS = 32
#: Registers of a thread beside its fragments: addresses, flags, rows.
_BESIDE = 40
#: Registers of a thread at most (CUDA C++ Programming Guide, compute capability 9.0).
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class WarpStream:
    """Few rows of queries and a tile of keys, which the warps of a CTA share."""

    rows: int
    #: Keys of a tile.
    keys: int
    #: Elements of a row of queries and of keys.
    depth: int
    #: Elements of a row of values, and of results.
    columns: int
    #: Arrays of registers for elements of a tile; scores are one.
    arrays: int = 1

    @property
    def of_warp(self) -> int:
        """Keys of a warp."""
        return max(1, min(_MOST_KEYS, self.keys // WARPS[0]))

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.keys // self.of_warp

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP

    @property
    def fragments(self) -> int:
        """Fragments that the rows are."""
        return self.rows // MMA_GROUPS

    @property
    def scores(self) -> int:
        """Registers of a thread for scores."""
        return self.of_warp * self.fragments // 4

    @property
    def sums(self) -> int:
        """Registers of a thread for sums of values."""
        return self.columns * self.fragments // 4

    @property
    def loaded(self) -> tuple[int, int, int]:
        """Registers of a thread for queries, for keys, and for values of a tile."""
        of_depth = self.depth // DEPTH_STEP * 4
        keys = self.of_warp // MMA_GROUPS * of_depth
        values = self.of_warp // 4 * (self.columns // COLUMN_STEP) * 4
        return self.fragments * of_depth, keys, values

    @property
    def registers(self) -> int:
        """Registers of a thread, about."""
        elements = self.scores * self.arrays + self.scores // 2
        return sum(self.loaded) + elements + self.sums + _BESIDE

    def arena(self, of_rows: int, inbox: int) -> Arena:
        """Shared memory for `of_rows` values of each row, and what CTAs of a cluster hand over."""
        partial = 2 * self.warps * self.rows * FLOAT_BYTES
        pieces = (
            Piece("sums", self.warps * self.sums * WARP * FLOAT_BYTES, MMA_ROWS),
            Piece("inbox", inbox, MMA_ROWS),
            Piece("partial", partial),
            Piece("rows", max(1, of_rows) * self.rows * FLOAT_BYTES),
            Piece("barriers", BARRIER),
        )
        return Arena().with_pieces([each for each in pieces if each.size])

    def broken(self) -> str:
        """What tensor cores of a warp cannot take of the tile, in words; empty if nothing."""
        if self.rows not in ROWS:
            return f"{self.rows} rows"
        if self.of_warp % MMA_ROWS or self.keys % self.of_warp:
            return f"tiles of {self.keys} keys"
        if self.warps not in WARPS:
            return f"{self.warps} warps for tiles of {self.keys} keys"
        if self.depth % DEPTH_STEP or self.columns % COLUMN_STEP:
            return f"keys of {self.depth} and values of {self.columns} elements"
        if self.registers > _MOST_REGISTERS:
            return f"{self.registers} registers a thread"
        return ""

    def resident(self, shared: int, device: Device) -> int:
        """CTAs that an SM holds, by their registers and bytes of shared memory."""
        of_thread = -(-self.registers // 8) * 8
        return max(
            1,
            min(
                SM_REGISTERS // (of_thread * self.threads),
                SM_THREADS // self.threads,
                SM_CTAS,
                device.max_shared_bytes // max(1, shared),
            ),
        )
