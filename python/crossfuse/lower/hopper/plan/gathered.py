"""Slices that a cluster gathers, [rank, row, column], as one matrix [row, column].

In shared memory each multiplying warpgroup has its 64 rows by themselves, as core matrices of wgmma
without a swizzle: eight columns (16 bytes) of all rows, then the next eight. So a slice is one
piece, whatever its width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Gather, GatheredTile, Tile
from crossfuse.lower.refusal import refuse

#: Bytes of eight columns of a warpgroup's 64 rows.
CHUNK = 64 * 16
#: Columns that one wgmma multiplies, and that one stmatrix stores.
_GROUP = 16
_TYPES = ("float16", "bfloat16")


def share_bytes(gather: Gather) -> int:
    """Bytes of the intermediate that one warpgroup multiplies."""
    return gather.extents[1] // 8 * CHUNK


def gathered_bytes(gather: Gather | None, consumers: int) -> int:
    """Bytes of the intermediate in each CTA; none if there is none."""
    return 0 if gather is None else consumers * share_bytes(gather)


def slice_bytes(gather: Gather) -> int:
    """Bytes of one slice that one warpgroup multiplies."""
    return gather.width // 8 * CHUNK


def barrier_count(gather: Gather, consumers: int) -> int:
    """Barriers of all warpgroups: one each, or one for each slice in ring order."""
    return consumers * (gather.place.extent if gather.ring else 1)


def check_gather(gather: Gather, dtype: str) -> None:
    """Refuse slices that wgmma cannot take.

    Raises
    ------
    LoweringRefused
        If slices are no whole groups of 16 columns, or elements no 16-bit floats.
    """
    if gather.width % _GROUP or dtype not in _TYPES:
        raise refuse(
            "tile-gather",
            f"tensor '{gather.slab.name}'",
            found=f"{gather.place.extent} slices of {gather.width} columns of {dtype}",
            limit=f"slices of a multiple of {_GROUP} columns, of {' or '.join(_TYPES)}",
            instead="choose another cluster size, or keep the intermediate in L2 (grid_stage)",
        )


@dataclass(frozen=True)
class Element:
    """An element of a matrix that is loaded.

    Attributes
    ----------
    source : Any
        The buffer.
    indices : tuple
        Row and column.
    """

    source: Any
    indices: tuple[Any, ...]


def side_by_side(gather: Gather, indices: Any) -> tuple[Any, ...]:
    """Row and column of an element of slices that lie side by side."""
    rank, *_, row, column = indices
    return row, ir.sym.Analyzer().simplify(rank * gather.width + column)


def gathered(tile: Tile, gather: Gather) -> GatheredTile:
    """A tile of that matrix."""
    return GatheredTile(tile.buffer, tile.origin, tile.shape, gather)


def check_depth(gather: Gather, depth: int) -> None:
    """Refuse steps that do not divide what is gathered: there is nothing behind it to multiply.

    Raises
    ------
    LoweringRefused
        If a step is left over, or is no whole group of columns.
    """
    columns = gather.width if gather.ring else gather.extents[1]
    if columns % depth or depth % _GROUP:
        what = " of each slice" if gather.ring else ""
        raise refuse(
            "tile-gather",
            f"tensor '{gather.slab.name}'",
            found=f"{columns} columns{what} in steps of {depth}",
            limit=f"whole steps of a multiple of {_GROUP} columns",
            instead="split the reduction by another factor, or choose another cluster size",
        )
