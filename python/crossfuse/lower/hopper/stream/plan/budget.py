"""Who multiplies: warpgroups that do all of their rows, or some that share the columns of 64 rows.

A thread holds scores, weights and sums of its rows. Where that is too much, one warpgroup makes the
weights of 64 rows, and others add to the sums, each to its own columns.
"""

from __future__ import annotations

from crossfuse.lower.hopper.plan.operand import MAX_BOX
from crossfuse.lower.hopper.stream.plan.registers import RegisterPlan
from crossfuse.lower.hopper.stream.program.stream import StreamProgram
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; and how many of the latter scores, weights and sums may take beside addresses. Together
#: at most 64 Ki a CTA.
REGISTERS = {1: (0, 0, 176), 2: (24, 240, 184), 3: (32, 160, 132)}
#: The same by the number of warpgroups that share columns: of the loading one, of that of scores,
#: of those of sums; and how many of the second scores and weights may take.
SHARED_REGISTERS = {1: (24, 240, 240, 184), 2: (24, 120, 184, 80)}
#: Columns that a warpgroup can sum, and those that begin with a box of 16-bit values.
MAX_COLUMNS, _BOX = MAX_BOX, ROW_BYTES // 2
_REGISTERS_OF_SM = 1 << 16
#: Registers of an instruction beside its sums, as ptxas 13.0 counts them.
_BESIDE_SUMS = 26


def launched_registers(threads: int) -> int:
    """Registers of a thread as a CTA of so many threads starts."""
    return _REGISTERS_OF_SM // threads // 8 * 8


def instruction_sums(sums: int, threads: int) -> int:
    """Sums of a thread that one wgmma takes, of those that it has.

    ptxas asks that an instruction's registers are there as the kernel starts, whatever setmaxnreg
    brings: 154 for 256 columns ("Insufficient registers (128) to compile instruction"). Two of 128
    columns read the left operand twice.
    """
    return sums if sums + _BESIDE_SUMS <= launched_registers(threads) else sums // 2


def plan_adders(program: StreamProgram, registers: RegisterPlan) -> int:
    """Decide how many warpgroups share the columns of a tile's sums.

    Parameters
    ----------
    program : StreamProgram
        What is computed, its tiles checked.
    registers : RegisterPlan
        Arrays of elements.

    Returns
    -------
    int
        Their number, beside one that makes scores and weights; 0 if each warpgroup does all for
        its own 64 rows.

    Raises
    ------
    LoweringRefused
        If registers hold neither.
    """
    rows, keys = program.tile
    columns = program.output.columns
    elements = registers.count * keys // 2 + keys // 4
    limit = REGISTERS[rows // WARPGROUP_ROWS][-1]
    if columns <= MAX_COLUMNS and elements + columns // 2 <= limit:
        return 0
    if rows > WARPGROUP_ROWS:
        fits = columns <= MAX_COLUMNS and 12 + columns // 2 <= limit  # 16 keys
        raise refuse(
            "stream-registers",
            f"scores '{program.scores.name}'",
            found=f"{elements + columns // 2} registers for {registers.count} arrays of {keys} "
            f"keys, their weights and {columns} columns of sums",
            limit=f"{limit} registers a thread with {rows // WARPGROUP_ROWS} multiplying "
            "warpgroups",
            instead="take fewer keys a tile"
            if fits
            else f"take {WARPGROUP_ROWS} rows a tile, whose columns several warpgroups share",
        )
    adders = -(-columns // MAX_COLUMNS)
    _check_columns(program, adders)
    _check_elements(program, registers, elements, adders)
    return adders


def _check_columns(program: StreamProgram, adders: int) -> None:
    columns = program.output.columns
    if adders > max(SHARED_REGISTERS) or (adders > 1 and columns % (adders * _BOX)):
        raise refuse(
            "stream-columns",
            f"sums '{program.sums.name}'",
            found=f"{columns} columns",
            limit=f"at most {MAX_COLUMNS}, or a multiple of {2 * _BOX} up to "
            f"{max(SHARED_REGISTERS) * MAX_COLUMNS} that two warpgroups share: each begins with a "
            f"box of {_BOX}",
            instead="pad the columns with zeros, or leave the annotation out for the general "
            "lowering",
        )
    if program.split is not None:
        raise refuse(
            "stream-columns",
            f"loop '{program.split.place.var.name}'",
            found=f"{program.split.place.extent} CTAs that share keys, whose {columns} columns of "
            f"sums {adders} warpgroups of a CTA hold apart from the rows",
            limit="sums, weights and rows of a tile in one warpgroup, which hands them over",
            instead="take one CTA a tile (CascadeTiles(cluster=1)), or fewer columns",
        )


def _check_elements(
    program: StreamProgram, registers: RegisterPlan, found: int, adders: int
) -> None:
    limit = SHARED_REGISTERS[adders][-1]
    if found > limit:
        raise refuse(
            "stream-registers",
            f"scores '{program.scores.name}'",
            found=f"{found} registers for {registers.count} arrays of {program.tile[1]} keys and "
            "their weights",
            limit=f"{limit} registers a thread of the warpgroup that makes them beside {adders} "
            "that add",
            instead="take fewer keys a tile",
        )
