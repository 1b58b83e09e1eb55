"""Random chains, tiles and clusters that are legal, and what a chain moves at least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from crossfuse.planner.chain.build import PARTS, Further, matrix_chain
from crossfuse.planner.chain.spec import Chain
from study.dataflow.cluster import legal_cluster
from study.dataflow.published import LoopSchedule
from study.dataflow.relaxations import Group
from study.dataflow.schedules import Residency, kept, recomputed
from study.dataflow.tiling import PIECE, Tiling


@dataclass(frozen=True)
class Case:
    chain: Chain
    schedule: LoopSchedule
    tiling: Tiling
    residency: Residency


def random_chain(rng: np.random.Generator, products: int | None = None) -> Chain:
    count = products or int(rng.integers(2, 5))
    most = {1: 9, 2: 9, 3: 6, 4: 5}[count]
    batch = int(rng.integers(1, 4)) if rng.random() < 0.3 else 0
    return matrix_chain(
        int(rng.integers(1, most)),
        [int(each) for each in rng.integers(1, most, count + 1)],
        batch=batch,
        batched_weights=bool(batch and rng.random() < 0.5),
        gated=bool(rng.random() < 0.5),
        item=int(rng.choice([1, 2])),
        further={index: random_further(rng, batch) for index in range(count)},
    )


def random_further(rng: np.random.Generator, batch: int) -> list[Further]:
    """Inputs of any dims: scalars, rows, columns, and some that go with an operand."""
    parts = [each for each in PARTS if batch or each != "batch"]
    count = int(rng.choice([0, 0, 1, 2]))
    chosen = [tuple(each for each in parts if rng.random() < 0.4) for _ in range(count)]
    return [Further(each, int(rng.choice([1, 2, 4]))) for each in chosen]


def random_schedule(rng: np.random.Generator, chain: Chain) -> LoopSchedule:
    names = [str(each) for each in rng.permutation(list(chain.extents))]
    count = int(rng.integers(1, len(names) + 1))
    # Few spatial dims leave more to walk.
    count = min(count, int(rng.integers(1, len(names) + 1)))
    return LoopSchedule(tuple(names[:count]), tuple(names[count:]))


def random_cluster(rng: np.random.Generator, chain: Chain) -> dict[str, int]:
    while True:
        sizes = (1, 1, 1, 2, 2, 3, 4)
        cluster = {dim: int(rng.choice(sizes)) for dim in chain.extents}
        if len(chain.products[0].rights) == 2 and rng.random() < 0.3:
            cluster["terms"] = 2
        if legal_cluster(chain, cluster):
            return cluster


def random_tiling(rng: np.random.Generator, chain: Chain) -> Tiling:
    """Blocks that divide their dims and such that do not, beyond the extent too."""
    block = {dim: int(rng.integers(1, extent + 2)) for dim, extent in chain.extents.items()}
    small = {dim: max(1, extent // 3) for dim, extent in block.items()}
    return Tiling(small if rng.random() < 0.6 else block, random_cluster(rng, chain))


def random_residency(rng: np.random.Generator, chain: Chain, schedule: LoopSchedule) -> Residency:
    latest = recomputed(chain, schedule).hold
    kind = rng.integers(4)
    if kind == 0:
        return recomputed(chain, schedule)
    if kind == 1:
        return kept(chain, schedule)
    hold = {
        each.name: int(rng.integers(latest.get(each.name, len(schedule.order)) + 1))
        for each in chain.tensors
        if each.name in latest or rng.random() < 0.5
    }
    wide = {each.name for each in chain.intermediates if rng.random() < 0.5}
    return Residency(hold, frozenset(wide))


def random_case(rng: np.random.Generator, products: int | None = None) -> Case:
    chain = random_chain(rng, products)
    schedule = random_schedule(rng, chain)
    tiling = random_tiling(rng, chain)
    return Case(chain, schedule, tiling, random_residency(rng, chain, schedule))


def compulsory(chain: Chain) -> int:
    """Bytes that every run moves to or from memory: inputs and output, each once."""
    return sum(
        chain.elements(each.name) * each.item // each.repeats
        for each in chain.tensors
        if each.role != "intermediate"
    )


def pieces(group: Group, size: int = PIECE) -> Iterator[Tiling]:
    """All candidates of a group, at most `size` at once."""
    for batch in group.batches:
        for start in range(0, batch.size, size):
            yield batch.piece(start, size)
