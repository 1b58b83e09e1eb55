"""Our own candidates, beyond the published ones: families that share none with each other.

Each family gives one published restriction up and keeps the others, so that it says what that
restriction costs:

```
family        gives up                                              R1   R2   R4   C
published     nothing; clusters that can run                        yes  yes  yes  kept
one CTA       R2: no cluster, no DSM                                yes  1    yes  kept
uneven        R1: tiles that do not divide                          no   yes  yes  kept
odd clusters  powers of two: 3, 5, 6, 7 and so on CTAs              yes  yes  yes  kept
again         R4: l spatial, each cluster makes the C it needs      yes  yes  no   kept
recomputed    C is made again for each tile of l                    yes  yes  yes  recomputed
through L2    C is made once for all clusters, which read it in L2  yes  yes  -    grid-wide
apart         gate and up on two CTAs                               yes  yes  yes  kept
```

Products with clusters of different shapes are chains of their own, see
``scripts/study/cut.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.chain.check import TERMS
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.dataflow.cluster import MAX_CLUSTER, legal_cluster
from crossfuse.planner.dataflow.residency import Residency, kept, recomputed
from crossfuse.planner.dataflow.schedules import LoopSchedule, loop_schedules
from crossfuse.planner.space.domain import CLUSTER_EXTENTS, chosen, grid
from crossfuse.planner.space.groups import Group, combined
from crossfuse.planner.space.rules import Room, Rule, columns_in_a_cluster, ctas_of, sum_before_use
from crossfuse.planner.space.tiles import dividing, even

ResidencyRule = Callable[[Chain, LoopSchedule], "Residency | None"]


@dataclass(frozen=True)
class Family:
    """Candidates that give one restriction up.

    Attributes
    ----------
    name, text : str
        See the module.
    uneven : bool
        Tiles of which one at least does not divide its dim; else all divide.
    ctas : str
        ``"one"``; ``"powers"`` of two, 2 to 16; or ``"odd"``: 2 to 16 with another extent.
    columns : bool | None
        Whether columns of later products are spatial; None for either.
    residency : Callable
        Of (chain, schedule); None where the family has no candidates.
    terms : bool
        Whether gate and up are on two CTAs.
    """

    name: str
    text: str
    uneven: bool = False
    ctas: str = "powers"
    columns: bool | None = False
    residency: ResidencyRule = kept
    terms: bool = False


def through_l2(chain: Chain, schedule: LoopSchedule) -> Residency | None:
    """All intermediates are grid-wide."""
    names = frozenset(each.name for each in chain.intermediates)
    return replace(kept(chain, schedule), grid_wide=names) if names else None


def only_recomputed(chain: Chain, schedule: LoopSchedule) -> Residency | None:
    """Intermediates that are held for less than `kept` holds them."""
    found = recomputed(chain, schedule)
    return None if found == kept(chain, schedule) else found


FAMILIES = (
    Family("published", "R1 to R5, clusters that can run"),
    Family("one CTA", "no cluster", ctas="one"),
    Family("uneven", "tiles that do not divide", uneven=True),
    Family("odd clusters", "extents other than powers of two", ctas="odd"),
    Family("again", "l spatial, C made by each cluster that needs it", columns=True),
    Family("recomputed", "C made again for each tile of l", residency=only_recomputed),
    Family("through L2", "C made once, read in L2", columns=None, residency=through_l2),
    Family("apart", "gate and up on two CTAs", terms=True),
)


def family(name: str) -> Family:
    """The family of a name.

    Parameters
    ----------
    name : str
        Such as ``"uneven"``.

    Returns
    -------
    Family
        One of `FAMILIES`.

    Raises
    ------
    PlanRefused
        For other names.
    """
    known = {each.name: each for each in FAMILIES}
    if name not in known:
        raise refuse(
            PlanRefused,
            "search-space",
            "family",
            found=repr(name),
            limit="one of " + ", ".join(known),
            instead="write 'published', say",
        )
    return known[name]


def groups_of(chain: Chain, device: Device, member: Family) -> tuple[Group, ...]:
    """Make the candidates of a family.

    Parameters
    ----------
    chain, device
        What runs, and where.
    member : Family
        See `FAMILIES`.

    Returns
    -------
    tuple[Group, ...]
        One for each schedule that has candidates; none for gate and up apart without a gate.
    """
    clusters = _clusters(chain, member)
    if not len(next(iter(clusters.values()))):
        return ()
    residencies = {each: member.residency(chain, each) for each in _schedules(chain, member)}
    # What is grid-wide is in L2, and what is made again is gone: a tile of it has to have room.
    room = Rule("R5", "each tensor fits", "room", Room(held=member.residency is kept))
    present = {key: each for key, each in residencies.items() if each is not None}
    tiles = _tiles(chain, member)
    return combined(chain, device, member.name, present, (room,), tiles, clusters)


def family_counts(
    chain: Chain, device: Device, members: Sequence[Family] = FAMILIES
) -> dict[str, int]:
    """Count the candidates of each family, by name."""
    return {
        each.name: sum(group.size for group in groups_of(chain, device, each)) for each in members
    }


def _schedules(chain: Chain, member: Family) -> list[LoopSchedule]:
    found = [each for each in loop_schedules(list(chain.extents)) if sum_before_use(chain, each)]
    if member.columns is None:
        return found
    return [each for each in found if columns_in_a_cluster(chain, each) != member.columns]


def _tiles(chain: Chain, member: Family) -> dict[str, np.ndarray]:
    if not member.uneven:
        return grid(dividing(chain))
    tiles, whole = grid(even(chain)), dividing(chain)
    divided = [np.isin(tiles[dim], whole[dim]) for dim in tiles]
    return chosen(tiles, ~np.logical_and.reduce(divided))


def _clusters(chain: Chain, member: Family) -> dict[str, np.ndarray]:
    """Clusters of a family that can run."""
    sizes = {"one": (1,), "powers": CLUSTER_EXTENTS, "odd": tuple(range(1, MAX_CLUSTER + 1))}
    terms = len(chain.products[0].rights)
    clusters = _small(chain, sizes[member.ctas])
    if member.terms:
        clusters[TERMS] = np.full(len(next(iter(clusters.values()))), float(max(terms, 2)))
    keep = np.asarray(legal_cluster(chain, clusters))
    ctas = ctas_of(chain, clusters)
    if member.ctas != "one" and not member.terms:
        keep = keep & (ctas > 1)
    if member.ctas == "odd":
        powers = [np.isin(clusters[dim], CLUSTER_EXTENTS) for dim in chain.extents]
        keep = keep & ~np.logical_and.reduce(powers)
    return chosen(clusters, keep)


def _small(chain: Chain, sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """All clusters of at most 16 CTAs, whether they can run or not."""
    found = {dim: np.ones(1) for dim in chain.extents}
    first = (*chain.rows, chain.column(0), chain.products[0].reduction)
    for dim in chain.extents:
        count = len(found[dim])
        found = {name: np.repeat(each, len(sizes)) for name, each in found.items()}
        found[dim] = np.tile(np.asarray(sizes, dtype=np.float64), count)
        ctas = np.multiply.reduce([found[each] for each in first])
        keep = (ctas <= MAX_CLUSTER) & (found[dim] <= MAX_CLUSTER)
        found = chosen(found, keep)
    return found
