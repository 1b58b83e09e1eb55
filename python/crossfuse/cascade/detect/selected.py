"""A reduction that keeps where elements stood, as a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.blocks.read import Block


@dataclass(frozen=True, eq=False)
class Selection(Block):
    """A block that chooses among its elements.

    Attributes
    ----------
    places : tvm.tirx.Buffer
        Where the chosen elements stood; `buffer` has their values.
    place : tvm.ir.PrimExpr
        What stands for the place of an element, over the block's variables.
    k : int
        How many it keeps, if it is a ``"topk"``; then the last of `Block.coordinates` counts them.
    """

    places: Any = None
    place: Any = None
    k: int = 0
