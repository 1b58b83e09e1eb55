"""What the roles of a stream share, and which rows and columns the registers of a thread are of.

Tensor cores spread a tile over the lanes of a warp in two ways here. A warpgroup has rows of
queries down and keys across, as wgmma leaves them. A warp by itself multiplies the other way round,
keys or columns of values down and few rows of queries across: none of its rows is wasted, and what
it multiplies passes from memory to registers as it lies there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from crossfuse import _tvm as ir
from crossfuse.hardware import MMA_GROUPS, MMA_LANES, MMA_ROWS, WARP, WARPGROUP_ROWS
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.flags import PlacedFlags
from crossfuse.lower.hopper.pipeline import Release, Ring, SharedMemory
from crossfuse.lower.hopper.plan.phase import WARP_ROWS
from crossfuse.lower.hopper.statements import Coordinates, at, let, when
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.tiles import SeenTiles, Tiles
from crossfuse.planner.kernels.memory import STAGE_BARRIERS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.stream.warps import WarpPlan


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


# What both roles of a stream's kernel share.


#: Flags that a thread has on their way at once, and that one with 24 registers has.
_LOADS, _FEW_LOADS = 32, 8


@dataclass(frozen=True)
class StreamBody:
    """What the roles of a kernel share: its plan, and what is declared before they part."""

    plan: StreamPlan
    where: Coordinates
    #: Tensor map parameters by name.
    maps: dict[str, Any]
    memory: SharedMemory
    #: Barriers of what is loaded: queries, keys, and values unless these are keys.
    rings: tuple[Ring, ...]
    #: Address of the barrier of what the cluster's CTAs hand over; None if they do not.
    received: Any
    #: Buffer in global memory of what a second kernel merges; None without one.
    states: Any = None
    # In a kernel of products, where the CTAs of the cluster have met before the roles begin:
    #: Flags of stored tiles, for which others wait.
    writer: PlacedFlags | None = None
    #: Address of a barrier that completes when the first keys are asked for.
    gate: Any = None

    @staticmethod
    def declared(
        plan: StreamPlan | WarpPlan,
        where: Coordinates,
        maps: dict[str, Any],
        memory: SharedMemory,
        **beside: Any,
    ) -> StreamBody:
        """Declare the barriers of a stream in its shared memory; `beside` are the other fields.

        A plan of warps has no rings, and all else that is asked of a plan here.
        """
        rings, offset = [], 0
        for name, stages in plan.rings:
            rings.append(memory.ring(name, stages, offset))
            offset += STAGE_BARRIERS * stages
        received = memory.region("barriers")(offset) if plan.receives else None
        return StreamBody(
            cast("StreamPlan", plan), where, maps, memory, tuple(rings), received, **beside
        )

    def initialise(self, *others: Any) -> None:
        """Initialise all barriers by one warp, and `others` of one arrival each."""
        for ring, readers in zip(self.rings, self.plan.readers, strict=False):
            ring.initialise(readers, self.where.thread)
        single = [*others, *([] if self.received is None else [self.received])]
        if single:
            with when(self.where.thread == 0):
                for each in single:
                    mbarrier.initialise(each, 1)

    @property
    def queries(self) -> Ring:
        """The ring of queries."""
        return self.rings[0]

    @property
    def keys(self) -> Ring:
        """The ring of keys."""
        return self.rings[1]

    @property
    def values(self) -> Ring:
        """The ring of values; that of keys if both are one tile."""
        return self.rings[-1]

    def tiles(self, loads: int = _LOADS) -> Tiles:
        """A role's way through the tiles of the CTA.

        Of tiles that may be passed by, `loads` flags of a thread are on their way at once.
        """
        program = self.plan.program
        within = {}
        place = program.beside if program.split is None else program.split.place
        if place is not None and place.in_cluster:
            within[place.var] = self.where.rank.astype(str(place.var.ty))
        given = self.plan.order, program.stream, self.where.cluster, within
        if program.seen is None:
            return Tiles(*given)
        return SeenTiles(*given, program=program, lane=self.where.lane, loads=loads)

    def loading(self, warp: int) -> tuple[Any, Callable[[], Tiles]]:
        """Which threads of a warp load, and their way through the tiles.

        Beside several warpgroups that multiply they have few registers.
        """
        if self.plan.program.seen is None:
            return self.where.thread == warp * WARP, self.tiles
        few = self.plan.consumers > 1 or self.writer is not None
        return self.where.warp == warp, lambda: self.tiles(_FEW_LOADS if few else _LOADS)

    def raise_flag(self, places: dict[Any, Any]) -> None:
        """Signal that a warpgroup has stored its part of the tile at some places; by one thread."""
        if self.writer is not None:
            box = self.plan.output.box
            row, column = (at(box.origin[each], places) for each in (box.axis, -1))
            self.writer.raise_flag(row, column)

    def release(self, ring: Ring) -> Release:
        """How a warpgroup hands stages back to all who fill them."""
        sharers = 1 if ring is self.queries else self.plan.sharers
        rank = None if sharers == 1 else self.where.thread % sharers
        return Release(ring, self.where.thread, (sharers, rank), 1)
