"""Faults planted in chains whose partial tiles TMA adds, each with the finding that names it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from cpu.hopper.accumulation import right, spec_of
from cpu.hopper.instructions import FENCE, MEET
from cpu.hopper.persistent import LANDED, unguarded
from cpu.hopper.planting import all_changed
from cpu.hopper.test_accumulate import ADD, twice
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.errors import CheckFailed
from crossfuse.lower.image import KernelImage
from crossfuse.workload import check, random_inputs

ADDITION = r"tvm_builtin_ptx_cp_reduce_async_bulk\w+"
FILL = r"tvm_builtin_ptx_st_vec_shared\w+"
CLEAR = r"tvm_builtin_ptx_st_vec_global_v4\w+"
READ = r"tvm_builtin_ptx_ld_vec_global\w+"
PARTS = "crossfuse_await_parts"
GRID = "tvm_builtin_ptx_griddepcontrol_wait"
READ_ONLY = "tvm_builtin_ptx_cp_async_bulk_wait_group_async_bulk_wait_group_read_0"
READS_DONE = r"tvm_builtin_ptx_cp_async_bulk_wait_group_async_bulk_wait_group_read_\d"


def planted(name: str, pattern: str, by: str) -> KernelImage:
    """All places of the text changed."""
    return all_changed(right(name), pattern, by)


#: The case, what is wrong, the kind of finding and a part of its text; no kind: a wrong result of
#: the first launch or of the second one on the same sums.
FAULTS: dict[str, tuple[str, Callable[[str], KernelImage], str, str]] = {
    "a flag raised while boxes are added": (
        "3 parts, gated",
        lambda case: drop_call(right(case), LANDED, 0),
        "race",
        "the copy is not waited for",
    ),
    "a flag raised when boxes have been read": (
        "3 parts, gated",
        lambda case: planted(case, LANDED + r"(?=\(\);\s+crossfuse_raise)", READ_ONLY),
        "race",
        "the copy is not waited for",
    ),
    "a relaxed release": (
        "3 parts, gated",
        lambda case: planted(case, "red.release", "red.relaxed"),
        "race",
        "crossfuse_sums",
    ),
    "a relaxed acquire": (
        "3 parts, gated",
        lambda case: planted(case, "ld.acquire", "ld.relaxed"),
        "race",
        "crossfuse_sums",
    ),
    "nobody waits for the parts": (
        "3 parts, gated",
        lambda case: drop_call(right(case), PARTS),
        "race",
        "no release and acquire of a flag",
    ),
    "a wait for a part too few": (
        "3 parts, gated",
        lambda case: change_argument(right(case), PARTS, 3, "({} - 1)"),
        "race|deadlock",  # whether somebody looks between two parts
        "",
    ),
    "parts stored rather than added": (
        "3 parts, gated",
        lambda case: planted(case, re.escape(ADD), ADD.replace("reduce.", "").replace("add.", "")),
        "race",
        "crossfuse_sums",
    ),
    "a box filled while it is read": (
        "boxes in turns",
        lambda case: drop_call(right(case), READS_DONE, 4),
        "async-race",
        "a store overwrites what a copy still reads",
    ),
    "a box copied before all threads have filled it": (
        "3 parts, gated",
        lambda case: drop_call(right(case), MEET, -1),
        "async-race",
        "no barrier orders before it",
    ),
    "a box that is not fenced": (
        "3 parts, gated",
        lambda case: drop_call(right(case), FENCE, -1),
        "async-race",
        "no fence.proxy.async follows",
    ),
    "zeros are not written back": (
        "3 parts, gated",
        lambda case: drop_call(right(case), CLEAR),
        "",
        "",
    ),
    "zeros are written to the neighbours": (
        "3 parts, gated",
        lambda case: change_argument(right(case), CLEAR, 0, "(float*){} + 4"),
        "out-of-bounds|race",
        "",
    ),
    "zeros are written before the parts have come": (
        "3 parts, gated",
        lambda case: unguarded(right(case), CLEAR),
        "race",
        "crossfuse_sums",
    ),
    "sums are read before the parts have come": (
        "3 parts, gated",
        lambda case: unguarded(right(case), READ),
        "race",
        "crossfuse_sums",
    ),
    "the warm-up adds": (
        "3 parts, gated",
        lambda case: unguarded(right(case), ADDITION),
        "",
        "",
    ),
    "a box is not added": (
        "boxes of 32 and 8",
        lambda case: drop_call(right(case), ADDITION, 1),
        "",
        "",
    ),
    "a box is added a row further": (
        "boxes of 32 and 8",
        lambda case: change_argument(right(case), ADDITION, 2, "{} + 1"),
        "",
        "",
    ),
    "rows without the swizzle": (
        "boxes of 32 and 8",
        lambda case: change_argument(right(case), FILL, 0, "{} ^ 16"),
        "",
        "",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    case, make, kind, detail = FAULTS[name]
    spec = spec_of(case)
    inputs = random_inputs(spec)
    report = emulate(make(case), inputs, orders=3, max_findings=32)
    if not kind:
        assert report.ok, report.findings
        with pytest.raises(CheckFailed):
            for outputs in (report.outputs, *report.later):
                check(spec, inputs, outputs["out"])
        return
    kinds, found = kind.split("|"), [str(each) for each in report.findings]
    named = [text for each, text in zip(report.findings, found, strict=True) if each.kind in kinds]
    assert any(detail in each for each in named), found


def test_zeros_that_are_missing_are_missed_by_the_second_launch() -> None:
    """The first launch on new memory is right."""
    case = "3 parts, gated"
    inputs = random_inputs(spec_of(case))
    report = emulate(drop_call(right(case), CLEAR), inputs, orders=2)
    check(spec_of(case), inputs, report.outputs["out"])
    with pytest.raises(CheckFailed):
        check(spec_of(case), inputs, report.later[0]["out"])


@pytest.mark.slow
def test_additions_before_the_launch_before_is_over_are_found() -> None:
    """What loads left tiles waits for that launch, and all additions follow those tiles."""
    case = "3 parts, gated"
    image = twice(right(case, constant=True))
    report = emulate(drop_call(image, GRID), random_inputs(spec_of(case)), orders=1)
    early = [each for each in report.findings if each.kind == "early-launch"]
    assert "crossfuse_sums_gemm1_rf" in {each.buffer for each in early}, report.findings
