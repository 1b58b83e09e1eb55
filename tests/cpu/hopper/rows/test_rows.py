"""A norm and its product in one kernel, against float64: sizes, hard numbers, runs that repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu.hopper.rows.products import (
    layernorm_gemm,
    layernorm_reference,
    of_spec,
    quantised,
    scheduled,
    spec,
)
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import CheckFailed
from crossfuse.lower.extract import lower
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascade_spec import CascadeSpec

pytestmark = pytest.mark.cpu

#: Tokens, depth, columns and tiles: rows that tiles, and steps that CTAs, do not divide.
SIZES: list[tuple[tuple[int, int, int], dict[str, int]]] = [
    ((1, 200, 40), {"rows": 64, "columns": 40}),
    ((37, 264, 64), {"rows": 64, "columns": 32}),
    ((255, 72, 48), {"rows": 128, "columns": 24, "cluster": 2}),
    ((257, 64, 24), {"rows": 64, "columns": 24, "cluster": 1}),
    ((257, 64, 32), {"rows": 256, "columns": 16, "cluster": 1}),
    ((150, 64, 16), {"rows": 192, "columns": 16, "cluster": 1}),
    ((70, 520, 32), {"rows": 64, "columns": 16, "split": 2}),
    ((64, 1160, 16), {"rows": 64, "columns": 16}),
    # One stage of weights on its way the first time round the ring, then five of eight.
    ((40, 1216, 128), {"rows": 64, "columns": 128}),
]


def passed(given: CascadeSpec, schedule: Any, inputs: dict[str, np.ndarray]) -> None:
    """Right on LLVM and in the emulator, where every launch gives the same bits."""
    sequential = run_sequential(schedule, inputs)
    sequential.raise_if_wrong()
    check(given, inputs, sequential.outputs)
    report = emulate(lower(schedule).image, inputs, orders=2)
    report.raise_if_wrong()
    check(given, inputs, report.outputs)
    for later in report.later:
        assert later["out"].tobytes() == report.outputs["out"].tobytes()


@pytest.mark.parametrize(("sizes", "tiles"), SIZES, ids=lambda each: str(each))
def test_sizes(sizes: tuple[int, int, int], tiles: dict[str, int]) -> None:
    given = spec(*sizes)
    passed(given, of_spec(given, **tiles), random_inputs(given, 1))


def test_numbers_that_are_hard_to_norm() -> None:
    given = spec(9, 72, 16)
    schedule = of_spec(given, rows=64, columns=16)
    image = lower(schedule).image
    for name, inputs in adversarial_inputs(given):
        report = emulate(image, inputs, orders=1)
        report.raise_if_wrong()
        try:
            check(given, inputs, report.outputs)
        except CheckFailed as error:
            raise AssertionError(name) from error


def test_rows_of_zeros_and_of_large_numbers() -> None:
    given = spec(6, 64, 16)
    inputs = random_inputs(given, 2)
    inputs["x"][1] = 0
    inputs["x"][4] = (inputs["x"][4].astype(np.float32) * 1e15).astype(inputs["x"].dtype)
    report = emulate(lower(of_spec(given, rows=64, columns=16)).image, inputs, orders=1)
    report.raise_if_wrong()
    check(given, inputs, report.outputs)
    assert not report.outputs["out"][1].any()


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        ((1, 208, 40), {"rows": 64, "columns": 40}),
        ((70, 256, 32), {"rows": 64, "columns": 16}),
        ((257, 144, 48), {"rows": 128, "columns": 24, "cluster": 2}),
        ((300, 128, 16), {"rows": 64, "columns": 16, "cluster": 1}),
    ],
    ids=lambda each: str(each),
)
def test_rows_that_are_quantised(sizes: tuple[int, int, int], tiles: dict[str, int]) -> None:
    """Scales of rows pass beside them: epilogues read them once left tiles are there."""
    given = quantised(*sizes)
    passed(given, of_spec(given, **tiles), random_inputs(given, 1))


def test_numbers_that_are_hard_to_quantise() -> None:
    given = quantised(9, 80, 16)
    image = lower(of_spec(given, rows=64, columns=16)).image
    for name, inputs in adversarial_inputs(given):
        report = emulate(image, inputs, orders=1)
        report.raise_if_wrong()
        try:
            check(given, inputs, report.outputs)
        except CheckFailed as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize(
    "stream",
    [
        StreamTiles(threads=32, unroll=1),
        StreamTiles(threads=32, unroll=2, resident="registers"),
    ],
    ids=lambda each: each.resident,
)
def test_streams(stream: StreamTiles) -> None:
    """Elements are loaded again, or stay in registers: tiles that are whole, and a rest."""
    given = spec(3, 712, 16)
    schedule = of_spec(given, stream=stream, rows=64, columns=16)
    passed(given, schedule, random_inputs(given, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_layer_norm_with_biases(dtype: str) -> None:
    function = layernorm_gemm(70, 136, 40, dtype)
    rng = np.random.default_rng(5)
    names = {str(each.name): each for each in function.params[:-1]}
    inputs = {
        name: (rng.standard_normal([int(n) for n in each.ty.shape]) + 0.5).astype(
            np.dtype(str(each.ty.dtype))
        )
        for name, each in names.items()
    }
    schedule = scheduled(function, rows=64, columns=40)
    due = layernorm_reference(inputs)
    sequential = run_sequential(schedule, inputs)
    sequential.raise_if_wrong()
    report = emulate(lower(schedule).image, inputs, orders=2)
    report.raise_if_wrong()
    # Half a unit of the left operand may be rounded the other way; then of the output.
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    allowed = unit * (np.abs(due) + np.abs(due).max() / 4)
    for outputs in (sequential.outputs, report.outputs):
        assert (np.abs(outputs["out"].astype(np.float64) - due) <= allowed).all()
