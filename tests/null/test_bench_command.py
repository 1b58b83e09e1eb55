"""The bench command: dry run, refusals, files, exit codes; no GPU and no worker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfuse.bench import counters, environment
from crossfuse.bench import plan as run
from crossfuse.bench.job import Counters, Job, Timing
from crossfuse.cli import app
from crossfuse.hardware import find_gpus
from crossfuse.schema import typed
from null.bench_tables import cells

TIMES = {"ours": 100.0, "eager": 120.0, "autotune": 110.0}


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have a GPU on which every job takes the time of its variant."""

    def answers(jobs: Sequence[Job], timeout: float, *_: object) -> Iterator[Timing]:
        for job in jobs:
            time = TIMES.get(job.variant)
            if time is None:
                yield Timing("timeout", f"no answer in {timeout:g} s")
            else:
                yield Timing("ok", "", time, time - 1, 0.5, 0.5, 2, 2)

    monkeypatch.setattr(environment, "require_gpu", lambda: None)
    monkeypatch.setattr(environment, "record", lambda: {"gpu": {"name": "H100"}})
    monkeypatch.setattr(run, "measured", answers)
    monkeypatch.setattr(run, "build_ahead", lambda *_: 0)
    monkeypatch.setenv("COLUMNS", "160")


def test_dry_run_lists_jobs_and_floors() -> None:
    code, text, _ = invoke("S3", "G1", "--m", "16,64", "--variants", "ours,eager", "--dry-run")
    assert code == 0
    assert text.splitlines()[0].strip() == "8 jobs"
    lines = [line for line in text.splitlines() if "S3" in line and "ours" in line]
    assert [("90.26" in line, "90.53" in line) for line in lines] == [(True, False), (False, True)]


def test_dry_run_json_has_what_a_worker_reads() -> None:
    code, text, _ = invoke("S3:M=16", "--dry-run", "--json", "--protocol", "graph,stream")
    jobs = json.loads(text)["jobs"]
    assert code == 0
    assert len(jobs) == 10
    assert jobs[0]["workload"] == "S3"
    assert jobs[0]["M"] == 16
    assert round(jobs[0]["floor_microseconds"], 2) == 90.26
    assert typed(Job, jobs[-1]["job"]).protocol == "stream"


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    code, text, errors = invoke("S3", "--json")
    assert code == 2
    assert json.loads(text)["refused"]["found"] == "no CUDA device"
    assert "crossfuse bench --dry-run lists jobs and floors" in errors


def test_unknown_variant_is_refused() -> None:
    code, _, errors = invoke("S3", "--variants", "our", "--dry-run")
    assert code == 2
    assert "write 'ours'" in errors


def test_run_prints_a_table_and_writes_the_document(machine: None, tmp_path: Path) -> None:
    out = tmp_path / "new" / "bench.json"
    code, text, errors = invoke("S3", "--m", "16", "--variants", "ours,eager", "--out", str(out))
    found = json.loads(out.read_text())
    assert code == 0
    assert "1.20x eager" in cells(text)
    assert "[2/2] S3 M=16 eager (cold, graph): 120.00 us, 1.33x floor" in errors
    assert found["ok"] is True
    assert found["environment"] == {"gpu": {"name": "H100"}}
    assert found["comparisons"][0]["speedup"] == pytest.approx(1.2)
    assert [row["timing"]["microseconds"] for row in found["rows"]] == [100.0, 120.0]


def test_json_is_the_document(machine: None) -> None:
    code, text, _ = invoke("S3", "--variants", "ours,autotune", "--json")
    assert code == 0
    assert json.loads(text)["comparisons"][0]["baseline"] == "autotune"


def test_broken_job_gives_exit_code_1_after_all_have_run(machine: None) -> None:
    code, text, _ = invoke("S3", "--variants", "compile,ours,eager", "--timeout", "9")
    assert code == 1
    assert "1.20x eager" in cells(text)
    assert "S3 M=128 compile (cold, graph): timeout: no answer in 9 s" in text


def test_counters_are_read_where_they_are_asked_for(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = Counters("refused", "no permission")
    monkeypatch.setattr(counters, "count", lambda job, timeout: denied)
    arguments = ("S3", "--m", "16", "--variants", "ours,eager")
    code, text, _ = invoke(*arguments, "--counters")
    assert code == 0
    assert text.count("counters refused: no permission") == 1
    _, text, _ = invoke(*arguments, "--counters", "--json")
    assert [row["counters"]["status"] for row in json.loads(text)["rows"]] == ["refused"] * 2
    _, text, _ = invoke(*arguments)
    assert "counters" not in text


def test_plot_without_matplotlib_is_refused_before_anything_runs(
    machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr(run, "measured", lambda *arguments: pytest.fail("a job ran"))
    code, _, errors = invoke("S3", "--plot", str(tmp_path / "x.png"))
    assert code == 2
    assert "pip install matplotlib" in errors
