"""``crossfuse bundle`` from the command line, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfuse.cli import app
from crossfuse.meta_schedule.records import Progress, read_records
from crossfuse.meta_schedule.tune import measure_bundle, open_bundle
from null.meta_schedule.test_campaign import HOW

GIVEN = [
    {"spec": "gemm_chain:M=16,K=64,N=128,L=64", "family": family}
    for family in ("registers", "dsm", "global")
]


def run(*words: str | Path):
    return CliRunner().invoke(app, ["bundle", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle of three candidates that is not measured yet."""
    candidates = tmp_path / "candidates.json"
    candidates.write_text(json.dumps(GIVEN))
    result = run("make", candidates, "--out", tmp_path / "bundle", "--build-there", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"candidates": 3, "failed": []}
    return tmp_path / "bundle"


def test_measuring_needs_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crossfuse.bench import environment

    monkeypatch.setattr(environment, "find_gpus", lambda: ())
    result = run("measure", folder)
    assert result.exit_code == 2
    assert "found no CUDA device" in result.output.replace("\n", " ")
    assert not (folder / "results.jsonl").exists()


def test_the_script_of_a_bundle_calls_the_command(folder: Path) -> None:
    text = (folder / "measure.py").read_text()
    compile(text, "measure.py", "exec")
    assert '"-m", "crossfuse", "bundle", "measure"' in text


def test_what_came_back_is_collected_once(folder: Path, tmp_path: Path) -> None:
    with Progress(3) as progress:
        measure_bundle(open_bundle(folder), HOW, progress.add)
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"id": "cut o')
    out = tmp_path / "records.jsonl"
    for _ in range(2):
        result = run("collect", folder, "--out", out, "--json")
        assert result.exit_code == 0
        assert "line 4" in result.stderr
    counts = json.loads(result.stdout)["status"]
    assert counts == {"ok": 1, "build-refused": 1, "crashed": 1}
    assert len(out.read_text().splitlines()) == 3
    assert read_records(out).records == read_records(folder / "results.jsonl").records


def test_no_bundle_and_no_candidates_are_refusals(tmp_path: Path) -> None:
    assert run("collect", tmp_path).exit_code == 2
    assert run("make", tmp_path / "none.json", "--out", tmp_path).exit_code == 2
