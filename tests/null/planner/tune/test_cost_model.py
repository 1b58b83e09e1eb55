"""The cost model: the estimate before anything is measured, better afterwards, saved and loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crossfuse.errors import ArtefactRefused, EnvironmentRefused
from crossfuse.planner.tune.cost_model import FEWEST, NAMES, CostModel, features
from crossfuse.planner.tune.strategy import make_strategy
from null.planner.tune.planted import Planted, drive, space, truth

SPECS = ("G4", "S3:M=128", "gemm:M=256,K=768,N=3072")


def some(text: str, count: int, seed: int = 0) -> np.ndarray:
    """Points among the better half of the estimate's ranking."""
    found = space(text)
    better = found.order[: len(found) // 2]
    return np.random.default_rng(seed).choice(better, count, replace=False)


def taught(text: str, count: int = 64) -> CostModel:
    model = CostModel()
    points = some(text, count)
    model.update(space(text), points.tolist(), truth(text)[points].tolist())
    return model


def error(model: CostModel, text: str) -> float:
    """Mean error of points that were not measured, as a logarithm."""
    points = some(text, 200, seed=1)
    return float(np.abs(np.log(model.predict(space(text), points) / truth(text)[points])).mean())


@pytest.mark.parametrize("text", SPECS)
def test_features_are_numbers_with_names(text: str) -> None:
    points = some(text, 50)
    found = features(space(text), points)
    assert found.shape == (50, len(NAMES))
    assert np.isfinite(found).all()
    plain = replace(space(text), rates=replace(space(text).rates, trees=None))
    assert np.allclose(2 ** found[:, 0] - 1, plain.prior[points], rtol=1e-4)
    terms = [number for number, each in enumerate(NAMES) if each.startswith("term ")]
    assert np.allclose((2 ** found[:, terms] - 1).sum(1), 2 ** found[:, 0] - 1, rtol=1e-3)
    alone = np.concatenate([features(space(text), [each]) for each in points])
    assert np.array_equal(alone, found)


def test_without_measurements_it_is_the_estimate() -> None:
    points = some("G4", 20)
    assert np.array_equal(CostModel().predict(space("G4"), points), space("G4").prior[points])


def test_a_few_measurements_move_the_mean_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    found, model = space("G4"), CostModel()
    points = some("G4", FEWEST - 1)
    model.update(found, points.tolist(), (2 * found.prior[points]).tolist())
    ratio = model.predict(found, points) / found.prior[points]
    assert np.allclose(ratio, ratio[0])
    assert 1.5 < ratio[0] < 2.0


def test_trees_need_xgboost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(EnvironmentRefused, match=r"install crossfuse\[tune\]"):
        taught("G4")


@pytest.mark.parametrize("text", SPECS)
def test_measurements_correct_the_estimate(text: str) -> None:
    pytest.importorskip("xgboost")
    assert error(taught(text), text) < error(CostModel(), text) / 2


def test_what_does_not_work_is_predicted_to_be_slow() -> None:
    pytest.importorskip("xgboost")
    found, model = space("G4"), taught("G4")
    group = found.groups[-1]
    inside = [each for each in some("G4", 200, seed=2).tolist() if each >= group.first]
    before = model.predict(found, np.array(inside))
    model.update(found, inside[::2], [None] * len(inside[::2]))
    assert np.median(model.predict(found, np.array(inside[1::2])) / before[1::2]) > 1.5


@pytest.mark.parametrize("trees", ["kept", "missing", "damaged"])
def test_a_saved_model_predicts_the_same(tmp_path: Path, trees: str) -> None:
    pytest.importorskip("xgboost")
    model, points = taught("G4"), some("G4", 50, seed=3)
    path = tmp_path / "model.json"
    model.save(path)
    beside = tmp_path / "model.json.ubj"
    assert beside.is_file()
    if trees == "missing":
        beside.unlink()
    elif trees == "damaged":
        beside.write_bytes(b"{" + beside.read_bytes()[:100])
    loaded = CostModel(seed=9)
    loaded.load(path)
    assert len(loaded) == len(model)
    assert np.allclose(
        loaded.predict(space("G4"), points), model.predict(space("G4"), points), rtol=1e-6
    )


@pytest.mark.parametrize("damage", ["missing", "cut off", "of others", "of two lengths"])
def test_a_damaged_model_is_refused_and_nothing_is_lost(tmp_path: Path, damage: str) -> None:
    model, path = CostModel(), tmp_path / "model.json"
    points = some("G4", 4).tolist()
    model.update(space("G4"), points, [10.0, 11.0, 12.0, 13.0])
    model.save(path)
    document = json.loads(path.read_text())
    if damage == "missing":
        path.unlink()
    elif damage == "cut off":
        path.write_text(path.read_text()[:-30])
    elif damage == "of others":
        path.write_text(json.dumps({**document, "names": ["a"]}))
    else:
        path.write_text(json.dumps({**document, "corrections": [0.0]}))
    with pytest.raises(ArtefactRefused, match=r"model\.json.*delete it"):
        model.load(path)
    assert len(model) == 4


@pytest.mark.parametrize("text", SPECS)
def test_a_search_with_the_model_finds_the_best(text: str) -> None:
    pytest.importorskip("xgboost")
    best = []
    for seed in range(3):
        model = CostModel(seed)
        strategy = make_strategy("evolution", space(text), model, seed)
        found = drive(strategy, Planted(text), 64)
        assert found is not None
        best.append(truth(text)[found] / truth(text).min())
        assert len(model) == 64
    assert sorted(best)[1] < 1.05


def test_one_model_learns_from_several_chains() -> None:
    pytest.importorskip("xgboost")
    model = CostModel()
    for text in SPECS:
        points = some(text, 48)
        model.update(space(text), points.tolist(), truth(text)[points].tolist())
    for text in SPECS:
        assert error(model, text) < error(CostModel(), text) / 2
