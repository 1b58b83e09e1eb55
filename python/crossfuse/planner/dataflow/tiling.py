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

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.dataflow.cluster import check_cluster, cluster_lanes
from crossfuse.planner.dataflow.counts import Count, ceil_div, least
from crossfuse.planner.dataflow.schedules import LoopSchedule

LEVELS = ("cta", "cluster", "grid")


@dataclass(frozen=True)
class Tiling:
    """Extents of tiles, of one candidate or of many.

    Attributes
    ----------
    block : Mapping[str, Count]
        Extent that a CTA takes along each dim; the reduction of a later product takes
        cls_shuffle of them.
    cluster : Mapping[str, Count]
        CTAs along each dim; 1 where absent.
    """

    block: Mapping[str, Count]
    cluster: Mapping[str, Count]


@dataclass(frozen=True)
class Grain:
    """One dim at one level.

    Attributes
    ----------
    extent : int
        Iterations of the dim.
    tile : Count
        Iterations that a unit takes at a time.
    side : Count | None
        Units side by side; None for as many as there are tiles.
    """

    extent: int
    tile: Count
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
        """Units side by side, those without a tile too."""
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


def grains(
    chain: Chain, schedule: LoopSchedule, tiling: Tiling, level: str
) -> tuple[dict[str, Grain], ...]:
    """Say what a unit of a level takes along each dim.

    Parameters
    ----------
    chain, schedule, tiling
        The candidates.
    level : str
        One of `LEVELS`.

    Returns
    -------
    tuple[dict[str, Grain], ...]
        For each product, the dims of the chain. Dims that a product does not run over have the
        grain of clusters, which is what it is repeated by.
    """
    extents, lanes = chain.extents, cluster_lanes(chain, tiling.cluster)
    wide = {dim: tiling.block[dim] * tiling.cluster.get(dim, 1) for dim in extents}

    def cluster_grain(dim: str) -> Grain:
        spatial = dim in schedule.spatial
        if spatial and level == "grid":
            return Grain(extents[dim], extents[dim], 1)
        return Grain(extents[dim], wide[dim], None if spatial else 1)

    shared = {dim: cluster_grain(dim) for dim in extents}
    if level != "cta":
        return tuple(shared for _ in chain.products)

    def cta_grain(dim: str, tile: Count, side: Count) -> Grain:
        return Grain(extents[dim], tile, None if dim in schedule.spatial else side)

    rows = {
        dim: cta_grain(dim, tiling.block[dim], tiling.cluster.get(dim, 1)) for dim in chain.rows
    }
    views = []
    for index, (product, lane) in enumerate(zip(chain.products, lanes, strict=True)):
        column, summed = chain.column(index), product.reduction
        own = {column: cta_grain(column, tiling.block[column], lane.columns)}
        own[summed] = cta_grain(summed, tiling.block[summed] * lane.shuffle, lane.split)
        views.append({**shared, **rows, **own})
    return tuple(views)


def check_tiling(chain: Chain, tiling: Tiling) -> None:
    """Refuse tiles of one candidate that cannot be.

    Parameters
    ----------
    chain : Chain
        What is computed.
    tiling : Tiling
        Of plain integers.

    Raises
    ------
    PlanRefused
        Blocks that are missing, unknown or below 1; see `check_cluster` for the cluster.
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
