"""Faults planted in the kernel of a stream, each with the finding that must name it."""

from __future__ import annotations

from functools import cache

import pytest

from cpu.hopper.instructions import FENCE, MEET, WAIT
from cpu.hopper.stream.attention import Attention, attention, inputs, reference
from cpu.hopper.stream.test_attention import SMALL
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage

CASE = Attention(causal=True, rows=384, keys=384, stages=1)
TURN = r"tvm_builtin_ptx_bar_arrive\w+"
RELEASE = r"tvm_builtin_ptx_mbarrier_arrive_nocount\w+"
PRODUCTS = r"tvm_builtin_ptx_wgmma_wait_group\w+_"
BOXES = r"tvm_builtin_ptx_cp_async_bulk_wait_group\w+"
LOAD = r"tvm_builtin_ptx_cp_async_bulk_tensor_g2s\w+"


@cache
def right() -> KernelImage:
    """Six tiles of rows for three CTAs, with one stage: whoever is early overwrites."""
    return lower(attention(CASE), SMALL).image


FAULTS = {
    "a turn that is never given": (
        lambda: drop_call(right(), TURN, 1),
        "deadlock",
        "waits at a named barrier",
    ),
    "keys handed back before they are multiplied": (
        lambda: drop_call(right(), PRODUCTS + "1"),
        "async-race",
        "a copy writes a tile that is still being multiplied",
    ),
    "values handed back before they are multiplied": (
        lambda: drop_call(right(), PRODUCTS + "0", 1),
        "async-race",
        "still being multiplied",
    ),
    "keys never handed back": (
        lambda: drop_call(right(), RELEASE, 2),
        "deadlock",
        "mbarrier at byte",
    ),
    "values multiplied before they are there": (
        lambda: drop_call(right(), WAIT, 7),
        "async-race",
        "",
    ),
    "no fence before the copy of results": (
        lambda: drop_call(right(), FENCE, 0),
        "async-race",
        "whose store no fence.proxy.async follows",
    ),
    "results copied before all have stored": (
        lambda: drop_call(right(), MEET, 2),
        "async-race",
        "a copy by TMA reads bytes",
    ),
    "a wrong head": (
        lambda: change_argument(right(), LOAD, 3, "{} + 1"),
        "wrong result",
        "",
    ),
}


@pytest.mark.slow
def test_the_kernel_is_right() -> None:
    report = emulate(right(), inputs(CASE), orders=3)
    report.raise_if_wrong()


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name: str) -> None:
    plant, kind, text = FAULTS[name]
    given = inputs(CASE)
    report = emulate(plant(), given, orders=3, max_findings=64)
    if kind == "wrong result":
        exact = reference(CASE, given)
        error = abs(report.outputs["out"].astype(float) - exact).max()
        assert report.findings or error > 0.05
        return
    found = [each for each in report.findings if each.kind == kind]
    assert any(text in str(each) for each in found), report.findings
