"""`grid_stage` is for pipelined kernels: general ones have no flags between CTAs."""

from __future__ import annotations

from typing import Any

from crossfuse.lower.refusal import refuse
from crossfuse.markers import staged_blocks


def check_grid_stage(function: Any) -> None:
    """Refuse a staged intermediate in a function that has no pipelined loop.

    Raises
    ------
    LoweringRefused
        Naming the block.
    """
    for block in staged_blocks(function):
        raise refuse(
            "grid-stage",
            f"block '{block.name_hint}'",
            found="an intermediate that stays in L2, in a kernel of the general lowering",
            limit="kernels of the Hopper pipeline, in which CTAs tell each other what is stored",
            instead="schedule both products with stages (crossfuse.schedule.rules.tiled_ffn), or "
            "leave grid_stage out",
        )
