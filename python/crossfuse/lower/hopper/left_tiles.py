"""Left tiles in shared memory as wgmma's matrix descriptors tell them (PTX ISA, wgmma)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.gathered import CHUNK, share_bytes
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


@dataclass(frozen=True)
class LeftTiles:
    """Left tiles of one warpgroup.

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
