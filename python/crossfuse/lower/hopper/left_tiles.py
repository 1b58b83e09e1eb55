"""Left operands of wgmma: registers, or tiles in shared memory as matrix descriptors tell them.

PTX ISA, wgmma.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.gathered import CHUNK, share_bytes
from crossfuse.lower.hopper.hold import hold
from crossfuse.lower.hopper.kept import GROUP, GROUP_REGISTERS
from crossfuse.lower.hopper.kernel_memory import RingPlan
from crossfuse.lower.hopper.operand import ROW_BYTES, WARPGROUP_ROWS
from crossfuse.lower.hopper.statements import Variable, run
from crossfuse.lower.hopper.tile import Gather

#: Bytes of a K-major row that hold the k of one wgmma.
K_BYTES = 32
#: Codes of swizzles for `encode_matrix_descriptor`.
_NONE, _SWIZZLE_128 = 0, 3
#: Bytes of eight rows of a swizzled tile: one repeat of the pattern.
_PATTERN = 8 * ROW_BYTES
#: Bytes of eight rows of eight 16-bit columns without a swizzle.
_CORE_MATRIX = 128


#: What names the operand of one wgmma: a tile, and the number of the wgmma in it.
Operands = Callable[[Any, int], list[Any]]


class LeftOperand(Protocol):
    """Where one warpgroup's left tiles are."""

    @property
    def layouts(self) -> tuple[int, ...]:
        """What a wgmma of 16-bit types is told of their layout."""

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
    layouts : tuple[int, ...]
        That the tile is not transposed.
    """

    descriptor: Callable[[], Variable]
    pitch: int
    step: int
    layouts: tuple[int, ...] = (0,)

    def open(self) -> Operands:
        """Write the first tile's descriptor."""
        first = self.descriptor()

        def operands(tile: Any, part: int) -> list[Any]:
            return [first.value + words(tile * self.pitch + part * self.step)]

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
    layouts : tuple[int, ...]
        Nothing.
    """

    registers: Any
    count: int
    depth: int
    layouts: tuple[int, ...] = ()

    def open(self) -> Operands:
        """Nothing is needed."""

        def operands(tile: Any, part: int) -> list[Any]:
            first = (tile * (self.depth // GROUP) + part) * GROUP_REGISTERS
            return [self.registers[first + each] for each in range(GROUP_REGISTERS)]

        return operands

    def hold(self) -> None:
        """All of them are in use until here."""
        hold(self.registers, self.count)


def ring_tiles(ring: RingPlan, region: Callable[[Any], Any], warpgroup: Any) -> LeftTiles:
    """Tiles of a ring, by stage."""
    start = warpgroup * (WARPGROUP_ROWS * ROW_BYTES)
    return LeftTiles(lambda: swizzled("left_tile", region(start)), ring.pitch, K_BYTES)


def gathered_tiles(
    gather: Gather, depth: int, region: Callable[[Any], Any], warpgroup: Any
) -> LeftTiles:
    """Tiles of what a cluster has gathered, by step of `depth` columns."""

    def descriptor() -> Variable:
        address = region(warpgroup * share_bytes(gather))
        return _described("left_tile", address, CHUNK, _CORE_MATRIX, _NONE)

    return LeftTiles(descriptor, depth // 8 * CHUNK, 2 * CHUNK)


def swizzled(name: str, address: Any, leading: int = 16) -> Variable:
    """Descriptor of a tile with rows of 128 bytes; its pattern repeats every 8 rows.

    The leading offset has no meaning for K-major tiles.
    """
    return _described(name, address, leading, _PATTERN, _SWIZZLE_128)


def _described(name: str, address: Any, leading: int, stride: int, swizzle: int) -> Variable:
    descriptor = Variable(name, "uint64")
    run(
        ir.script.cuda.wgmma.encode_matrix_descriptor(
            descriptor.address, address, leading // 16, stride // 16, swizzle
        )
    )
    return descriptor


def words(offset: Any) -> Any:
    """An offset in a descriptor's units of 16 bytes."""
    return ir.script.Cast("uint64", offset // 16)
