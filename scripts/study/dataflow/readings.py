"""Other readings of the published rules, and what each of them leaves.

FlashFuser prints a count after each rule and says each rule in words. Words of the kind "tiles are
hardware-friendly" have several readings; the counts tell them apart, all but the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import Chain
from study.dataflow.cluster import legal_cluster
from study.dataflow.published import (
    CLUSTER_EXTENTS,
    Extents,
    LoopSchedule,
    Room,
    ctas_of,
    divides,
    grid,
    published,
    sum_before_use,
)
from study.dataflow.rules import PUBLISHED, R1, Rule, count


@dataclass(frozen=True)
class Reading:
    """One way to read a rule.

    Attributes
    ----------
    rule : str
        ``"R1"`` and so on.
    text : str
        The reading.
    candidates : int
        Left after it, when the rules before it are read as in `PUBLISHED`.
    """

    rule: str
    text: str
    candidates: int


def _up_to_256(chain: Chain, dim: str, blocks: np.ndarray) -> np.ndarray:
    found: np.ndarray = divides(chain, dim, blocks) & (blocks <= 256)
    return found


def _at_most_16(chain: Chain, clusters: Extents) -> np.ndarray:
    return ctas_of(chain, clusters) <= 16


def _divisible(chain: Chain, clusters: Extents) -> np.ndarray:
    share = clusters[chain.products[0].reduction]
    found = _at_most_16(chain, clusters)
    for index in range(1, len(chain.products)):
        found &= clusters[chain.column(index)] % share == 0
    return found


def _both_within(chain: Chain, clusters: Extents) -> np.ndarray:
    """The extents of each product's own dims multiply to at most 16."""
    found = np.ones(len(next(iter(clusters.values()))), dtype=bool)
    for index in range(len(chain.products)):
        size = np.ones(len(found))
        for dim in chain.loops(index):
            size = size * clusters[dim]
        found &= size <= 16
    return found


def _executable(chain: Chain, clusters: Extents) -> np.ndarray:
    return np.asarray(legal_cluster(chain, clusters))


def innermost(chain: Chain, schedule: LoopSchedule) -> bool:
    """The first reduction is walked, inside all other loops."""
    return schedule.order[-1:] == (chain.products[0].reduction,)


def _inside_its_tile(chain: Chain, schedule: LoopSchedule) -> bool:
    """No loop over the intermediate's own dims runs inside the first reduction."""
    inner = schedule.order[schedule.position(chain.products[0].reduction) + 1 :]
    spatial = chain.products[0].reduction in schedule.spatial
    return spatial or not set(inner) & set(chain.tensor(chain.products[0].output).dims)


ALTERNATIVES: Mapping[str, Sequence[Rule]] = {
    "R1": (
        R1,
        Rule("R1", "multiples of 16 that divide, up to 256", "block", _up_to_256),
    ),
    "R2": (
        PUBLISHED[1],
        Rule("R2", "1 to 16 CTAs, cls_l free", "cluster", _at_most_16),
        Rule("R2", "1 to 16 CTAs, cls_k divides cls_l", "cluster", _divisible),
        Rule("R2", "cls_m cls_n cls_k and cls_m cls_l cls_n at most 16", "cluster", _both_within),
        Rule("R2", "1 to 16 CTAs, shuffle and reduce both whole", "cluster", _executable),
    ),
    "R3": (
        PUBLISHED[2],
        Rule("R3", "k innermost or spatial", "schedule", sum_before_use),
        Rule("R3", "k innermost", "schedule", innermost),
        Rule("R3", "no loop over m or n inside k", "schedule", _inside_its_tile),
    ),
    "R4": (PUBLISHED[3],),
    "R5": (
        PUBLISHED[4],
        Rule("R5", "C as stored", "room", Room(sums=False)),
        Rule("R5", "no limit for E", "room", Room(output=False)),
        Rule("R5", "one tile of each, C as stored", "room", Room(sums=False, held=False)),
        Rule("R5", "C in one CTA", "room", Room(cluster=False)),
    ),
}


def readings(chain: Chain, device: Device) -> tuple[Reading, ...]:
    """Count what each reading of each rule leaves.

    Parameters
    ----------
    chain : Chain
        What is computed.
    device : Device
        Whose room it is.

    Returns
    -------
    tuple[Reading, ...]
        The one of `PUBLISHED` first for each rule.
    """
    found = []
    for index, (name, rules) in enumerate(ALTERNATIVES.items()):
        for rule in rules:
            steps = count(chain, device, (*PUBLISHED[:index], rule))
            found.append(Reading(name, rule.text, steps[-1].candidates))
    return tuple(found)


def without_clusters(chain: Chain, device: Device) -> int:
    """Count what is left without DSM: FlashFuser prints 11,550 for its example.

    One CTA a cluster, tiles by R1, k walked innermost; one tile of each input, and the sums of one
    tile of the intermediate, in shared memory.
    """
    domain = replace(published(chain), clusters=grid(dict.fromkeys(chain.extents, (1,))))
    rules = (
        R1,
        Rule("R3", "k innermost", "schedule", innermost),
        Rule("R5", "one tile", "room", Room(held=False, output=False)),
    )
    return count(chain, device, rules, domain)[-1].candidates


def tied_tiles(chain: Chain) -> int:
    """Count candidates whose clusters' tiles divide too, which R1 might have meant."""
    total = 1
    for extent in chain.extents.values():
        pairs = grid({"block": range(16, extent + 1, 16), "cluster": CLUSTER_EXTENTS})
        total *= int(np.count_nonzero(extent % (pairs["block"] * pairs["cluster"]) == 0))
    return total * len(published(chain).schedules)
