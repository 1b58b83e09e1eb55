"""Attention and its output product in one persistent kernel, by both checkers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from cpu.hopper.attention.products import of_spec, spec
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.rewrite.rows_first import attended, sites_of
from crossfuse.cascade.rewrite.tiled.tiled import tiled
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.hopper.stream.feature import Streamed
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.planned import trace_json
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
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


def emulated(
    given: AttentionOut, image: KernelImage, inputs: dict[str, np.ndarray], orders: int = 2
) -> None:
    report = emulate(image, inputs, orders=orders)
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


@pytest.mark.slow
def test_ctas_go_through_several_tiles_of_both_phases() -> None:
    given = spec(q_len=128, hidden=128, kv_len=64)
    image = lower(of_spec(given), replace(H100, sms=3)).image
    assert image.launches[0].grid == (3, 1, 1)
    emulated(given, image, random_inputs(given))


@pytest.mark.slow
def test_nasty_inputs() -> None:
    """Large logits, equal ones, each larger than the last; keys of 1e4 with a spread of 1e-2."""
    given = spec(kv_len=64)
    image = lower(of_spec(given)).image
    cases = dict(adversarial_inputs(given))
    near = random_inputs(given)
    for name, factor, offset in (("q", 1e-2, 0.0), ("k", 1e-2, 1e4)):
        moved = near[name].astype(np.float32) * factor + offset
        near[name] = moved.astype(near[name].dtype)
    for inputs in (cases["large"], cases["constant_rows"], cases["ascending"], near):
        emulated(given, image, inputs, orders=1)


def test_its_trace_replays_from_json() -> None:
    schedule = scheduled("a cluster shares keys")
    given, stream, _ = FORMS["a cluster shares keys"]
    (site,) = sites_of(prim_func(given))
    sizes = CascadeTiles(**{"rows": 64, "elements": 64, **stream})
    again = Schedule(attended(site.after, tiled(site, derive(site.cascade), sizes)))
    Trace.apply_json_to_schedule(json.loads(trace_json(schedule.trace)), again)
    tvm.ir.assert_structural_equal(again.mod, schedule.mod)


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
