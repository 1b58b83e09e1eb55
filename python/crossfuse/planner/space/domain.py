"""What a candidate may choose from: loop schedules, block tiles, and extents of clusters.

A candidate is a schedule, a block extent for each dim and a cluster extent for each dim. These are
independent of each other until a rule ties them together, so that a space is counted without making
it: as schedules times block tiles times clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.dataflow.schedules import LoopSchedule, loop_schedules

#: Blocks are multiples of this: the columns of the smallest tile that tensor cores like.
STEP = 16
#: CTAs of a cluster along each dim, as published.
CLUSTER_EXTENTS = (1, 2, 4, 8, 16)

Extents = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Domain:
    """Three independent choices.

    Attributes
    ----------
    schedules : tuple[LoopSchedule, ...]
        Loop orders.
    blocks : Mapping[str, tuple[int, ...]]
        Extents of a CTA's tile, by dim.
    clusters : Mapping[str, np.ndarray]
        CTAs along each dim, an entry for each cluster.
    """

    schedules: tuple[LoopSchedule, ...]
    blocks: Mapping[str, tuple[int, ...]]
    clusters: Extents

    @property
    def cluster_count(self) -> int:
        """Clusters that are left."""
        return len(next(iter(self.clusters.values())))

    @property
    def size(self) -> int:
        """Candidates, counted and not made."""
        tiles = prod(len(each) for each in self.blocks.values())
        return len(self.schedules) * self.cluster_count * tiles

    def tiles(self) -> dict[str, np.ndarray]:
        """All block tiles, the last dim fastest: an array for each dim."""
        return grid(self.blocks)


def grid(choices: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """All combinations of some choices, the last one fastest: an array of float64 for each name.

    Counts are float64, see `crossfuse.planner.counts`.
    """
    values = [np.asarray(each, dtype=np.float64) for each in choices.values()]
    return {
        name: each.ravel()
        for name, each in zip(choices, np.meshgrid(*values, indexing="ij"), strict=True)
    }


def chosen(extents: Extents, keep: np.ndarray) -> dict[str, np.ndarray]:
    """The entries that a flag or an index picks."""
    return {name: each[keep] for name, each in extents.items()}


def published(
    chain: Chain, *, step: int = STEP, cluster_extents: Iterable[int] = CLUSTER_EXTENTS
) -> Domain:
    """Make the space that FlashFuser starts from (arXiv 2512.12949, section on the search engine).

    Parameters
    ----------
    chain : Chain
        Of any number of products.
    step : int
        Blocks are its multiples, up to the extent; one block at least.
    cluster_extents : Iterable[int]
        CTAs along each dim.

    Returns
    -------
    Domain
        All schedules, times clusters, times extent / step blocks for each dim.
    """
    names, sizes = list(chain.extents), tuple(cluster_extents)
    clusters = grid(dict.fromkeys(names, sizes))
    return Domain(tuple(loop_schedules(names)), blocks_of(chain, step), clusters)


def blocks_of(chain: Chain, step: int = STEP) -> dict[str, tuple[int, ...]]:
    """Multiples of a step up to the extent, by dim, and the step at least; any of a batch."""
    batch = chain.rows[:-1]
    steps = {dim: 1 if dim in batch else step for dim in chain.extents}
    return {
        dim: tuple(range(steps[dim], max(extent, steps[dim]) + 1, steps[dim]))
        for dim, extent in chain.extents.items()
    }
