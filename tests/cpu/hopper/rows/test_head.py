"""Products that begin with raw rows while a warpgroup of its own makes the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cpu.hopper.planting import all_changed, one_changed
from cpu.hopper.rows.products import (
    EPSILON,
    HEADS,
    TILES,
    Element,
    layernorm_gemm,
    norm_gemm,
    of_spec,
    quantised,
    scheduled,
    spec,
)
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import EmulationReport, drop_call, emulate
from crossfuse.errors import CheckFailed
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.hopper.rows.emit import WholeRows
from crossfuse.lower.image import KernelImage
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs

pytestmark = pytest.mark.cpu


@cache
def image(case: str) -> KernelImage:
    given, tiles = HEADS[case]
    return lower(of_spec(given, constant=True, **tiles)).image


def run(case: str, of: KernelImage, orders: int = 2, seed: int = 2) -> EmulationReport:
    return emulate(of, random_inputs(HEADS[case][0], seed), orders=orders, max_findings=16)


@pytest.mark.parametrize("case", HEADS)
def test_clusters_run_together_and_one_after_another(case: str) -> None:
    """In every other order a cluster is over before the next one starts: rows are late then."""
    (launch,) = image(case).launches
    assert launch.block == (512, 1, 1) and launch.helps
    assert image(case).workspaces[-1].name == "crossfuse_factors_0"
    report = run(case, image(case), orders=2)
    report.raise_if_wrong()
    given = HEADS[case][0]
    check(given, random_inputs(given, 2), report.outputs)
    for later in report.later:
        assert later["out"].tobytes() == report.outputs["out"].tobytes()


@pytest.mark.parametrize("case", ["one CTA a cluster", "odd rows and columns"])
def test_hard_numbers(case: str) -> None:
    """Denormals keep their bits without the factor, large numbers do not overflow."""
    given = HEADS[case][0]
    for _, inputs in adversarial_inputs(given):
        report = emulate(image(case), inputs, orders=1)
        report.raise_if_wrong()
        check(given, inputs, report.outputs)


@pytest.mark.slow
def test_the_next_launch_may_begin_before_this_one_is_over() -> None:
    twice = image("a tile without rows")
    assert twice.launches[0].early
    run("a tile without rows", replace(twice, launches=twice.launches * 2)).raise_if_wrong()


GEMMA: Element = lambda x, factor, gain: x * factor * (gain + 1.0)  # noqa: E731


@pytest.mark.parametrize("element", [GEMMA, lambda x, factor, _: x * factor], ids=["1 +", "none"])
def test_other_gains(element: Element) -> None:
    function = norm_gemm(2, 512, 192, element)
    of = lower(scheduled(function, constant=True, **TILES, cluster=1)).image
    assert of.launches[0].block == (512, 1, 1)
    rng = np.random.default_rng(4)
    inputs = {
        str(each.name): rng.standard_normal([int(n) for n in each.ty.shape]).astype("bfloat16")
        for each in function.params[:-1]
    }
    report = emulate(of, inputs, orders=2)
    report.raise_if_wrong()
    x, gain, weight = (inputs[name].astype(np.float64) for name in ("x", "gain", "weight"))
    scale = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPSILON)
    due = (x * scale * (gain + 1 if element is GEMMA else 1)) @ weight.T
    found = report.outputs["out"].astype(np.float64)
    assert (np.abs(found - due) <= 2.0**-7 * (np.abs(due) + np.abs(due).max() / 4)).all()


def planned(schedule: Any) -> KernelPlan:
    ((programs),) = recover(schedule.mod["main"])
    return plan_kernel(programs, device("nvidia-h100"))


WITHOUT: dict[str, Callable[[], Any]] = {
    "a mean is taken off": lambda: scheduled(layernorm_gemm(3, 1024, 576), constant=True, **TILES),
    "half floats might overflow": lambda: scheduled(
        norm_gemm(3, 1024, 576, lambda x, factor, gain: x * factor * gain, "float16"),
        constant=True,
        **TILES,
    ),
    "rows of another type": lambda: of_spec(quantised(3, 1024, 576), constant=True, **TILES),
    "one warpgroup multiplies": lambda: of_spec(
        spec(3, 1024, 576), constant=True, rows=64, columns=192
    ),
    "too many sums": lambda: of_spec(spec(3, 1024, 512), constant=True, rows=128, columns=256),
    "too many words of a row": lambda: of_spec(spec(3, 8192, 576), constant=True, **TILES),
    "too few steps": lambda: of_spec(spec(3, 256, 576), constant=True, **TILES),
    "many rows a CTA": lambda: scheduled(
        prim_func(spec(40, 1024, 576)),
        StreamTiles(threads=128, unroll=1, resident="registers"),
        constant=True,
        **TILES,
    ),
}


@pytest.mark.parametrize("why", WITHOUT)
def test_others_wait_for_rows(why: str) -> None:
    made = planned(WITHOUT[why]())
    (rows,) = made.features
    assert isinstance(rows, WholeRows) and rows.warpgroups == 0
    assert made.threads == 128 * (made.consumers + 1)


FENCE = "tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta"
MEET = "tvm_builtin_ptx_bar_sync_count_sync"
WAIT = "tvm_builtin_cuda_mbarrier_wait"
FAULTS: dict[str, tuple[Callable[[KernelImage], KernelImage], str, str]] = {
    "raw tiles are not fenced": (lambda of: drop_call(of, FENCE, 0), "async-race", "wgmma reads"),
    "a warpgroup does not meet behind its raw tiles": (
        lambda of: one_changed(of, rf"({FENCE}\(\);\s*){MEET}\([^;]*;", r"\1"),
        "async-race",
        "wgmma reads",
    ),
    "factors are read before rows are there": (
        lambda of: one_changed(
            of, rf"{WAIT}\([^;]*;((?:(?!{WAIT})[\s\S])*?int row_of_factor)", r"\1"
        ),
        "race",
        "crossfuse_factors_0",
    ),
    "a flag is raised before all have stored": (
        lambda of: one_changed(of, rf"{MEET}\([^;]*;(\s*int row_counted)", r"\1"),
        "race",
        "normalised",
    ),
    "who makes rows does not wait until barriers are set up": (
        lambda of: one_changed(
            of, r"\w*cluster_wait\w*\(\);(\s*if [^{]*== 127\) \{\s*\w*mbarrier_arrive)", r"\1"
        ),
        "mbarrier",
        "nothing orders that before this use",
    ),
    "nobody asks for help": (
        lambda of: drop_call(of, "crossfuse_watch", 0),
        "deadlock",
        "polls the flag",
    ),
    "helpers do not say that they are done": (
        lambda of: one_changed(
            of, r"(crossfuse_fence_copies\(\);\s*)\w*mbarrier_arrive\w*\([^;]*;", r"\1"
        ),
        "deadlock",
        "lacks 1 arrivals",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    make, kind, place = FAULTS[name]
    case = "a tile without rows"
    found = [str(each) for each in run(case, make(image(case))).findings]
    assert any(each.split(" ")[0] in kind and place in each for each in found), found


@pytest.mark.slow
def test_sums_without_their_factors_are_wrong() -> None:
    case = "one CTA a cluster"
    wrong = all_changed(image(case), r"sums\[i\] \*= [^;]*;", ";")
    report = run(case, wrong)
    with pytest.raises(CheckFailed, match="element-error"):
        check(HEADS[case][0], random_inputs(HEADS[case][0], 2), report.outputs)
