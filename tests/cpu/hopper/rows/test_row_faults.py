"""Faults planted in a kernel that makes the rows of its left operand, each with its finding."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from cpu.hopper.instructions import RAISE
from cpu.hopper.persistent import AWAIT, FENCE_OF_AWAIT, FENCE_OF_RAISE
from cpu.hopper.planting import one_changed
from cpu.hopper.rows.products import of_spec, quantised, spec
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.epilogue.store import Epilogue
from crossfuse.lower.image import KernelImage
from crossfuse.workload.cascade_numerics import check, random_inputs

pytestmark = pytest.mark.cpu

GIVEN = spec(70, 128, 32)
SYNC = "tvm_builtin_cuda_warp_sync"
WAIT = "tvm_builtin_ptx_griddepcontrol_wait"


@cache
def right() -> KernelImage:
    return lower(of_spec(GIVEN, rows=64, columns=16)).image


def planted(pattern: str, by: str) -> KernelImage:
    """One place of the text changed."""
    return one_changed(right(), pattern, by)


def unfenced() -> KernelImage:
    """Without the proxy fences on either side of a flag."""
    raising = planted(FENCE_OF_RAISE, r"\1")
    return replace(raising, cuda=re.sub(FENCE_OF_AWAIT, r"\1", raising.cuda, count=1))


FAULTS: dict[str, tuple[Callable[[], KernelImage], str, str]] = {
    "a flag raised before all lanes have stored": (
        lambda: drop_call(right(), SYNC, 1),
        "race",
        "reads it, and no ",
    ),
    "no proxy fence": (unfenced, "async-race", "fence.proxy.async"),
    "a relaxed release": (
        lambda: planted("red.release", "red.relaxed"),
        "race",
        "no release and acquire of a flag",
    ),
    "a row is not counted": (
        lambda: drop_call(right(), RAISE),
        "deadlock",
        "of crossfuse_flags_0, which stays 0",
    ),
    "rows that there are not are not counted": (
        lambda: planted(r"row_ptr\[0\] < 128", "row_ptr[0] < 70"),
        "deadlock",
        "of crossfuse_flags_0, which stays 6",
    ),
    "a wait for a row too few": (
        lambda: change_argument(right(), AWAIT, 4, "{} - 1"),
        "race|deadlock",  # whoever does not look when a row lacks waits on
        "flag",
    ),
    "a row is left out": (
        lambda: planted(r"row_ptr\[0\] < 70", "row_ptr[0] < 69"),
        "uninitialised-read",
        "before anything wrote it",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    plant, kind, text = FAULTS[name]
    report = emulate(plant(), random_inputs(GIVEN), orders=3)
    found = [each for each in report.findings if each.kind in kind.split("|")]
    assert found, report.findings
    assert any(text in str(each) for each in found), found


def test_scales_that_are_read_before_left_tiles_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = quantised(70, 256, 32)
    monkeypatch.setattr(Epilogue, "_late", False)
    image = lower(of_spec(given, rows=64, columns=16)).image
    report = emulate(image, random_inputs(given), orders=3)
    found = {each.kind for each in report.findings}
    assert found & {"race", "uninitialised-read"}, report.findings
    assert "scale" in str(report.findings)


@cache
def twice() -> KernelImage:
    """Launched twice in a row, the second time before the first is over."""
    image = lower(of_spec(GIVEN, constant=True, rows=64, columns=16)).image
    assert [each.early for each in image.launches] == [True]
    return replace(image, launches=image.launches * 2)


def test_an_early_kernel_makes_rows_when_the_one_before_is_over() -> None:
    text = twice().cuda
    places = [
        text.index("crossfuse_fetch_line((&(x_ptr"),  # into L2, where they may change
        text.rindex(f"{WAIT}();"),
        text.index("row_then = crossfuse_pinned("),
        text.index("*(uint4*)(x_ptr + "),
    ]
    assert places == sorted(places)
    report = emulate(twice(), random_inputs(GIVEN), orders=2)
    report.raise_if_wrong()
    check(GIVEN, random_inputs(GIVEN), report.outputs)


@pytest.mark.parametrize(("number", "buffer"), [(0, "crossfuse_flags_0"), (1, "normalised")])
def test_a_missing_wait_of_an_early_kernel(number: int, buffer: str) -> None:
    report = emulate(drop_call(twice(), WAIT, number), random_inputs(GIVEN), orders=1)
    found = {(each.kind, each.buffer) for each in report.findings}
    assert ("early-launch", buffer) in found, report.findings
