"""Calibration programs on a Hopper GPU: numbers that such a GPU can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfuse.bench.calibrate import PROGRAMS, Program, build, measure, products
from crossfuse.hardware import device

pytestmark = pytest.mark.gpu

NAMED = {each.name: each for each in PROGRAMS}


def values(program: Program, folder: Path) -> dict[tuple[object, ...], float]:
    """Value by name and keys."""
    told = ("name", "size", "method", "level", "rows", "columns")
    lines = measure(program, build(program, folder))
    return {tuple(line[key] for key in told if key in line): line["value"] for line in lines}


def test_barriers_and_residency(tmp_path: Path) -> None:
    found = values(NAMED["barrier"], tmp_path)
    assert found["resident", 1] == device("nvidia-h100").sms
    assert 1 <= found["resident", 16] <= 8
    assert 0.1 < found["cluster_barrier", 2] < 2
    assert found["cluster_barrier", 2] < 1.5 * found["cluster_barrier", 16]


def test_a_flag_takes_a_few_round_trips(tmp_path: Path) -> None:
    assert 0.2 < values(NAMED["flag"], tmp_path)["flag",] < 5


def test_every_peer_gets_what_it_waits_for(tmp_path: Path) -> None:
    found = values(NAMED["dsm"], tmp_path)
    assert {key[1] for key in found} == {2, 4, 8, 16}
    assert all(5e3 < value < 2e5 for value in found.values())


def test_wide_tiles_multiply_faster(tmp_path: Path) -> None:
    headers = {"products.cuh": products("bfloat16", (8, 128))}
    found = values(Program("tensor", "tensor.cu", headers), tmp_path)
    assert found["tensor", 128, 8] < found["tensor", 128, 128] < 8e6
