"""Many candidates at once are as each alone, and counts of them are exact."""

from __future__ import annotations

import numpy as np
import pytest

from crossfuse.hardware import device
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.kernels.shape import ceil_div
from null.study.chains import compulsory, random_tiling
from study.dataflow.cluster import floor_div
from study.dataflow.movement import MEMORIES, Machine, Movement, movement
from study.dataflow.schedules import kept, read_schedule, recomputed
from study.dataflow.tiling import Tiling

H100 = Machine(device("nvidia-h100").l2_bytes)
G4 = matrix_chain(128, [768, 3072, 768])


def arrays(rng: np.random.Generator, count: int) -> Tiling:
    """Candidates of G5 at 256 rows."""
    clusters = np.array([(1, 1, 1, 1), (2, 4, 2, 4), (2, 4, 2, 8), (1, 4, 1, 2), (1, 8, 2, 4)])
    chosen = clusters[rng.integers(0, len(clusters), count)]
    block = {dim: rng.choice([16, 32, 48, 64, 128, 256], count) for dim in "mnkl"}
    return Tiling(block, dict(zip("mnkl", chosen.T, strict=True)))


def alone(tiling: Tiling, index: int) -> Tiling:
    return Tiling(
        {dim: int(each[index]) for dim, each in tiling.block.items()},
        {dim: int(each[index]) for dim, each in tiling.cluster.items()},
    )


def totals(found: Movement, index: int | None = None) -> list[int]:
    sums = [found.total(level) for level in MEMORIES]
    return [each if index is None else np.broadcast_to(each, PIECE)[index] for each in sums]


PIECE = 5000


@pytest.mark.parametrize("order", ["m n | l k", "m | n l k", "m | l n k", "m l n k |", "k | l n m"])
def test_candidates_together_are_as_each_alone(order: str) -> None:
    chain = matrix_chain(256, [4096, 16384, 4096])
    schedule, rng = read_schedule(order, chain), np.random.default_rng(2)
    for rule in (kept, recomputed):
        residency, tiling = rule(chain, schedule), arrays(rng, PIECE)
        together = movement(chain, schedule, tiling, residency, H100)
        for index in range(0, PIECE, 250):
            one = movement(chain, schedule, alone(tiling, index), residency, H100)
            assert totals(one) == totals(together, index)


def test_a_million_candidates_are_analysed_in_pieces() -> None:
    chain = matrix_chain(256, [4096, 16384, 4096])
    schedule, tiling = read_schedule("m n | l k", chain), arrays(np.random.default_rng(3), 10**6)
    residency, pieces = kept(chain, schedule), list(tiling.pieces())
    best = min(
        float(np.min(movement(chain, schedule, each, residency, H100).total("l2")))
        for each in pieces
    )
    assert best >= compulsory(chain)
    assert sum(len(each.block["m"]) for each in pieces) == 10**6


def test_quotients_of_arrays_are_exact() -> None:
    rng = np.random.default_rng(4)
    counts, sizes = rng.integers(1, 2**50, 10**5), rng.integers(1, 2**20, 10**5)
    counts[::2] -= counts[::2] % sizes[::2]
    assert (ceil_div(counts, sizes) == -(-counts // sizes)).all()
    assert (floor_div(counts, sizes) == counts // sizes).all()


def test_pieces_of_one_candidate() -> None:
    tiling = random_tiling(np.random.default_rng(5), G4)
    assert list(tiling.pieces()) == [tiling]
