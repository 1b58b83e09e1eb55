"""``crossfuse explain``: text, JSON, picture, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from crossfuse.cli import app
from crossfuse.planner.cost.rates import DIRECTORY
from crossfuse.planner.plan import Plan

RECORD = DIRECTORY / "nvidia-h100.json"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments])


def test_it_prints_the_plan_and_its_reasons() -> None:
    found = run("G1")
    assert found.exit_code == 0, found.output
    for words in ("registers: rows=", "us estimated, bound by", "the first cluster", "pruned"):
        assert words in found.stdout


def test_json_is_the_explanation() -> None:
    found = run("G1", "--json", "--top", "3")
    document = json.loads(found.stdout)
    assert document["version"] == 1
    assert Plan.from_json(json.dumps(document["plan"])).family == "registers"
    assert len(document["best"]) == 2


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.svg"
    assert run("G1", "--svg", str(path)).exit_code == 0
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_only_portable_clusters() -> None:
    document = json.loads(run("G4:M=16", "--only", "registers", "--json").stdout)
    assert document["plan"]["kernels"][0]["cluster"] == 16
    options = ("--only", "registers", "--max-cluster", "8", "--json")
    document = json.loads(run("G4:M=16", *options).stdout)
    assert document["plan"]["kernels"][0]["cluster"] <= 8
    assert document["layout"][-1]["cta"] < 8


def test_less_shared_memory_leaves_fewer_tiles() -> None:
    document = json.loads(run("G1", "--shared-bytes", "65536", "--json").stdout)
    assert all(each["shared_bytes"] <= 65536 for each in document["plan"]["kernels"])
    assert document["pruned"]["l2"][-1]["text"].endswith("fit 64 KiB of shared memory")


def test_rates_of_a_file(tmp_path: Path) -> None:
    packaged = json.loads(run("G1", "--json").stdout)
    assert json.loads(run("G1", "--rates", str(RECORD), "--json").stdout) == packaged
    record = json.loads(RECORD.read_text())
    path = tmp_path / "record.json"
    # Without fitted constants the packaged ones count.
    path.write_text(json.dumps({**record, "fitted": {}}))
    assert json.loads(run("G1", "--rates", str(path), "--json").stdout) == packaged
    path.write_text(json.dumps({**record, "provisional": True, "flag": 10 * record["flag"]}))
    options = ("G1", "--rates", str(path), "--only", "l2")
    slow = json.loads(run(*options, "--json").stdout)
    assert slow["provisional"]
    flag = slow["plan"]["terms"]["flag"]
    packaged = json.loads(run("G1", "--only", "l2", "--json").stdout)
    assert flag > packaged["plan"]["terms"]["flag"]
    assert "rates of this device are provisional" in run(*options).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("S3", "--only", "hbm"), "plan: only: found 'hbm'; limit: gemm, registers"),
        (
            ("S3", "--only", "registers"),
            "found 'registers hold the sums of the intermediate' leaves 0 of 3906 tiles of",
        ),
        (("S3", "--only", "gemm"), "found gemm has no kernels of two products"),
        (
            ("gemm:M=16,K=64,N=64", "--only", "dsm,l2"),
            "found dsm has no kernels of one product; l2 has no kernels of one product",
        ),
        (
            ("G1", "--only", "l2", "--shared-bytes", "1024"),
            "'two stages of each ring fit 1 KiB of shared memory' leaves 0 of",
        ),
        (("G1", "--device", "nvidia-a100"), "target: device: found 'nvidia-a100'; limit: nvidia-h"),
        (("G1", "--rates", "none.json"), "calibration-corrupt: none.json: found no such file"),
        (("T1",), "T1"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert message in found.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, "calibration-stale"),
        ({"hbm_read": "fast"}, "found hbm_read: 'fast'; limit: a number"),
        ({"hbm_read": 1.0}, "calibration-absurd: hbm_read of"),
        (
            {"fitted": {"flag": 0}},
            "calibration-corrupt: fitted of nvidia-h100: found flag: 0; limit: at least",
        ),
        ({"fitted": {"flag": "long"}}, "found flag: 'long'; limit: a number"),
        ({"name": "nvidia-h200"}, "found a record of nvidia-h200; limit: one of nvidia-h100"),
    ],
)
def test_records_that_are_not_sound(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**json.loads(RECORD.read_text()), **change}))
    found = run("G1", "--rates", str(path), "--json")
    assert found.exit_code == 2
    assert message in found.stderr
    assert json.loads(found.stdout)["refused"]["instead"]
