"""Left operands of wgmma: registers, or tiles in shared memory as matrix descriptors tell them.

PTX ISA, wgmma.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from crossfuse.lower.hopper.multiply.hold import hold
from crossfuse.lower.hopper.multiply.instruction import (
    CORE_MATRIX,
    K_BYTES,
    NO_SWIZZLE,
    described,
    swizzled,
    words,
)
from crossfuse.lower.hopper.plan.gathered import CHUNK, share_bytes
from crossfuse.lower.hopper.plan.kept import GROUP, GROUP_REGISTERS
from crossfuse.lower.hopper.plan.memory import RingPlan
from crossfuse.lower.hopper.program.tile import Gather
from crossfuse.lower.hopper.statements import Variable
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

#: What names the operand of one wgmma: a tile, the number of the wgmma in it, and the block of 64
#: rows.
Operands = Callable[[Any, int, int], list[Any]]


class LeftOperand(Protocol):
    """Where one warpgroup's left tiles are."""

    def open(self) -> Operands:
        """Write what is needed once; returns how a wgmma names its operand."""

    def hold(self) -> None:
        """Keep the compiler from using the operand's registers for anything else before here."""


@dataclass(frozen=True)
class LeftTiles:
    """Left tiles of one warpgroup in shared memory, K-major.

    Attributes
    ----------
    descriptor : Callable
        Writes the descriptor of the first tile; returns the variable.
    pitch : int
        Bytes from one tile to the next.
    step : int
        Bytes from one wgmma to the next, along k.
    """

    descriptor: Callable[[], Variable]
    pitch: int
    step: int

    def open(self) -> Operands:
        """Write the first tile's descriptor."""
        first = self.descriptor()

        def operands(tile: Any, part: int, block: int) -> list[Any]:
            start = part * self.step + block * (WARPGROUP_ROWS * ROW_BYTES)
            return [first.value + words(tile * self.pitch + start)]

        return operands

    def hold(self) -> None:
        """Shared memory has barriers."""


@dataclass(frozen=True)
class LeftRegisters:
    """Left tiles of one warpgroup in its registers, see `kept`.

    Attributes
    ----------
    registers : Any
        All of them, in the order of the columns.
    count : int
        Their number.
    depth : int
        Columns of a tile.
    """

    registers: Any
    count: int
    depth: int

    def open(self) -> Operands:
        """Nothing is needed."""

        def operands(tile: Any, part: int, block: int) -> list[Any]:
            first = (tile * (self.depth // GROUP) + part) * GROUP_REGISTERS
            return [self.registers[first + each] for each in range(GROUP_REGISTERS)]

        return operands

    def hold(self) -> None:
        """All of them are in use until here."""
        hold(self.registers, self.count)


def ring_tiles(
    ring: RingPlan, region: Callable[[Any], Any], warpgroup: Any, rows: int
) -> LeftTiles:
    """Tiles of a ring, by stage: as many rows as the warpgroup multiplies."""
    start = warpgroup * (rows * ROW_BYTES)
    return LeftTiles(lambda: swizzled("left_tile", region(start)), ring.pitch, K_BYTES)


def gathered_tiles(
    gather: Gather, depth: int, region: Callable[[Any], Any], warpgroup: Any
) -> LeftTiles:
    """Tiles of what a cluster has gathered, by step of `depth` columns."""

    def descriptor() -> Variable:
        address = region(warpgroup * share_bytes(gather))
        return described("left_tile", address, CHUNK, CORE_MATRIX, NO_SWIZZLE)

    return LeftTiles(descriptor, depth // 8 * CHUNK, 2 * CHUNK)
