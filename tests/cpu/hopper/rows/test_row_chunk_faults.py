"""Faults planted in a kernel that makes rows chunk by chunk, each with what finds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from cpu.hopper.instructions import WAIT
from cpu.hopper.planting import one_changed
from cpu.hopper.rows.products import quantised, scheduled
from cpu.hopper.rows.test_row_chunks import errors, rows_of
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.hardware import Device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import random_inputs

pytestmark = pytest.mark.cpu

GIVEN = quantised(64, 768, 32)
SYNC = "tvm_builtin_cuda_warp_sync"
FENCE = "tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta"


@cache
def right() -> KernelImage:
    tiles = {"rows": 64, "columns": 16, "cluster": 1}
    return lower(scheduled(prim_func(GIVEN), chunk=256, **tiles)).image


def planted(pattern: str, by: str) -> KernelImage:
    """One place of the text changed."""
    return one_changed(right(), pattern, by)


def growing() -> dict[str, np.ndarray]:
    """Rows that outgrow their bound with every chunk."""
    inputs = random_inputs(GIVEN, 1)
    inputs["x"] = rows_of("growing", inputs["x"].shape)
    return inputs


FAULTS: dict[str, tuple[Callable[[], KernelImage], str, str]] = {
    "a flag raised before rows are stored": (
        lambda: planted(rf"{WAIT}\([^\n]*chunks_told_ptr[^\n]*\n", "\n"),
        "race",
        "and nothing that follows the end of",
    ),
    "elements come where lanes still read": (
        lambda: drop_call(right(), SYNC, 1),
        "async-race",
        "and nothing orders that before it",
    ),
    "elements come where loads may be on their way": (
        lambda: planted(rf"{FENCE}\(\);(\s+{SYNC}\(\);)", r"\1"),
        "async-race",
        "read by an ordinary load that no fence.proxy.async follows",
    ),
    "elements that have not come": (
        lambda: planted(rf"{WAIT}\([^\n]*threadIdx[^\n]*, 0\);\n", "\n"),
        "uninitialised-read",
        "before anything wrote it",
    ),
    "a wait for a chunk too few": (
        lambda: planted(
            r"(crossfuse_await_flags\([^\n]*?), \(step >> 1\), 3", r"\1, (step >> 1) - 1, 3"
        ),
        "race",
        "and nothing that follows the end of",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    plant, kind, text = FAULTS[name]
    report = emulate(plant(), growing(), orders=3)
    found = [each for each in report.findings if each.kind == kind]
    assert found, report.findings
    assert any(text in str(each) for each in found), found


@pytest.mark.slow
def test_factors_come_where_loads_may_be_on_their_way() -> None:
    """In stages of factors that later tiles of the same CTA use again."""
    given = quantised(256, 768, 64)
    schedule = scheduled(prim_func(given), chunk=256, rows=64, columns=16, cluster=1)
    image = lower(schedule, Device("nvidia-h100", sms=4)).image
    wrong = one_changed(image, rf"(float factor_1 [^\n]*\n\s*){FENCE}\(\);", r"\1")
    found = emulate(wrong, random_inputs(given, 1), orders=1).findings
    assert {each.kind for each in found} == {"async-race"}
    assert all("that no fence.proxy.async follows" in str(each) for each in found)


@pytest.mark.parametrize(
    "plant",
    [
        lambda: drop_call(right(), r"crossfuse_scale_\d+"),
        lambda: planted(r"return __any_sync\(0xffffffffu, found\)", "return 0"),
    ],
    ids=["no correction", "factors are not looked at"],
)
def test_sums_that_are_not_corrected(plant: Callable[[], KernelImage]) -> None:
    found, allowed = errors(growing(), emulate(plant(), growing(), orders=1).outputs["out"])
    assert np.linalg.norm(found) > 10 * np.linalg.norm(allowed)


@pytest.mark.slow
def test_a_lane_that_stores_the_factor_of_the_row_before() -> None:
    """Every other row outgrows its bound with every chunk, and those between never do."""
    inputs = growing()
    inputs["x"][::2] = rows_of("normal", inputs["x"].shape)[::2]
    wrong = planted(
        r"(\(\(int\)threadIdx\.x\) & 31\) == 1\) \? factors_of_batch_ptr)\[1\]", r"\1[0]"
    )
    found, allowed = (
        errors(inputs, emulate(each, inputs, orders=1).outputs["out"]) for each in (wrong, right())
    )
    assert np.linalg.norm(found[0]) > 10 * np.linalg.norm(allowed[0])
