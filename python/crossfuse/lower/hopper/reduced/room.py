"""Whether registers have room for the rows of a tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfuse.lower.hopper.plan.warpgroups import Warpgroups
from crossfuse.lower.refusal import refuse

if TYPE_CHECKING:
    from crossfuse.lower.hopper.reduced.program import RowReductions

#: Warpgroups that multiply at most: threads of more have 160 registers, or sums of several blocks.
_WARPGROUPS = 2


def check_reduced(reduced: RowReductions, warpgroups: Warpgroups) -> None:
    """Refuse tiles beside whose sums there is no room for what is selected from them.

    Raises
    ------
    LoweringRefused
        Naming the product.
    """
    if warpgroups.count > _WARPGROUPS or warpgroups.blocks > 1:
        raise refuse(
            "tile-shape",
            f"product of '{reduced.scores.name}'",
            found=f"tiles of {warpgroups.rows} rows, which are reduced in registers",
            limit="64 or 128 rows: other warpgroups have no registers left beside the sums",
            instead="split rows by 64",
        )
