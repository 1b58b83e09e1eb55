"""Steps of tiles of rows: which tiles of the axis each of them needs, and which are masked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crossfuse.cascade.rewrite.tiled.sizes import CascadeTiles
from crossfuse.cascade.rewrite.tiled.work import TileWork


@dataclass(frozen=True)
class Steps:
    """What the CTAs of a stream of tiles do.

    Attributes
    ----------
    sizes : CascadeTiles
        The tiles, all chosen.
    places : int
        Tiles of all rows and columns.
    total : int
        Steps of all of them together.
    longest : int
        Of the tile with most.
    masked : int
        Steps, of all, in which masks are computed.
    """

    sizes: CascadeTiles
    places: int
    total: int
    longest: int
    masked: int

    @property
    def even(self) -> bool:
        """Whether all tiles have as many steps."""
        return self.total == self.places * self.longest


def steps_of(work: TileWork, tiles: CascadeTiles) -> Steps:
    """Count steps.

    Parameters
    ----------
    work : TileWork
        The cascade.
    tiles : CascadeTiles
        Sizes; what they leave open is chosen as for the kernel.
    """
    sizes = tiles.complete(work.rows, work.length, work.columns, work.depth)
    tall = -(-work.rows // sizes.rows)
    wide = -(-work.columns // sizes.columns) if sizes.columns else 1
    needed, masked = _needed(work, sizes, tall)
    others = work.groups * wide
    return Steps(
        sizes,
        tall * others,
        int(needed.sum()) * others,
        int(needed.max()),
        int(masked.sum()) * others,
    )


def _needed(work: TileWork, sizes: CascadeTiles, tall: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of each tile of rows, and those of them that not all of its rows need whole."""
    count = -(-work.length // sizes.elements)
    if not work.spans:
        # Masks that bound nothing are computed everywhere.
        masked = count if work.masks else 0
        return np.full(tall, count), np.full(tall, masked)
    rows, first, behind = np.array(work.spans, np.float64).T
    top = np.arange(tall) * sizes.rows
    last = np.minimum(top + sizes.rows, work.rows) - 1
    ends = np.stack([top, last])
    starts, stops = np.interp(ends, rows, first), np.interp(ends, rows, behind)
    begin = np.floor(starts.min(0) / sizes.elements)
    stop = np.minimum(count, np.floor((stops.max(0) - 1) / sizes.elements) + 1)
    needed = np.maximum(1, stop - begin)
    whole = np.floor(stops.min(0) / sizes.elements) - np.ceil(starts.max(0) / sizes.elements)
    return needed, needed - np.clip(whole, 0, needed)
