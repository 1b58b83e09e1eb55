"""What a CTA takes whose warps stream keys each by itself, for few rows of queries.

The lowering counts by the same functions: what the planner says fits is what it builds.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.hardware import (
    MMA_GROUPS,
    MMA_ROWS,
    SM_CTAS,
    SM_REGISTERS,
    SM_THREADS,
    WARP,
    Device,
)
from crossfuse.planner.kernels.memory import BARRIER, Arena, Piece
from crossfuse.planner.kernels.stream import FLOAT_BYTES

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
