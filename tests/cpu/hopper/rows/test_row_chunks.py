"""Rows that are made chunk by chunk, and products that correct their sums, against two passes."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cpu.hopper.rows.products import quantised, scheduled
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.hardware import Device
from crossfuse.lower.extract import lower
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import check, random_inputs

pytestmark = pytest.mark.cpu

#: Rows that tiles do not divide, several tiles of a CTA, one CTA a cluster; one batch of each warp,
#: the last of which have no rows.
SIZES: list[tuple[tuple[int, int, int], int, dict[str, int], int]] = [
    ((76, 512, 40), 256, {"rows": 64, "columns": 24}, 132),
    ((256, 768, 64), 256, {"rows": 64, "columns": 16, "cluster": 1}, 4),
    ((100, 512, 64), 256, {"rows": 128, "columns": 16, "cluster": 1}, 2),
    ((64, 512, 192), 256, {"rows": 64, "columns": 16, "cluster": 1}, 132),
]
EIGHT = ml_dtypes.float8_e4m3fn


def rows_of(kind: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Rows that are hard for a bound which the first chunk fixes."""
    x = np.random.default_rng(seed).standard_normal(shape)
    along = np.arange(shape[1]) / shape[1]
    if kind == "growing":
        x *= 10 ** (6 * along - 3)
    elif kind == "falling":
        x *= 10 ** (3 - 6 * along)
    elif kind == "zeros first":
        x[:, : shape[1] // 2] = 0
        x[::3] = 0
    elif kind == "large columns":
        x[:, -5:] *= 20000
    elif kind == "large numbers":
        x *= 1e37
    return x.astype(ml_dtypes.bfloat16)


def errors(inputs: dict[str, np.ndarray], out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of rows, and those of a quantiser that reads rows twice."""
    x, weight, scale = (inputs[name].astype(np.float64) for name in ("x", "weight", "weight_scale"))
    due = (x @ weight.T) * scale
    by = np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-10) / 448
    twice = (x / by).astype(np.float32).astype(EIGHT).astype(np.float64) @ weight.T * by * scale
    twice = twice.astype(out.dtype).astype(np.float64)
    norm = np.maximum(np.linalg.norm(due, axis=1), 1e-30)
    found, allowed = (np.linalg.norm(e - due, axis=1) / norm for e in (out.astype(float), twice))
    return found, allowed


@pytest.mark.parametrize(("sizes", "chunk", "tiles", "sms"), SIZES, ids=lambda each: str(each))
def test_sizes(sizes: tuple[int, int, int], chunk: int, tiles: dict[str, int], sms: int) -> None:
    given = quantised(*sizes)
    inputs = random_inputs(given, 1)
    schedule = scheduled(prim_func(given), chunk=chunk, **tiles)
    sequential = run_sequential(schedule, inputs)
    sequential.raise_if_wrong()
    check(given, inputs, sequential.outputs)
    found, allowed = errors(inputs, sequential.outputs["out"])
    assert (found <= 2 * allowed).all()
    image = lower(schedule, Device("nvidia-h100", sms=sms)).image
    report = emulate(image, inputs, orders=2)
    report.raise_if_wrong()
    check(given, inputs, report.outputs)
    for later in report.later:
        assert later["out"].tobytes() == report.outputs["out"].tobytes()


@pytest.mark.slow
def test_elements_are_loaded_once_and_their_place_is_free_at_once(kernel: Any) -> None:
    """Two places in turn: a copy to each, behind the loads of its rows and before their stores."""
    _, image = kernel
    (text,) = re.findall(r"int chunk = 0;.*?chunks_made_ptr\[0\] = ", image.cuda, re.S)
    rows, batches = 16, 4
    load, copy, store = (
        [each.start() for each in re.finditer(pattern, text)]
        for pattern in (
            r"\(uint4\*\)\(+nv_bfloat16",
            "bulk_tensor_3d",
            r"\(uint2\*\)\(quantised_ptr",
        )
    )
    assert (len(load), len(copy), len(store)) == (rows, batches, rows)
    for batch, place in enumerate(copy):
        loaded, stored = (sum(each < place for each in group) for group in (load, store))
        assert loaded == stored + rows // batches == (batch + 1) * rows // batches


KINDS = ("normal", "growing", "falling", "zeros first", "large columns", "large numbers")


@pytest.fixture(scope="module")
def kernel() -> Any:
    given = quantised(64, 1024, 32)
    schedule = scheduled(prim_func(given), chunk=256, rows=64, columns=16, cluster=1)
    return given, lower(schedule).image


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_outgrow_their_bound(kernel: Any, kind: str) -> None:
    """Of all rows, and of the worst one, at most twice the error of two passes."""
    given, image = kernel
    inputs = random_inputs(given, 1)
    inputs["x"] = rows_of(kind, inputs["x"].shape)
    report = emulate(image, inputs, orders=1)
    report.raise_if_wrong()
    found, allowed = errors(inputs, report.outputs["out"])
    assert np.linalg.norm(found) <= 2 * np.linalg.norm(allowed)
    assert found.max() <= 2 * allowed.max()
