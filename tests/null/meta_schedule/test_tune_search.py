"""``crossfuse tune``: searches that stop and go on, with processes that stand in for a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfuse.bench.job import Job
from crossfuse.cli import app
from crossfuse.errors import ArtefactRefused, EnvironmentRefused
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.records import read_records
from crossfuse.meta_schedule.tune import Tuning, open_tuning
from crossfuse.workload import resolve
from null.meta_schedule.peers import program

SPEC = resolve("G4:M=64")
#: Times are the longer the wider a tile is; clusters of 16 hang, and others are wrong at times.
MEASURER = """
import json, sys, time
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if not request["measure"]:
        print("null", flush=True)
        continue
    seed = int(request["way"]["source"].split("/")[-1][:4], 16)
    if seed % 11 == 0:
        time.sleep(60)
    status = "wrong" if seed % 7 == 0 else "ok"
    answer = {"status": status, "message": "", "microseconds": 10.0 + seed / 1000}
    print(json.dumps(answer), flush=True)
"""
BUILDER = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps({"status": "ok", "message": "", "seconds": 0.1}), flush=True)
"""
HOW = Conditions(
    job=Job("", "ours"), timeout=0.5, builder=program(BUILDER), measurer=program(MEASURER)
)


def opened(folder: Path, **given) -> Tuning:
    return open_tuning(SPEC, folder, HOW, learn=False, **given)


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.run(10, batch=5)
    assert len(first.added) == 10
    second = opened(tmp_path)
    assert len(second.search.measured) == 10
    second.run(6)
    records = read_records(tmp_path / "records.jsonl").records
    assert len({each.candidate.id for each in records}) == len(records) == 16
    times = [each.microseconds for each in records if each.microseconds is not None]
    best = second.best()
    assert best is not None
    assert best.microseconds == min(times)


def test_what_hangs_or_is_wrong_has_no_time(tmp_path: Path) -> None:
    tuning = opened(tmp_path, strategy="random", seed=2)
    tuning.run(24, batch=24)
    statuses = [each.status for each in tuning.added]
    assert statuses.count("ok") < 24
    for each in tuning.added:
        assert (each.microseconds is None) == (each.status != "ok")
    assert len(tuning.added) == 24


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    tuning = opened(tmp_path)

    def report(record) -> None:
        if len(tuning.added) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.run(16, report=report)
    assert len(read_records(tmp_path / "records.jsonl").records) == 3
    again = opened(tmp_path)
    again.run(2)
    assert len(read_records(tmp_path / "records.jsonl").records) == 5


def test_a_budget_leaves_the_rest(tmp_path: Path) -> None:
    tuning = opened(tmp_path)
    tuning.run(16, budget=0.0)
    assert not tuning.added
    assert tuning.best() is None


def test_damaged_lines_are_named_and_kept(tmp_path: Path) -> None:
    opened(tmp_path).run(4)
    path = tmp_path / "records.jsonl"
    with path.open("a") as file:
        file.write('{"id": "cut o')
    before = path.read_text()
    again = opened(tmp_path)
    assert len(again.broken) == 1
    assert "line 5" in again.broken[0]
    assert len(again.search.measured) == 4
    assert path.read_text() == before
    again.run(1)
    assert len(read_records(path).records) == 5


@pytest.mark.parametrize("text", ["{", '{"version": 0}', None])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, text: str | None) -> None:
    open_tuning(resolve("S3:M=16"), tmp_path, HOW, learn=False)
    path = tmp_path / "tuning.json"
    if text is not None:
        path.write_text(text)
    before = path.read_text()
    with pytest.raises(ArtefactRefused, match=r"name another folder"):
        opened(tmp_path)
    assert path.read_text() == before


def test_learning_without_xgboost_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(EnvironmentRefused, match=r"install crossfuse\[tune\]"):
        open_tuning(SPEC, tmp_path / "new", HOW)
    assert not (tmp_path / "new").exists()


def run(*words: str | Path):
    return CliRunner().invoke(app, ["tune", *map(str, words)])


def test_without_a_trial_the_planner_chooses(tmp_path: Path) -> None:
    result = run("G4:M=64", "--work-dir", tmp_path, "--trials", 0, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert not found["best"]["measured"]
    assert found["best"]["family"]


def test_measuring_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crossfuse.bench import environment

    monkeypatch.setattr(environment, "find_gpus", lambda: ())
    result = run("G4:M=64", "--work-dir", tmp_path, "--trials", 4)
    assert result.exit_code == 2
    assert "found no CUDA device" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--rpc", "box:9190"), "found 'box:9190'; limit: host:port:key"),
        (("--rpc", "box:99999:h100"), "with a port of 1 to 65535"),
        (("--rpc", "box:9190:h100", "--runner", "bundle"), "found --runner bundle and --rpc"),
    ],
)
def test_a_tracker_that_is_none_is_refused(
    tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    result = run("G4:M=64", "--work-dir", tmp_path / "new", *words)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())
    assert not (tmp_path / "new").exists()


def test_a_bundle_goes_out_and_its_records_come_back(tmp_path: Path) -> None:
    from crossfuse.meta_schedule.tune import measure_bundle, open_bundle

    words = ("G4:M=64", "--work-dir", tmp_path, "--no-learn", "--json")
    result = run(*words, "--trials", 4, "--runner", "bundle")
    assert result.exit_code == 0, result.output
    bundle = open_bundle(tmp_path / "bundle")
    assert len(bundle.candidates) == 4
    measure_bundle(bundle, HOW, lambda record: None)
    tuning = opened(tmp_path)
    assert tuning.collect() == 4
    assert tuning.collect() == 0
    assert len(opened(tmp_path).search.measured) == 4
