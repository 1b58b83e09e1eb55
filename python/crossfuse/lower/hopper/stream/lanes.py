"""Which rows and columns of a tile the registers of a thread are of.

Tensor cores spread a tile over the lanes of a warp in two ways here. A warpgroup has rows of
queries down and keys across, as wgmma leaves them. A warp by itself multiplies the other way round,
keys or columns of values down and few rows of queries across: none of its rows is wasted, and what
it multiplies passes from memory to registers as it lies there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import MMA_GROUPS, MMA_LANES, MMA_ROWS, WARPGROUP_ROWS
from crossfuse.lower.hopper.plan.phase import WARP_ROWS
from crossfuse.lower.hopper.statements import Coordinates, let


class Layout(ABC):
    """Rows and columns of the registers of one thread, counted from its first."""

    #: Distances between lanes that share rows: powers of two.
    distances: ClassVar[tuple[int, ...]]

    @abstractmethod
    def row(self, register: int) -> int:
        """Which of the thread's rows a register belongs to."""

    @abstractmethod
    def column(self, register: int) -> int:
        """Column of a register."""

    @abstractmethod
    def turn(self, register: int) -> int:
        """Which of two partial results of its row a register adds to: neighbours alternate."""


class RowsDown(Layout):
    """Of wgmma: register ``4 j + 2 h + q`` is in row h of two, and column ``8 j + q``."""

    distances = (1, 2)

    def row(self, register: int) -> int:
        """Which of the thread's rows a register belongs to."""
        return register // 2 % 2

    def column(self, register: int) -> int:
        """Column of a register."""
        return register // 4 * 8 + register % 2

    def turn(self, register: int) -> int:
        """Which of two partial results a register adds to."""
        return register % 2


@dataclass(frozen=True)
class RowsAcross(Layout):
    """Of ``mma.m16n8k16``, with rows in its columns, in `fragments` of eight.

    Register ``4 (j fragments + n) + 2 h + q`` is in row ``2 n + q``, of row h of two in block j.
    """

    fragments: int
    distances = tuple(MMA_LANES << each for each in range(3))

    def row(self, register: int) -> int:
        """Which of the thread's rows a register belongs to."""
        return register // 4 % self.fragments * 2 + register % 2

    def block(self, register: int) -> int:
        """The block of 16 keys, or of 16 columns of values."""
        return register // (4 * self.fragments)

    def turn(self, register: int) -> int:
        """Which of two partial results a register adds to."""
        return register // 2 % 2


class ScoresDown(RowsAcross):
    """Scores: a block has 16 keys, two of which, eight apart, are the thread's."""

    def column(self, register: int) -> int:
        """Column of a register."""
        return self.block(register) * MMA_ROWS + self.turn(register) * MMA_GROUPS


#: Neighbouring columns of values that a lane loads at once: 16 bytes of 16-bit elements.
VECTOR = 8
#: Columns that eight lanes load side by side; of each four blocks of 16 are made.
SPAN = MMA_GROUPS * VECTOR


class SumsDown(RowsAcross):
    """Sums of values: of each 64 columns a thread has eight neighbours, two of each block."""

    def column(self, register: int) -> int:
        """Column of a register."""
        span, block = divmod(self.block(register), SPAN // MMA_ROWS)
        return span * SPAN + block * 2 + self.turn(register)


#: What a warpgroup's registers hold.
OF_WGMMA = RowsDown()


@dataclass(frozen=True)
class Lanes:
    """Where a thread's registers of a tile are (PTX ISA, register fragments)."""

    #: Its rows in the tile.
    rows: tuple[Any, ...]
    #: Column of its first register.
    column: Any
    #: First row of the warpgroup.
    base: Any
    #: Number of the thread in its warp.
    lane: Any
    layout: Layout = OF_WGMMA
    #: The first of the keys that a warp has for itself, and how many; all of a tile if None.
    first: Any = None
    keys: int | None = None

    @staticmethod
    def of(where: Coordinates, warpgroup: Any) -> Lanes:
        """The registers of this thread of a warpgroup."""
        base = let("first_row", warpgroup * WARPGROUP_ROWS)
        row = base + (where.warp * WARP_ROWS + where.lane // 4)
        column = let("lane_column", where.lane % 4 * 2)
        return Lanes((let("row", row), let("row_below", row + 8)), column, base, where.lane)

    @staticmethod
    def of_keys(where: Coordinates, first: Any, keys: int, fragments: int) -> Lanes:
        """The scores of this thread of a warp that has some keys of a tile."""
        row = where.lane % MMA_LANES * 2
        rows = [row + (each // 2 * MMA_GROUPS + each % 2) for each in range(2 * fragments)]
        column = let("lane_key", first + where.lane // MMA_LANES)
        named = tuple(let("row", each) for each in rows)
        return Lanes(
            named, column, ir.script.int32(0), where.lane, ScoresDown(fragments), first, keys
        )

    @property
    def offset(self) -> Any:
        """The first register's column, counted from the first of the warp's keys."""
        return self.column if self.first is None else self.column - self.first
