"""Registers of a kernel whose loading warpgroup makes rows, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.phase import SUMS_BESIDE_ROWS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.phase import PhasePlan

#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; 0 leaves them as launched. Together what a CTA has at launch, or they would wait for more
#: forever: multiples of 8 for each thread, so 168 each of three warpgroups, 128 of four.
REGISTERS_BESIDE_ROWS = {1: (0, 0), 2: (72, 216), 3: (80, 144)}


def check_room(phase: PhasePlan) -> None:
    """Refuse sums beside which the loading warpgroup has no registers for rows.

    Raises
    ------
    LoweringRefused
        Naming the tile.
    """
    if phase.sums > SUMS_BESIDE_ROWS:
        raise refuse(
            "rows",
            f"tile of {phase.warpgroups.rows} x {phase.columns}",
            found=f"{phase.sums} registers of a thread for sums",
            limit=f"{SUMS_BESIDE_ROWS}: warps that make rows have the others",
            instead="take narrower tiles, or make the rows in a kernel of their own",
        )
