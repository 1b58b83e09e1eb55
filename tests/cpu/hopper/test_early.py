"""Kernels that start before the kernel before is over wait for it where they depend on it."""

from __future__ import annotations

import pytest

from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import parse, prim_func, random_inputs

SPEC = parse("gated_ffn:M=64,K=64,N=256,L=64,dtype=bfloat16")
WAIT = "tvm_builtin_ptx_griddepcontrol_wait"


def test_an_early_kernel_waits() -> None:
    image = lower(schedule_tiled_ffn(prim_func(SPEC), staged=False)).image
    assert [each.early for each in image.launches] == [False, True]
    assert emulate(image, random_inputs(SPEC), orders=1).findings == ()


def test_a_missing_wait_is_found() -> None:
    image = lower(schedule_tiled_ffn(prim_func(SPEC), staged=False)).image
    report = emulate(drop_call(image, WAIT, 0), random_inputs(SPEC), orders=1)
    found = {each.kind: each for each in report.findings}
    assert "early-launch" in found, report.findings
    assert found["early-launch"].buffer == "hidden"
    assert "no griddepcontrol.wait comes before" in found["early-launch"].detail


@pytest.mark.parametrize("constant", [False, True], ids=["after", "early"])
def test_a_persistent_kernel_starts_early_with_constant_weights_alone(constant: bool) -> None:
    schedule = schedule_tiled_ffn(prim_func(SPEC), constant_weights=constant)
    image = lower(schedule).image
    assert [each.early for each in image.launches] == [constant]
    assert (f"{WAIT}()" in image.cuda) == constant
    assert emulate(image, random_inputs(SPEC), orders=1).findings == ()


@pytest.mark.slow
def test_the_call_before_may_still_use_flags_and_outputs() -> None:
    """One call alone: another of the same kernel may come before it, and be under way."""
    image = lower(schedule_tiled_ffn(prim_func(SPEC), constant_weights=True)).image
    report = emulate(drop_call(image, WAIT, 0), random_inputs(SPEC), orders=1)
    found = {each.buffer: each for each in report.findings if each.kind == "early-launch"}
    assert "crossfuse_flags_0" in found, report.findings
    assert "what a launch before may still be writing" in found["crossfuse_flags_0"].detail
