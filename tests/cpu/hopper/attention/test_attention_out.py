"""Attention and its output product in one persistent kernel, by both checkers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpu.hopper.attention.products import of_spec, spec
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.hopper.stream.feature import Streamed
from crossfuse.lower.image import KernelImage
from crossfuse.workload.cascade_inputs import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascade_spec import AttentionOut

pytestmark = pytest.mark.cpu

H100 = device("nvidia-h100")

#: Specs with the sizes of the stream, and those of the product.
FORMS: dict[str, tuple[AttentionOut, dict[str, int], dict[str, Any]]] = {
    "few queries": (spec(), {}, {}),
    "heads that share keys, early": (
        spec(heads=4, kv_heads=2, hidden=128),
        {},
        {"constant": True},
    ),
    "odd queries, a bias": (spec(q_len=70, kv_len=100, bias=True, residual=False), {}, {}),
    "two warpgroups": (spec(q_len=128, causal=True), {"rows": 128}, {"rows": 128}),
    "two sequences": (spec(q_len=64, batch=2, kv_len=64), {}, {}),
    "wide heads, narrow tiles": (spec(head_dim=128, hidden=72), {}, {"columns": 24}),
    "a cluster shares keys": (spec(), {"elements": 32, "cluster": 2}, {"split": 2}),
    "a cluster of two warpgroups": (
        spec(q_len=100, kv_len=130),
        {"rows": 128, "cluster": 2},
        {"split": 2, "rows": 128, "constant": True},
    ),
    "more clusters than tiles of the stream": (
        spec(heads=1, hidden=96, head_dim=128),
        {"cluster": 2},
        {"split": 2, "columns": 32},
    ),
}


def scheduled(name: str) -> Any:
    given, stream, tiles = FORMS[name]
    return of_spec(given, CascadeTiles(**{"rows": 64, "elements": 64, **stream}), **tiles)


def emulated(given: AttentionOut, image: KernelImage, inputs: dict[str, np.ndarray]) -> None:
    report = emulate(image, inputs, orders=2)
    report.raise_if_wrong()
    for outputs in (report.outputs, *report.later):
        check(given, inputs, outputs)


def plan_of(schedule: Any) -> KernelPlan:
    ((programs),) = recover(only_function(schedule))
    return plan_kernel(programs, H100)


@pytest.mark.parametrize("name", FORMS)
def test_both_checkers(name: str) -> None:
    given, _, _ = FORMS[name]
    schedule = scheduled(name)
    inputs = random_inputs(given)
    emulated(given, lower(schedule).image, inputs)
    sequential = run_sequential(schedule, inputs)
    sequential.raise_if_wrong()
    check(given, inputs, sequential.outputs)


def test_ctas_go_through_several_tiles_of_both_phases() -> None:
    given = spec(q_len=128, hidden=128, kv_len=64)
    image = lower(of_spec(given), replace(H100, sms=3)).image
    assert image.launches[0].grid == (3, 1, 1)
    emulated(given, image, random_inputs(given))


@pytest.mark.parametrize("name", ["large", "constant_rows", "ascending", "offset"])
def test_nasty_inputs(name: str) -> None:
    given = spec(kv_len=64)
    cases = dict(adversarial_inputs(given))
    emulated(given, lower(of_spec(given)).image, cases[name])


def test_offsets_with_a_small_spread() -> None:
    given = spec(kv_len=64)
    inputs = random_inputs(given)
    q, k = (inputs[name].astype(np.float32) for name in ("q", "k"))
    inputs["q"] = (q * 1e-2).astype(inputs["q"].dtype)
    inputs["k"] = (k * 1e-2 + 1e4).astype(inputs["k"].dtype)
    emulated(given, lower(of_spec(given)).image, inputs)


def test_it_is_one_cooperative_launch_that_starts_early_with_constant_weights() -> None:
    image = lower(scheduled("heads that share keys, early")).image
    (launch,) = image.launches
    assert launch.cooperative and launch.early
    assert [each.name for each in image.workspaces] == ["context"]


def test_the_stream_leaves_half_of_the_memory_to_weights() -> None:
    given = spec(heads=32, kv_heads=8, q_len=128, kv_len=4096, hidden=2048)
    plan = plan_of(of_spec(given, CascadeTiles(rows=64, elements=128)))
    (streamed,) = (each for each in plan.features if isinstance(each, Streamed))
    assert streamed.stream.stages == 2
    assert plan.arena["stream"].size <= H100.max_shared_bytes // 2
    assert plan.right.stages >= 6
    assert plan.clusters == 64  # as many as tiles of either


def test_flags_stand_for_a_head_of_a_tile_of_rows() -> None:
    (phase,) = plan_of(scheduled("a cluster of two warpgroups")).phases
    assert phase.awaits is not None
    assert (phase.awaits.down, phase.awaits.across, phase.awaits.raisers) == (1, 2, 4)
