"""A kernel of a cascade, of whichever family: its tiles, and the kernels it launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.planner.cascade.rows_space import RowsTiles
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.families import ROWS, STREAM, TILES

Tiles: TypeAlias = "StreamTiles | CascadeTiles | RowsTiles"


@dataclass(frozen=True)
class CascadeKernel:
    """A kernel of a cascade as a user's own terms see it: `crossfuse.planner.cost.own.OwnTerm`."""

    #: Of one candidate; those of rows before a product may be of many, with arrays as fields.
    tiles: Tiles

    @property
    def family(self) -> str:
        """``"stream"``, ``"tiles"`` or ``"rows"``."""
        kinds = {StreamTiles: STREAM, CascadeTiles: TILES, RowsTiles: ROWS}
        return kinds[type(self.tiles)]

    def kernels(self, shape: CascadeShape) -> tuple[str, ...]:
        """Name the launched kernels, in the form of those of chains: see `TiledKernel.kernels`."""
        stored = isinstance(self.tiles, CascadeTiles) and self.tiles.in_memory
        return (self.family, "merge") if stored else (self.family,)
