"""Searches side by side: each kernel is measured once, and a killed study goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossfuse.bench.job import Job
from crossfuse.errors import ArtefactRefused
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.records import read_records
from null.meta_schedule.peers import BUILDER, program
from null.script import SCRIPTS, load
from study.searches import Search, Study, read_proposals
from study.subcommands import run

#: A time that the candidate alone decides; one in eight is wrong.
MEASURER = """
import json, pathlib, sys
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answer = None
    if request["measure"]:
        library = request["way"]["source"] if request["way"] else "ea9e13"
        number = int(pathlib.Path(library).stem[:6], 16)
        answer = {"status": "ok", "microseconds": 10 + number % 1000 / 100, "message": ""}
        if number % 8 == 0:
            answer = {"status": "wrong", "message": "off"}
    print(json.dumps(answer), flush=True)
"""
HOW = Conditions(
    job=Job("", "ours", calls=2),
    timeout=5.0,
    builders=2,
    gpu="a stand-in",
    builder=program(BUILDER),
    measurer=program(MEASURER),
)
SPECS = ("gemm_chain:M=64,K=64,N=256,L=64", "gemm_chain:M=16,K=64,N=128,L=128")
STRATEGIES = ("evolution", "annealing", "random", "model")
script = load("search_study")


def wanted(trials: int = 12) -> list[Search]:
    return script.searches(SPECS, STRATEGIES, (0, 1), trials, "nvidia-h100")


def study(
    folder: Path,
    trials: int = 12,
    batch: int = 4,
    report: Callable[[Any], None] = lambda record: None,
) -> list[Search]:
    found = wanted(trials)
    Study(folder, folder / "scratch", HOW, batch, report).run(found)
    return found


def proposals(folder: Path) -> set[tuple[Any, ...]]:
    found = read_proposals(folder / "proposals.jsonl")
    assert len({each.place for each in found}) == len(found)
    return {(*each.place, each.id) for each in found}


def test_each_kernel_is_measured_once(tmp_path: Path) -> None:
    found = study(tmp_path)
    # Two seeds, and one of what knows no chance.
    assert len(found) == len(SPECS) * 7
    assert all((each.done, each.left) == (12, 0) for each in found)
    told = proposals(tmp_path)
    assert len(told) == 12 * len(found)
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    ids = [json.loads(line)["id"] for line in lines]
    records = read_records(tmp_path / "records.jsonl").records
    eager = {each.candidate.id for each in records if each.candidate.family == "eager"}
    assert len(eager) == len(SPECS)
    assert len(ids) == len(set(ids)) < len(told)
    assert set(ids) - eager == {each[-1] for each in told}


class Killed(Exception):
    """Stands for whatever ends a run: nothing is written after it."""


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.nightly), 25])
def test_a_killed_study_goes_on_to_the_same_end(tmp_path: Path, after: int) -> None:
    study(tmp_path / "whole")
    seen = []

    def die(record: Any) -> None:
        seen.append(record)
        if len(seen) == after:
            raise Killed

    with pytest.raises(Killed):
        study(tmp_path / "parts", report=die)
    records = tmp_path / "parts" / "records.jsonl"
    assert len(records.read_text().splitlines()) == after
    # What was being written is cut off.
    with (tmp_path / "parts" / "proposals.jsonl").open("a") as file:
        file.write('{"spec": "gemm')
    study(tmp_path / "parts")
    assert proposals(tmp_path / "parts") == proposals(tmp_path / "whole")
    ids = [json.loads(line)["id"] for line in records.read_text().splitlines()]
    assert len(ids) == len(set(ids))
    again: list[Any] = []
    study(tmp_path / "parts", report=again.append)
    assert again == []


def test_more_trials_continue_the_same_searches(tmp_path: Path) -> None:
    study(tmp_path, trials=6)
    first = proposals(tmp_path)
    study(tmp_path, trials=12)
    assert first < proposals(tmp_path)


def test_another_batch_is_another_study(tmp_path: Path) -> None:
    study(tmp_path)
    with pytest.raises(ArtefactRefused, match="same batch, device and version") as refused:
        study(tmp_path, batch=6)
    assert re.search(r"evolution, seed 0, trial \d+ of gemm_chain:M=64", str(refused.value))


def test_times_of_another_device_are_not_taken(tmp_path: Path) -> None:
    study(tmp_path, trials=4)
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text().replace("a stand-in", "another"))
    seen: list[Any] = []
    study(tmp_path, trials=4, report=seen.append)
    assert {each.gpu for each in seen} == {"a stand-in"}


def test_the_report_says_how_soon_each_was_fast(tmp_path: Path) -> None:
    curve = script.Curve
    found = [
        curve("w", "random", np.array([np.inf, 20.0, 20.0, 10.0])),
        curve("w", "random", np.array([40.0, 20.0, 20.0])),
        curve("w", "model", np.array([10.0])),
    ]
    shares = script._shares([each.best for each in found[:2]], 10.0)
    assert shares == {"seeds": 2, "after": {1: 0.125, 2: 0.5, 3: 0.5}}
    assert script._shares([found[2].best], 10.0) == {"seeds": 1, "after": {1: 1.0}}


def test_the_table_and_the_plot_are_made_of_the_files_alone(tmp_path: Path, capsys: Any) -> None:
    study(tmp_path, trials=8)
    picture, numbers = tmp_path / "study.svg", tmp_path / "study.json"
    given = ["report", str(tmp_path), "--plot", str(picture), "--json", str(numbers)]
    assert run(script.parser(), given) == 0
    text = capsys.readouterr().out
    assert "best of" in text and "eager" in text and "mean over workloads" in text
    told = json.loads(numbers.read_text())
    records = read_records(tmp_path / "records.jsonl").records
    for spec, each in told["workloads"].items():
        times = [
            one.microseconds
            for one in records
            if one.candidate.spec == spec and one.candidate.family != "eager" and one.microseconds
        ]
        assert each["best"] == min(times)
        assert set(each["strategies"]) == set(STRATEGIES)
        for one in each["strategies"].values():
            assert list(one["after"]) == ["1", "2", "4", "8"]
            values = list(one["after"].values())
            assert values == sorted(values) and 0 <= values[0] <= values[-1] <= 1
        assert max(one["after"]["8"] for one in each["strategies"].values()) <= 1
    drawn = picture.read_text()
    assert "<svg" in drawn and drawn.count(">fastest so far") == len(SPECS)


def test_an_empty_folder_is_no_study(tmp_path: Path) -> None:
    run = [sys.executable, str(SCRIPTS / "search_study.py"), "report", str(tmp_path)]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "no trial with a record" in ended.stderr


@pytest.mark.parametrize(("budget", "done"), [("0.000001", "0 of 12"), ("0", "12 of 12")])
def test_the_command_searches_until_its_budget_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, budget: str, done: str
) -> None:
    monkeypatch.setattr("crossfuse.bench.environment.require_gpu", lambda: None)
    gpu = {"gpu": {"name": "a stand-in"}}
    monkeypatch.setattr("crossfuse.bench.environment.record", lambda: gpu)
    peers = {"builder": HOW.builder, "measurer": HOW.measurer}
    monkeypatch.setattr(script, "Conditions", partial(Conditions, **peers))
    given = ["run", str(tmp_path / "study"), SPECS[0], "--strategies", "evolution", "model"]
    given += ["--seeds", "3", "--trials", "6", "--batch", "4", "--budget", budget]
    assert run(script.parser(), [*given, "--build-jobs", "2"]) == 0
    assert f"{done} trials" in capsys.readouterr().err
    assert json.loads((tmp_path / "study" / "environment.json").read_text()) == gpu
    found = read_records(tmp_path / "study" / "records.jsonl").records
    assert bool(found) == (budget == "0")
    assert {each.gpu for each in found} <= {"a stand-in"}
