"""Registers of a kernel whose loading warpgroup makes rows, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.phase import SUMS_BESIDE_CHUNKS, SUMS_BESIDE_ROWS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.phase import PhasePlan
    from crossfuse.lower.hopper.rows.program import RowProgram

#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; 0 leaves them as launched. Together at most 64 Ki a CTA.
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; 0 leaves them as launched. Together what a CTA has at launch, or they would wait for more
#: forever: multiples of 8 for each thread, so 168 each of three warpgroups, 128 of four.
REGISTERS_BESIDE_ROWS = {1: (0, 0), 2: (72, 216), 3: (80, 144)}
#: The same where rows are made chunk by chunk, several at a time.
BESIDE_CHUNKS = {1: (0, 0), 2: (120, 192), 3: (80, 144)}
#: The same where two warpgroups multiply, and a fourth one makes rows; that has the third number.
BESIDE_HEAD = (40, 184, 104)


def registers_beside(rows: RowProgram | None) -> dict[int, tuple[int, int]]:
    """Registers of threads beside what makes rows, as `REGISTERS`."""
    if rows is None or rows.by_warpgroups:
        return REGISTERS
    return REGISTERS_BESIDE_ROWS if rows.chunks is None else BESIDE_CHUNKS


def check_room(phase: PhasePlan) -> None:
    """Refuse sums beside which the loading warpgroup has no registers for rows.

    Raises
    ------
    LoweringRefused
        Naming the tile.
    """
    rows = phase.program.rows
    most = SUMS_BESIDE_ROWS if rows is None or rows.chunks is None else SUMS_BESIDE_CHUNKS
    if phase.chunks is not None and phase.blocks > 1:
        raise refuse(
            "rows",
            f"tile of {phase.warpgroups.rows} x {phase.columns}",
            found=f"{phase.blocks} blocks of 64 rows of a warpgroup",
            limit="one block, whose sums have two factors in a thread",
            instead="take tiles of fewer rows, or make whole rows: leave the chunk out",
        )
    if phase.sums > most:
        raise refuse(
            "rows",
            f"tile of {phase.warpgroups.rows} x {phase.columns}",
            found=f"{phase.sums} registers of a thread for sums",
            limit=f"{most}: warps that make rows have the others",
            instead="take narrower tiles, or make the rows in a kernel of their own",
        )
