"""What is learned beyond the estimate: grown by xgboost, read and added up without it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from crossfuse.errors import EnvironmentRefused
from crossfuse.planner.cost.estimate import corrected, estimate
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.cost.terms import LEARNED, NAMES, Trees, read, trees_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.planner.kernels.shape import count, select
from crossfuse.planner.plan import plan
from null.planner.test_kernels import H100, shape
from study.fit import Sample
from study.grow import grow, held_out, rows_of, without_eager

RATES = rates_of(H100)
WORKLOADS = [f"gemm_chain:M=128,K={k},N={n},L={k}" for k in (256, 512) for n in (512, 1024, 2048)]


def random_rows(number: int = 400) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.random((number, len(NAMES)), np.float32) * 10


def samples(text: str, number: int) -> list[Sample]:
    of = shape(text)
    kernels = FAMILIES["registers"].every(of, H100)
    chosen = np.linspace(0, count(kernels) - 1, number).astype(int)
    return [
        Sample(text, of, "registers", select(kernels, int(each)).tiles(), 1.0) for each in chosen
    ]


def test_trees_say_what_xgboost_says() -> None:
    import xgboost

    rows = random_rows()
    wanted = np.where(rows[:, 3] < 5, 0.3, -0.2) + 0.01 * rows[:, 7]
    found = grow(rows, wanted, H100)
    again = read(found.text(), "here")
    assert (again.device, again.kernels) == ("nvidia-h100", 400)
    sums = again.sum(rows)
    assert np.abs(sums - wanted).mean() < 0.02
    # The same settings and data, by xgboost's own walk.
    from study import grow as grown

    booster = xgboost.train(grown._SETTINGS, xgboost.DMatrix(rows, wanted), grown._ROUNDS)
    assert np.allclose(sums, booster.predict(xgboost.DMatrix(rows)), atol=1e-4)
    # Bit by bit, however many rows are asked for at once.
    for size in (1, 2, 4):
        assert np.array_equal(sums[5 : 5 + size], again.sum(rows[5 : 5 + size]))
    assert again.sum(rows[:0]).shape == (0,)


def test_those_of_the_package_add_a_term() -> None:
    of = shape("G4")
    kernels = FAMILIES["l2"].every(of, H100)
    some = select(kernels, np.arange(0, count(kernels), 997))
    many = corrected(some, of, H100, RATES)
    plain = estimate(some, of, H100, RATES)
    trees = trees_of("nvidia-h100")
    assert trees is not None and trees.kernels > 1000
    learned = np.asarray(many.terms[LEARNED])
    assert np.allclose(np.asarray(plain.microseconds) + learned, many.microseconds)
    assert 0.01 < np.abs(learned / np.asarray(plain.microseconds)).mean() < 0.3
    one = corrected(select(some, 3), of, H100, RATES)
    assert float(one.microseconds) == pytest.approx(float(np.asarray(many.microseconds)[3]))
    assert LEARNED not in corrected(some, of, H100, replace(RATES, trees=None)).terms
    found = plan("G4")
    assert sum(found.terms.values()) == pytest.approx(found.microseconds)
    assert LEARNED in found.terms


def test_devices_that_nothing_was_learned_of_have_none() -> None:
    assert trees_of("nvidia-h20") is None
    assert LEARNED not in plan("G4", rates=replace(RATES, trees=None)).terms


def test_kernels_of_a_workload_do_not_judge_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no feature tells is known in the workload alone, and so is not found in others."""
    monkeypatch.setattr("study.grow._ROUNDS", 60)
    known = [each for text in WORKLOADS for each in samples(text, 8)]
    rows = rows_of(known, H100, RATES)
    own = np.repeat(np.random.default_rng(1).normal(0, 0.3, len(WORKLOADS)), 8)
    inside = grow(rows, own, H100).sum(rows)
    outside = held_out(known, rows, own, H100, folds=3)
    assert np.abs(inside - own).mean() < 0.1 < np.abs(outside - own).mean()
    # What holds for all is, and what kernels beside them say of it is learned from, too.
    told = held_out(known, rows, own, H100, (rows, own), folds=3)
    assert np.abs(told - own).mean() < 0.1
    same = held_out(known, rows, np.full(len(known), 0.2), H100, folds=3)
    assert np.abs(same - 0.2).mean() < 0.05


def test_which_samples_are_ours() -> None:
    known = [*samples(WORKLOADS[0], 2), Sample("x", shape(WORKLOADS[0]), EAGER, {}, 2.0)]
    assert without_eager(known).tolist() == [True, True, False]


def stump() -> Trees:
    feature = np.zeros((1, 1), np.int64)
    return Trees("x", 1, feature, np.ones((1, 1), np.float32), np.ones((1, 2), np.float32))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.pop("trees"), "found trees: nothing; limit: all fields. Instead: learn"),
        (lambda d: d.update(version=2), "found version 2; limit: version 1."),
        (lambda d: d["features"].pop(), f"found {len(NAMES) - 1} other features; limit: "),
        (lambda d: d["trees"][0][2].pop(), "found trees of [(1, 1, 1)] nodes and leaves"),
        (
            lambda d: d["trees"][0].__setitem__(0, [999]),
            f"found trees[0][0][0]: 999; limit: 0 to {len(NAMES) - 1}",
        ),
        (lambda d: d["trees"][0][2].__setitem__(0, float("nan")), "the number nan"),
        (lambda d: d.update(trees=[]), "found trees of [] nodes"),
    ],
)
def test_damaged_trees_are_refused(change: object, text: str) -> None:
    document = json.loads(stump().text())
    change(document)  # type: ignore[operator]
    with pytest.raises(EnvironmentRefused) as caught:
        read(json.dumps(document), "trees.json")
    assert "learned-trees: trees.json: " in str(caught.value)
    assert text in str(caught.value)
    with pytest.raises(EnvironmentRefused, match="at line 1, column 2; limit: JSON"):
        read("{", "trees.json")
