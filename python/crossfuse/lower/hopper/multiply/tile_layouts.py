"""Layouts of tiles that wgmma takes, for kernels that are written in TIRx by hand.

`gemm_async` recognises buffers with these layouts, see
`crossfuse.lower.hopper.multiply.gemm_async`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.multiply.instruction import NO_SWIZZLE, SWIZZLE_128
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES

#: Bytes of a row of a core matrix.
_CORE_BYTES = 16
#: Rows of a fragment: those of one warpgroup.
ROWS = 64


def accumulator_layout(columns: int) -> Any:
    """Where a warpgroup's threads hold sums of shape [64, columns], float32.

    Parameters
    ----------
    columns : int
        A multiple of 8.

    Returns
    -------
    tvm.tirx.layout.TileLayout
        For a buffer in scope ``local``. Register ``4 j + 2 h + q`` of lane ``4 g + t`` of warp w is
        element (16 w + 8 h + g, 8 j + 2 t + q). PTX ISA, wgmma, register fragments for D.
    """
    axes = ir.layout_axes
    return ir.tile_layout(
        (4, 2, 8, columns // 8, 4, 2),
        (1 @ axes.wid_in_wg, 2, 4 @ axes.laneid, 4, 1 @ axes.laneid, 1),
    )


def operand_layout(columns: int, dtype: str) -> Any:
    """Where a warpgroup's threads hold a left operand of shape [64, columns].

    Parameters
    ----------
    columns : int
        A multiple of 32 bytes.
    dtype : str
        Element type, of 16 or 8 bits.

    Returns
    -------
    tvm.tirx.layout.TileLayout
        For a buffer in scope ``local``; neighbours of a row share a register. PTX ISA, wgmma,
        register fragments for A.
    """
    each = 32 // int(ir.tvm.DataType(dtype).bits)  # elements of a register
    axes = ir.layout_axes
    return ir.tile_layout(
        (4, 2, 8, columns // (8 * each), 2, 4, each),
        (1 @ axes.wid_in_wg, each, 4 @ axes.laneid, 4 * each, 2 * each, 1 @ axes.laneid, 1),
    )


def shared_layout(dtype: str, shape: Sequence[int], *, swizzled: bool = True) -> Any:
    """How tiles lie in shared memory: stages first, the last two dimensions are a tile's.

    Parameters
    ----------
    dtype : str
        Element type.
    shape : Sequence[int]
        Of the buffer.
    swizzled : bool
        Blocks of 128 bytes of all rows, as TMA stores them with the 128-byte swizzle; otherwise 16
        bytes of all rows, then the next ones.

    Returns
    -------
    tvm.tirx.layout.Layout
        For a buffer in scope ``shared`` or ``shared.dyn``.

    Raises
    ------
    LoweringRefused
        If rows or columns do not fill whole patterns.
    """
    *_, rows, columns = shape
    span = columns * int(ir.tvm.DataType(dtype).bits) // 8
    unit = ROW_BYTES if swizzled else _CORE_BYTES
    if rows % 8 or span % unit:
        raise refuse(
            "gemm-async",
            f"a tile of {rows} x {columns} {dtype}",
            found=f"{rows} rows of {span} bytes",
            limit=f"a multiple of 8 rows, of a multiple of {unit} bytes",
            instead="take larger tiles" + (", or none of the swizzle" if swizzled else ""),
        )
    return ir.mma_shared_layout(dtype, SWIZZLE_128 if swizzled else NO_SWIZZLE, list(shape))
