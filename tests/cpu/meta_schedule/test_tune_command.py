"""``crossfuse tune`` stores what came back in MetaSchedule's database, which replays it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfuse.cli import app
from crossfuse.hardware import device, tvm_target
from crossfuse.lower.extract import lower
from crossfuse.meta_schedule.bundle import measure_bundle, open_bundle
from crossfuse.meta_schedule.database import workload_module
from crossfuse.meta_schedule.records import read_records
from crossfuse.meta_schedule.scheduled import schedule_candidate
from crossfuse.schedule.trace_json import trace_json
from null.meta_schedule.test_tune_search import HOW, SPEC

ms = pytest.importorskip("tvm.s_tir.meta_schedule")


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
