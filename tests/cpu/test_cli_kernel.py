"""The commands that compile and check: output, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfuse.cli import app
from crossfuse.planner.plan import plan

SMALL = "gemm:M=16,K=64,N=32,dtype=float16"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.slow
def test_emulate_says_what_passed() -> None:
    code, text = run("emulate", SMALL)
    assert code == 0
    assert "schedule, run on LLVM" in text
    assert text.count("passed") == 3


@pytest.mark.slow
def test_emulate_json() -> None:
    code, text = run("emulate", SMALL, "--rule", "threads", "--cluster", "2", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["ok"] is True
    assert found["launches"][0]["cluster"] == [2, 1, 1]
    assert [each["status"] for each in found["verdicts"]] == ["passed"] * 3


@pytest.mark.slow
def test_emulate_a_cascade() -> None:
    code, text = run("emulate", "softmax:rows=3,cols=131", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["workload"] == "softmax:rows=3,cols=131"
    assert [each["status"] for each in found["verdicts"]] == ["passed"] * 3


@pytest.mark.parametrize(("workload", "most"), [("S3", "1e+09"), ("R7", "1e+08")])
def test_emulate_refuses_what_would_take_hours(workload: str, most: str) -> None:
    code, text = run("emulate", workload)
    assert code == 2
    assert f"limit: {most}, as much as a CPU emulates in minutes" in text
    assert "emulate the same workload with smaller extents" in text


def test_compile_writes_library_and_manifest(tmp_path: Path) -> None:
    code, text = run("compile", SMALL, "-o", str(tmp_path), "--json")
    found = json.loads(text)
    assert code == 0
    assert Path(found["shared_object"]).is_file()
    assert json.loads(Path(found["manifest"]).read_text())["arch"] == "sm_90a"


def test_compile_prints_the_budget(tmp_path: Path) -> None:
    code, text = run("compile", SMALL, "-o", str(tmp_path))
    assert code == 0
    assert "shared memory of a CTA:" in text
    assert "who holds what" in text


@pytest.mark.slow
def test_compile_says_what_was_planned(tmp_path: Path) -> None:
    chain = "gemm_chain:M=16,K=64,N=128,L=64,dtype=float16"
    wanted = plan(chain)
    arguments = ("compile", chain, "-o", str(tmp_path))
    code, text = run(*arguments)
    assert code == 0
    assert f"planned: {wanted.family}, {wanted.microseconds:.1f} us estimated, not to fuse" in text
    _, text = run(*arguments, "--json")
    assert json.loads(text)["plan"]["tiles"] == wanted.tiles
    _, text = run(*arguments, "--cluster", "1", "--json")
    found = json.loads(text)
    assert (found["plan"], found["choice"]) == (
        None,
        "not planned: clusters of 1 CTAs were asked for",
    )


def test_bad_spec_is_refused_with_exit_code_2() -> None:
    code, text = run("compile", "gemm:M=0,K=8,N=8")
    assert code == 2
    assert "Instead:" in text


@pytest.mark.slow
def test_demo_reports_every_check(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code, text = run("demo", "-o", str(tmp_path), "--json")
    found = json.loads(text)
    assert code == 0
    assert found["ok"] is True
    assert [each["status"] for each in found["verdicts"]][:3] == ["passed"] * 3
    assert "CTA 0" in found["layout"]
    chain = "gated_ffn:M=32,K=256,N=512,L=256,dtype=bfloat16,act=silu,weights=nk"
    assert found["plan"]["family"] == plan(chain).family
    assert found["launches"][0]["tensor_maps"]
