"""An intermediate that stays in registers, as the left operand of the next product.

What a thread holds of a wgmma's sums is what the next wgmma takes of its left operand, if pairs of
neighbours are rounded to 16 bits and share a register. PTX ISA, wgmma, register fragments for A
and D.
"""

from __future__ import annotations

from crossfuse.lower.hopper.program.tile import Tile
from crossfuse.lower.hopper.program.tile_program import Contraction
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.registers import REGISTERS, REGISTERS_OF_THREE

#: Columns that one wgmma multiplies, and the registers of a thread that hold them.
GROUP, GROUP_REGISTERS = 16, 4
_TYPES = ("float16", "bfloat16")
#: Registers of a thread for what is kept and for the sums beside it, by the number of multiplying
#: warpgroups; the others hold addresses.
_MAX_REGISTERS = {1: REGISTERS, 2: REGISTERS, 3: REGISTERS_OF_THREE}


def kept_registers(columns: int) -> int:
    """Registers of a thread that hold some columns of the 64 rows of its warpgroup."""
    return columns // GROUP * GROUP_REGISTERS


def check_kept(tile: Tile) -> None:
    """Refuse tiles that wgmma cannot take from registers.

    Raises
    ------
    LoweringRefused
        If it is no whole number of groups of columns, or elements are no 16-bit floats.
    """
    if tile.shape[1] % GROUP or tile.dtype not in _TYPES:
        raise refuse(
            "tile-registers",
            f"tensor '{tile.buffer.name}'",
            found=f"{tile.shape[1]} columns of {tile.dtype} in registers",
            limit=f"a multiple of {GROUP} columns, of {' or '.join(_TYPES)}: sums lie in registers "
            "as operands of 16 bits do, and of no other width",
            instead="keep the intermediate in L2 (grid_stage), or store it to global memory",
        )


def check_room(contraction: Contraction, consumers: int) -> None:
    """Refuse a product of what is kept that does not fit in registers.

    Parameters
    ----------
    contraction : Contraction
        The product.
    consumers : int
        Warpgroups that multiply.

    Raises
    ------
    LoweringRefused
        If there are too few registers, or steps are no whole groups of columns.
    """
    kept = kept_registers(contraction.steps * contraction.depth)
    sums = contraction.columns // 2 * len(contraction.products)
    most = _MAX_REGISTERS[consumers]
    if kept + sums > most or contraction.depth % GROUP:
        raise refuse(
            "tile-registers",
            f"tensor '{contraction.left.buffer.name}'",
            found=f"{kept} registers of it beside {sums} sums, in steps of {contraction.depth} "
            "columns",
            limit=f"{most} registers a thread with {consumers} multiplying warpgroups, steps of a "
            f"multiple of {GROUP}",
            instead="make more parts of the intermediate, or narrower tiles of the output",
        )
