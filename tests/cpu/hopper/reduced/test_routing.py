"""Kernels of routing against float64: ties, rows without a score, odd sizes, faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.cascade.tiles.forms import run
from cpu.hopper.planting import all_changed
from cpu.hopper.reduced.routing import check_exact, schedule, spec, whole_numbers
from crossfuse.emulate.cuda import emulate
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.runtime.nvcc import compile_cubin
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs

pytestmark = pytest.mark.cpu

#: Fewer SMs than tiles.
SMALL = replace(device("nvidia-h100"), sms=2)
CASES = {
    "128 experts": (spec(64, 128, 128, 8), {}),
    "odd sizes": (spec(77, 200, 60, 6), {}),
    "16 experts, 8 of them": (spec(64, 128, 16, 8), {}),
    "one of 64": (spec(64, 128, 64, 1), {}),
    "two of 256": (spec(130, 128, 256, 2), {}),
    "all of 8": (spec(64, 128, 8, 8), {}),
    "two warpgroups": (spec(200, 128, 64, 8), {"rows": 128}),
    "several tiles a CTA": (spec(300, 128, 32, 4), {}),
    "scores of one step": (spec(9, 64, 16, 2), {}),
    "scores of less than a step": (spec(70, 40, 24, 3), {}),
    "float16": (spec(64, 128, 64, 8, "float16"), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_float64(name: str) -> None:
    given, tiles = CASES[name]
    image = lower(schedule(given, **tiles), SMALL).image
    inputs = random_inputs(given, 1)
    report = emulate(image, inputs, orders=2)
    report.raise_if_wrong()
    check(given, inputs, report.outputs)
    for largest in (0, 1):
        equal = whole_numbers(given, largest)
        report = emulate(image, equal, orders=1)
        report.raise_if_wrong()
        check_exact(equal, report.outputs, given.top_k)


@pytest.mark.slow
def test_adversarial_inputs() -> None:
    given = spec(70, 128, 96, 5)
    image = lower(schedule(given), SMALL).image
    for name, inputs in adversarial_inputs(given):
        report = emulate(image, inputs, orders=1)
        report.raise_if_wrong()
        assert check(given, inputs, report.outputs), name


def test_rows_whose_scores_are_all_minus_infinity() -> None:
    given = spec(64, 128, 32, 4)
    inputs = whole_numbers(given)
    x, router = inputs["x"].copy(), np.abs(inputs["router"]) + 1
    x[::2] = 0
    x[::2, 0] = -np.inf
    x[1::2, 0] = 1
    router = router.astype(x.dtype)
    case = {"x": x, "router": router}
    report = emulate(lower(schedule(given), SMALL).image, case, orders=1)
    report.raise_if_wrong()
    check_exact(case, report.outputs, 4)
    assert (report.outputs["gates"][::2] == 0).all()
    assert (report.outputs["chosen"][::2] == np.arange(4)).all()


def test_the_function_is_the_same_program_on_the_cpu() -> None:
    given = spec(20, 128, 24, 3)
    inputs = whole_numbers(given)
    outputs = run(schedule(given), inputs)
    check_exact(inputs, outputs, 3)


def test_tiles_are_chosen() -> None:
    """A warpgroup takes 64 rows, and whole rows of scores."""
    image = lower(schedule(spec(4096, 2048, 128, 8))).image
    (launch,) = image.launches
    assert (launch.grid, launch.block) == ((64, 1, 1), (256, 1, 1))
    assert [each.box for each in launch.tensor_maps] == [(64, 64), (64, 128)]


@pytest.mark.parametrize(("experts", "rows"), [(128, 64), (256, 64), (256, 128)])
def test_nvcc_compiles_without_spills(experts: int, rows: int) -> None:
    image = lower(schedule(spec(4096, 2048, experts, 8), rows=rows)).image
    (usage,) = compile_cubin(image.cuda).resources
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.advisories) == (0, 0, ())


FAULTS = {
    "ties to the higher expert": (r"<= left", "< left"),
    "an element found twice": (r"\(own_place == (\d+)\)", r"(own_place == \1 + 999)"),
    "half of the threads of a row": (r"best_ptr\[0\], 2, 32", "best_ptr[0], 1, 32"),
    "ranks of another thread": (r"rank_1 == \(", "rank_1 == 1 + ("),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_selections_are_caught(name: str) -> None:
    given = spec(64, 128, 32, 4)
    image = all_changed(lower(schedule(given), SMALL).image, *FAULTS[name])
    inputs = whole_numbers(given)
    report = emulate(image, inputs, orders=1)
    with pytest.raises(AssertionError):
        check_exact(inputs, report.outputs, 4)
