"""`scripts/measured_choice.py`: shapes that are workloads, and sums of what was measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from crossfuse.measure.choice import SEPARATE, Measured, Timed
from crossfuse.measure.job import Taken
from crossfuse.workload.cascades import resolve_any


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / "measured_choice.py"
    spec = importlib.util.spec_from_file_location("measured_choice", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measured_choice"] = module
    spec.loader.exec_module(module)
    return module


def test_shapes_are_workloads_and_the_same_ones_again(script: ModuleType) -> None:
    found = script.shapes(60, 3)
    assert found == script.shapes(60, 3) != script.shapes(60, 4)
    kinds = {str(resolve_any(each)).partition(":")[0] for each in found}
    assert {"gemm_chain", "gated_ffn"} < kinds
    assert len(kinds) > 3


def row(
    script: ModuleType, ours: list[tuple[float, float]], separate: tuple[float, float]
) -> object:
    timed = tuple(
        Timed(at, str(at), told, Taken(seen, seen)) for at, (told, seen) in enumerate(ours)
    )
    told, seen = separate
    found = Measured("a GPU", timed, Timed(-1, SEPARATE, told, Taken(seen, seen)))
    best = found.best
    assert best is not None
    return script.Row("a shape", found, (best.taken, Taken(seen, seen)))


def test_losses_and_decisions(script: ModuleType) -> None:
    slower = row(script, [(9.0, 12.0), (9.5, 10.0)], (11.0, 11.0))
    assert slower.loss == pytest.approx(0.2)
    assert slower.right is False  # said to fuse; the first choice is slower than separate kernels
    assert slower.kept == pytest.approx(10 / 11)
    even = row(script, [(9.0, 10.0)], (8.0, 10.1))
    assert (even.right, even.kept) == (True, 1.0)
    found = script.summary([slower, even])
    assert found["fuse_or_not_right"] == 0.5
    assert found["worst_loss_of_first_choice"] == pytest.approx(0.2)
    assert found["measured_choice_over_separate"]["slower_than_noise"] == 0
    assert script.summary([])["shapes"] == 0


def test_ranks(script: ModuleType) -> None:
    assert script.spearman([(1, 10), (2, 20), (3, 90)]) == pytest.approx(1)
    assert script.spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert script.spearman([(1, 3)]) is None


def test_kernels_are_candidates_that_costs_are_fitted_to(script: ModuleType) -> None:
    def told(text: str) -> list[dict[str, Any]]:
        shape = script.prepare(text, "", 2, 1, "nvidia-h100", build=False)
        (pretended,), timer = script.made_up([shape])
        lines = script.candidates(pretended, script.judge(pretended, timer, [None]), "a GPU")
        return [json.loads(each) for each in lines]

    found = told("gemm_chain:M=16,K=64,N=128,L=64,weights=nk")
    families = [each["candidate"]["family"] for each in found]
    assert families[-1] == "eager" and "eager" not in families[:-1]
    assert all(each["microseconds"] >= each["minimum"] > 0 for each in found)
    # Times of kernels on padded copies are not of these tiles alone.
    assert told("gemm_chain:M=16,K=65,N=131,L=65,weights=nk") == []
