"""Candidates as arrays: all of one schedule and residency together, in pieces.

A piece is what `crossfuse.planner.dataflow.movement` analyses at once. Tiles and clusters that are
left are combined only here, and a piece at a time: a million candidates of four dims would take
64 MB, of which a piece has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.chain.check import TERMS
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.dataflow.cluster import legal_cluster
from crossfuse.planner.dataflow.residency import Residency, kept
from crossfuse.planner.dataflow.schedules import LoopSchedule
from crossfuse.planner.dataflow.tiling import PIECE, Tiling
from crossfuse.planner.space.count import check_rules, narrowed, with_room
from crossfuse.planner.space.domain import Domain, Extents, chosen
from crossfuse.planner.space.rules import Rule, ctas_of


def candidates_of(tiling: Tiling) -> int:
    """Candidates of a tiling whose blocks are arrays."""
    return len(np.atleast_1d(next(iter(tiling.block.values()))))


@dataclass(frozen=True)
class Batch:
    """Combinations of tiles and clusters, all of them.

    Attributes
    ----------
    tiles, clusters : Mapping[str, np.ndarray]
        An entry for each tile, and for each cluster.
    """

    tiles: Extents
    clusters: Extents

    @property
    def size(self) -> int:
        """Candidates."""
        return len(next(iter(self.tiles.values()))) * len(next(iter(self.clusters.values())))

    def piece(self, start: int, size: int = PIECE) -> Tiling:
        """Make those from `start` on, at most `size`; the clusters of a tile follow each other."""
        index = np.arange(start, min(start + size, self.size))
        tile, cluster = np.divmod(index, len(next(iter(self.clusters.values()))))
        return Tiling(chosen(self.tiles, tile), chosen(self.clusters, cluster))


@dataclass(frozen=True)
class Group:
    """Candidates that differ in tiles and clusters only.

    Attributes
    ----------
    family : str
        Where they come from, such as ``"published"``.
    schedule : LoopSchedule
        Of all of them.
    residency : Residency
        Of all of them.
    batches : tuple[Batch, ...]
        The candidates.
    """

    family: str
    schedule: LoopSchedule
    residency: Residency
    batches: tuple[Batch, ...]

    @property
    def size(self) -> int:
        """Candidates."""
        return sum(each.size for each in self.batches)

    def pieces(self, size: int = PIECE) -> Iterator[Tiling]:
        """All candidates, at most `size` at once."""
        for batch in self.batches:
            for start in range(0, batch.size, size):
                yield batch.piece(start, size)


def ruled(
    chain: Chain,
    device: Device,
    domain: Domain,
    rules: Sequence[Rule],
    family: str,
) -> tuple[Group, ...]:
    """Make what rules leave of a domain, each intermediate made once by its cluster.

    Clusters that no chain can run on are left out also where the rules leave them in: cls_l that
    exceeds the CTAs of a row, say, which the published rules keep.

    Parameters
    ----------
    chain, device
        What runs, and where.
    domain : Domain
        Where they start from.
    rules : Sequence[Rule]
        As for `crossfuse.planner.space.count.count`.
    family : str
        Name of the groups.

    Returns
    -------
    tuple[Group, ...]
        One for each schedule that has candidates.
    """
    check_rules(rules)
    for rule in (each for each in rules if each.on != "room"):
        domain = narrowed(chain, domain, rule)
    keep = np.asarray(legal_cluster(chain, domain.clusters))
    domain = replace(domain, clusters=chosen(domain.clusters, keep))
    room = [each for each in rules if each.on == "room"]
    residencies = {each: kept(chain, each) for each in domain.schedules}
    return combined(chain, device, family, residencies, room, domain.tiles(), domain.clusters)


def combined(
    chain: Chain,
    device: Device,
    family: str,
    residencies: Mapping[LoopSchedule, Residency],
    room: Sequence[Rule],
    tiles: Extents,
    clusters: Extents,
) -> tuple[Group, ...]:
    """Combine tiles and clusters under each schedule, those of them that have room.

    Parameters
    ----------
    chain, device
        What runs, and where.
    family : str
        Name of the groups.
    residencies : Mapping[LoopSchedule, Residency]
        The schedules, and how long tensors stay under each.
    room : Sequence[Rule]
        Rules on room.
    tiles, clusters : Mapping[str, np.ndarray]
        To combine; all clusters can run.

    Returns
    -------
    tuple[Group, ...]
        One for each schedule that has candidates.
    """
    ctas = ctas_of(chain, clusters) * clusters.get(TERMS, 1)
    sizes, found = np.unique(ctas), []
    for schedule, residency in residencies.items():
        flags = with_room(chain, device, schedule, room, tiles, sizes)
        batches = tuple(
            Batch(chosen(tiles, keep), chosen(clusters, ctas == size))
            for size, keep in flags.items()
            if keep.any()
        )
        if batches:
            found.append(Group(family, schedule, residency, batches))
    return tuple(found)
