"""``crossfuse tune`` stores what came back in MetaSchedule's database, which replays it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfuse.cli import app
from crossfuse.hardware import device, tvm_target
from crossfuse.lower.extract import lower
from crossfuse.meta_schedule.candidate import schedule_candidate
from crossfuse.meta_schedule.records import read_records, workload_module
from crossfuse.meta_schedule.tune import measure_bundle, open_bundle
from crossfuse.schedule.planned import trace_json
from null.meta_schedule.test_tune_search import HOW, SPEC

ms = pytest.importorskip("tvm.s_tir.meta_schedule")


@pytest.mark.slow
def test_records_that_came_back_replay(tmp_path: Path) -> None:
    words = ["tune", "G4:M=64", "--work-dir", str(tmp_path), "--no-learn", "--json"]
    out = CliRunner().invoke(app, [*words, "--trials", "3", "--runner", "bundle"])
    assert out.exit_code == 0, out.output
    measure_bundle(open_bundle(tmp_path / "bundle"), HOW, lambda record: None)
    for new in (3, 0):
        out = CliRunner().invoke(app, [*words, "--trials", "0"])
        assert out.exit_code == 0, out.output
        found = json.loads(out.stdout)
        assert found["records"] == new
        assert found["best"]["measured"]
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    assert len(database.get_all_tuning_records()) == 3
    best = database.query_schedule(workload_module(str(SPEC)), tvm_target("nvidia-h100"), "main")
    records = read_records(tmp_path / "records.jsonl").records
    fastest = min((each for each in records if each.microseconds), key=lambda r: r.microseconds)
    assert fastest.candidate.tiles == found["best"]["tiles"]
    assert lower(best).image.launches
    wanted = schedule_candidate(fastest.candidate, device("nvidia-h100"))
    assert trace_json(best.trace) == trace_json(wanted.trace)


#: The command with processes that stand in for a GPU.
PROGRAM = """
import sys
from functools import partial
from crossfuse.bench import environment
from crossfuse.meta_schedule import build
from null.meta_schedule.test_tune_search import HOW
environment.require_gpu = lambda: None
given = {"builder": HOW.builder, "measurer": HOW.measurer}
build.Conditions = partial(build.Conditions, **given)
from crossfuse.cli import main
main()
"""


def killed_after(folder: Path, count: int) -> None:
    """Tune in a process of its own until there are so many records, then kill it."""
    words = ["tune", "G4:M=64", "--work-dir", str(folder), "--no-learn", "--trials", "200"]
    # Where its stand-ins are imported from.
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words, "--timeout", "1"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and len(lines(folder)) < count:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert len(lines(folder)) >= count


def lines(folder: Path) -> list[str]:
    path = folder / "records.jsonl"
    return path.read_text().splitlines() if path.is_file() else []


@pytest.mark.slow
def test_a_killed_process_loses_what_was_under_way_alone(tmp_path: Path) -> None:
    stored = tmp_path / "database_tuning_record.json"
    for count in (3, 6):
        killed_after(tmp_path, count)
        there = len(stored.read_text().splitlines())
        assert len(lines(tmp_path)) - 1 <= there <= len(lines(tmp_path))
    with stored.open("a") as file:
        file.write('[0, [[[["GetSB')
    words = ["tune", "G4:M=64", "--work-dir", str(tmp_path), "--no-learn", "--json"]
    out = CliRunner().invoke(app, [*words, "--trials", "0"])
    assert out.exit_code == 0, out.output
    records = read_records(tmp_path / "records.jsonl").records
    assert len(records) == len(lines(tmp_path))
    found = ms.database.JSONDatabase(work_dir=str(tmp_path)).get_all_tuning_records()
    traces = [trace_json(each.trace) for each in found]
    assert len(set(traces)) == len(traces) == len(records)
    target = device("nvidia-h100")
    assert set(traces) == {
        trace_json(schedule_candidate(each.candidate, target).trace) for each in records
    }
