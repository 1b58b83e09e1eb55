"""The record of GPUs together: what is measured, of how many ranks, and what is left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from crossfuse.bench import ranks as module  # noqa: E402
from crossfuse.errors import EnvironmentRefused  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.planner.cost.rank_rates import MEASURED, load_ranks, rank_rates  # noqa: E402
from crossfuse.torch.collectives import COLLECTIVES  # noqa: E402
from crossfuse.torch.ranks import Connection, PeerRanks  # noqa: E402


class Ranks(PeerRanks):
    """GPUs that do nothing, on the CPU."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.target = 0, size, device("nvidia-h200")
        self.prepared: list[Any] = []
        slabs = torch.zeros(size, 8 << 20, dtype=torch.bfloat16)
        self.memory = SimpleNamespace(slabs=lambda dtype: slabs)  # type: ignore[assignment]

    def prepare(self, *given: Any) -> None:
        self.prepared.append(given)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with a number of ranks: the record, and what was noted."""
    monkeypatch.setattr(module.dist, "barrier", lambda: None)
    monkeypatch.setattr(module, "times_of", lambda calls: [4.0, 9.0][: len(calls)])

    def measure(size: int) -> tuple[Any, Ranks, list[str]]:
        ranks, notes = Ranks(size), list[str]()
        connection = Connection(
            "0", size, torch.device("cpu"), ranks, rank_rates("nvidia-h200", size)
        )
        monkeypatch.setattr(module, "connect_ranks", lambda: connection)
        made = module.calibrate_ranks("nvidia-h200", lambda: {"gpu": "none"}, notes.append)
        return made, ranks, notes

    return measure


@pytest.mark.parametrize("size", [2, 3, 8])
def test_record_of_ranks(size: int, measured: Any, tmp_path: Path) -> None:
    made, ranks, notes = measured(size)
    path = tmp_path / "x.json"
    path.write_text(made.text())
    assert load_ranks(path) == made
    assert (made.ranks, made.copied) == (size, (16 << 20) / 4.0)
    points = sum(len(getattr(made, name)) for name in MEASURED)
    assert len(ranks.prepared) == points >= 24
    assert notes[0] == f"{points} kernels built"
    # Of three, CTAs have more of the largest tensor than they have room for.
    assert made.all_reduce[-1][0] == (64 << 20 if size != 3 else 3 * 2048 * 2 * 1365)


def test_ranks_without_gpus_are_refused(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(2)
    monkeypatch.setattr(module, "connect_ranks", lambda: SimpleNamespace(ranks=None))
    with pytest.raises(EnvironmentRefused) as caught:
        module.calibrate_ranks("nvidia-h200", dict, lambda line: None)
    assert str(caught.value) == (
        "calibrate: ranks: found processes without GPUs; limit: a GPU for each of them. Instead: "
        "run it where there are as many GPUs."
    )


def test_all_collectives_are_measured() -> None:
    names = [each.name for each in COLLECTIVES]
    assert sorted(names) == sorted(MEASURED) == sorted(module.LIBRARY)
