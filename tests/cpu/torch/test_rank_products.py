"""Products in parts: which rows go where, of any number of ranks, one behind another on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from crossfuse.errors import EnvironmentRefused  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.planner.cost.rank_rates import rank_rates  # noqa: E402
from crossfuse.runtime.peers import PeerMemory  # noqa: E402
from crossfuse.torch import rank_products  # noqa: E402
from crossfuse.torch.collectives import ALL_REDUCE  # noqa: E402
from crossfuse.torch.ranks import Connection, PeerRanks  # noqa: E402

ROWS, DEPTH, COLUMNS = 4, 8, 6
MOST = 1 << 10


@pytest.fixture(autouse=True)
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_products, "_beside", nullcontext)
    monkeypatch.setattr(rank_products, "_join", lambda: None)


def peers(ranks: int) -> Iterator[Any]:
    """What each rank sees of slabs that all share; everybody has met."""
    slabs = torch.full((ranks, MOST), float("nan"))
    memory = SimpleNamespace(slabs=lambda _: slabs)
    for rank in range(ranks):
        yield SimpleNamespace(rank=rank, size=ranks, memory=memory, meet=lambda: None)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_rows_of_all_ranks_are_multiplied(ranks: int) -> None:
    torch.manual_seed(0)
    given, every = torch.randn(ranks, ROWS, DEPTH), [*peers(ranks)]
    weights = [[torch.randn(DEPTH, COLUMNS), torch.randn(2, DEPTH).T] for _ in every]
    for _ in range(2):  # what ranks copy in the first turn, all have in the second
        found = [
            rank_products._gathered(each, given[each.rank], weights[each.rank]) for each in every
        ]
    for made, own in zip(found, weights, strict=True):
        for result, weight in zip(made, own, strict=True):
            torch.testing.assert_close(result, given.flatten(0, 1) @ weight)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_each_rank_has_its_rows_of_the_sum(ranks: int) -> None:
    torch.manual_seed(0)
    given, every = torch.randn(ranks, ranks * ROWS, DEPTH), [*peers(ranks)]
    weights = torch.randn(ranks, DEPTH, COLUMNS)
    for _ in range(2):
        found = [
            rank_products._scattered(each, given[each.rank], weights[each.rank]) for each in every
        ]
    torch.testing.assert_close(torch.cat(found), (given @ weights).sum(0))


@pytest.mark.parametrize(
    ("elements", "dtype", "moves"),
    [
        (8192 * 4096, torch.bfloat16, True),
        (8193 * 4096, torch.bfloat16, False),
        (8, torch.float32, False),
        (0, torch.bfloat16, False),
    ],
)
def test_what_moves_has_to_fit_and_not_what_is_multiplied(
    elements: int, dtype: torch.dtype, moves: bool
) -> None:
    """The left operand of a product in front of a reduce-scatter is longer than a slab."""
    place, ranks = torch.device("meta"), PeerRanks.__new__(PeerRanks)
    ranks.target = device("nvidia-h200")
    connection = Connection("0", 2, place, ranks, rank_rates("nvidia-h200", 2))
    given = torch.empty(8192, 14336, dtype=dtype, device=place)
    found = rank_products._peers(connection, given, elements)
    assert (found is ranks) == moves
    assert rank_products._peers(connection, torch.empty(8, 8), 64) is None  # elsewhere
    assert rank_products._peers(None, given, elements) is None


@pytest.mark.parametrize(("parts", "fits"), [(66 * 1024, True), (4087 * 1024, False)])
def test_parts_of_ctas_have_to_fit(parts: int, fits: bool) -> None:
    """Each CTA has the same places in all kernels: a part of half a MiB of 64 MiB."""
    place, ranks = torch.device("meta"), PeerRanks.__new__(PeerRanks)
    ranks.target = device("nvidia-h200")
    connection = Connection("0", 2, place, ranks, rank_rates("nvidia-h200", 2))
    tensor = torch.empty(parts * 8, dtype=torch.bfloat16, device=place)
    told = connection.unfit(tensor)
    assert not told if fits else told.startswith(f"a sum of {parts * 8} elements, which too few")


def test_a_rank_that_is_late_for_copies_is_named() -> None:
    """CUDA's error comes first, whichever kernel waited in vain."""

    def stopped() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    ranks = PeerRanks.__new__(PeerRanks)
    ranks._memory, ranks.memory = (PeerMemory.__new__(PeerMemory) for _ in range(2))
    ranks._memory._late, ranks.memory._late = {0: [0]}, {0: [2]}
    ranks.memory.synchronize = stopped  # type: ignore[method-assign]
    for call in (ranks.check, lambda: ranks.run(ALL_REDUCE, torch.ones(2))):
        with pytest.raises(EnvironmentRefused, match="found no arrival of rank 1 before the"):
            call()


def test_no_two_ranks_write_to_one_gpu_at_a_time() -> None:
    orders = [rank_products._others(each) for each in peers(4)]
    assert orders == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert all(len(set(turn)) == 4 for turn in zip(*orders, strict=True))
