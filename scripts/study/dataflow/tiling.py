"""Tiles: how much of each dim a CTA, a cluster and the grid take at a time.

The tile of a level is what one unit of it has before it walks on:

```
level       unit           tile along d                      lanes: units side by side along d
cta         one CTA        block                             cls_d; all tiles if d is spatial
cluster     one cluster    block * cls_d                     1; all tiles if d is spatial
grid        all of them    block * cls_d; all if spatial     1
```

So what arrives in shared memory, what leaves L2 (a cluster reads a tile once and multicasts it) and
what leaves HBM (clusters that run at the same time read a tile once) are one formula over three
tiles. Cluster tiles follow each other along a temporal dim, and the CTAs interleave in them: with
blocks of 2 and two lanes, ``0 0 1 1 0 0 1 1``. All units walk in step, so that lanes without a tile
left wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.kernels.shape import Count, ceil_div, least
from study.dataflow.cluster import check_cluster, cluster_lanes
from study.dataflow.published import LoopSchedule

LEVELS = ("cta", "cluster", "grid")
#: Candidates that are analysed at once: an array of them has 128 KiB.
PIECE = 16384


@dataclass(frozen=True)
class Tiling:
    """Extents of tiles, of one candidate or of many."""

    #: Extent that a CTA takes along each dim; the reduction of a later product takes cls_shuffle of
    #: them.
    block: Mapping[str, Count]
    #: CTAs along each dim, and for gate and up (``"terms"``); 1 where absent.
    cluster: Mapping[str, Count]

    def pieces(self, size: int = PIECE) -> Iterator[Tiling]:
        """Cut many candidates into pieces that stay in a core's cache while they are analysed.

        `size` is candidates of a piece; they come in order, and there is at least one.
        """
        present = (*self.block.values(), *self.cluster.values())
        count = max((len(each) for each in present if isinstance(each, np.ndarray)), default=1)
        for start in range(0, count, size):
            yield self.at(slice(start, start + size))

    def at(self, places: slice | np.ndarray) -> Tiling:
        """The candidates at some places; an extent that is one number is that of all."""
        return Tiling(_at(self.block, places), _at(self.cluster, places))


def _at(extents: Mapping[str, Count], places: slice | np.ndarray) -> dict[str, Count]:
    return {
        dim: each[places] if isinstance(each, np.ndarray) else each for dim, each in extents.items()
    }


@dataclass(frozen=True)
class Grain:
    """What a unit of one level takes along one dim."""

    #: Iterations of the dim.
    extent: int
    #: Iterations that a unit takes at a time.
    tile: Count
    #: Units side by side; None for as many as there are tiles.
    side: Count | None

    @cached_property
    def tiles(self) -> Count:
        """Tiles along the dim; the last one may be clipped."""
        return ceil_div(self.extent, self.tile)

    @cached_property
    def active(self) -> Count:
        """Units that have a tile at all."""
        return self.tiles if self.side is None else least(self.side, self.tiles)

    @cached_property
    def lanes(self) -> Count:
        """Units side by side, including those without a tile."""
        return self.tiles if self.side is None else self.side

    @cached_property
    def steps(self) -> Count:
        """Iterations of the loop that walks the dim."""
        return 1 if self.side is None else ceil_div(self.tiles, self.side)

    @cached_property
    def held(self) -> Count:
        """Iterations that the first unit takes in all steps together; no unit takes more."""
        if self.side is None:
            return least(self.tile, self.extent)
        before = self.steps - 1
        return before * self.tile + least(self.tile, self.extent - before * self.side * self.tile)

    @cached_property
    def once(self) -> Count:
        """Iterations of the largest tile."""
        return least(self.tile, self.extent)


View: TypeAlias = "tuple[dict[str, Grain], ...]"


def grains(chain: Chain, schedule: LoopSchedule, tiling: Tiling) -> dict[str, View]:
    """What a unit of each of `LEVELS` takes along each dim, product by product.

    Dims that a product does not run over have the grain of clusters, which is what it is repeated
    by.
    """
    extents, lanes = chain.extents, cluster_lanes(chain, tiling.cluster)
    wide = {dim: tiling.block[dim] * tiling.cluster.get(dim, 1) for dim in extents}
    side = {dim: None if dim in schedule.spatial else 1 for dim in extents}
    cluster = {dim: Grain(extents[dim], wide[dim], side[dim]) for dim in extents}
    grid = {dim: Grain(extents[dim], extents[dim], 1) for dim in schedule.spatial}

    def cta_grain(dim: str, tile: Count, side: Count) -> Grain:
        return Grain(extents[dim], tile, None if dim in schedule.spatial else side)

    rows = {
        dim: cta_grain(dim, tiling.block[dim], tiling.cluster.get(dim, 1)) for dim in chain.rows
    }
    ctas = []
    for index, (product, lane) in enumerate(zip(chain.products, lanes, strict=True)):
        column, summed = chain.column(index), product.reduction
        own = {column: cta_grain(column, tiling.block[column], lane.columns)}
        split = lane.split if index else tiling.cluster.get(summed, 1)
        own[summed] = cta_grain(summed, tiling.block[summed] * lane.shuffle, split)
        ctas.append({**cluster, **rows, **own})
    count = len(chain.products)
    return {
        "cta": tuple(ctas),
        "cluster": (cluster,) * count,
        "grid": ({**cluster, **grid},) * count,
    }


def check_tiling(chain: Chain, tiling: Tiling) -> None:
    """Refuse tiles of one candidate with missing, unknown or non-positive blocks, or a bad cluster.

    Extents must be plain integers here; see `check_cluster` for the cluster.
    """
    odd = [dim for dim in (*chain.extents, *tiling.block) if not _block(chain, tiling, dim)]
    if odd:
        raise refuse(
            PlanRefused,
            "tiling",
            f"block {odd[0]}",
            found=tiling.block.get(odd[0], "none"),
            limit="a positive integer for each of " + ", ".join(chain.extents),
            instead=f"write the elements that a CTA takes along {odd[0]}",
        )
    check_cluster(chain, {dim: int(extent) for dim, extent in tiling.cluster.items()})


def _block(chain: Chain, tiling: Tiling, dim: str) -> bool:
    value = tiling.block.get(dim)
    return dim in chain.extents and type(value) is int and value >= 1
