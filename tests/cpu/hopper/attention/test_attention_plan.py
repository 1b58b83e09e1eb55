"""Attention and its output product as a family: planned, compiled, explained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu.hopper.attention.products import spec
from crossfuse.compiler.compiled import choose
from crossfuse.compiler.source import read_source
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.planner.cascade.plan import plan_cascade, ranked_cascade
from crossfuse.planner.cascade.shape import CascadeShape, shape_of_cascade
from crossfuse.planner.families.attention_out import AttentionOut
from crossfuse.schedule.planned import schedule_cascade_of
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import check, random_inputs
from crossfuse.workload.cascades import resolve

pytestmark = pytest.mark.cpu

H100 = device("nvidia-h100")
LLAMA = {
    "1B": "heads=32,kv_heads=8,head_dim=64,hidden=2048",
    "8B": "heads=32,kv_heads=8,head_dim=128,hidden=4096",
}
#: Specs whose tiles the planner lists, and of how many tiles one is lowered.
SPACES = {
    f"attention_out:batch=1,{LLAMA['1B']},q_len=16,kv_len=4096": 29,
    f"attention_out:batch=1,{LLAMA['8B']},q_len=128,kv_len=1024,causal=true": 17,
    "attention_out:batch=3,heads=6,q_len=64,kv_len=200,head_dim=80,hidden=344,bias=true": 11,
}


def shape(text: str) -> CascadeShape:
    return shape_of_cascade(resolve(text))


@pytest.mark.parametrize("text", SPACES)
def test_what_the_planner_lists_lowers(text: str) -> None:
    """Shared memory and clusters are counted twice; both must agree that a kernel fits."""
    func = prim_func(resolve(text))
    family = AttentionOut(shape(text))
    steps, tiles = family.candidates(H100)
    assert steps[-1].candidates == len(tiles) > 0
    for each in tiles[:: SPACES[text]]:
        schedule = schedule_cascade_of(func, family.name, family.fields(each))
        (programs,) = recover(only_function(schedule))
        plan = plan_kernel(programs, H100)
        assert plan.arena.size <= H100.max_shared_bytes
        assert plan.clusters * plan.cluster_size == family.taken(each, H100).ctas


@pytest.mark.parametrize("model", LLAMA)
def test_a_plan_says_where_its_time_goes(model: str) -> None:
    best, *_ = ranked_cascade(f"attention_out:batch=1,{LLAMA[model]},q_len=32,kv_len=1024")
    assert best.family == "attention_out"
    assert best.microseconds == pytest.approx(sum(best.terms.values()))
    assert {"start", "steps", "flag", "product"} <= best.terms.keys()
    # Two kernels are what it is compared with: they make no flag, and begin once more.
    (other,) = (each for each in best.runners if each.family == "eager")
    assert "relaunch" in other.loses
    assert other.microseconds > best.microseconds
    told = best.explain().text()
    assert "Attention first, and its output product in the same kernel" in told
    assert "product" in told


def test_traffic_counts_weights_and_keys_once() -> None:
    text = f"attention_out:batch=1,{LLAMA['1B']},q_len=128,kv_len=1024"
    plan = plan_cascade(text)
    assert plan.bytes["hbm"] == resolve(text).bytes


def test_weights_that_every_tile_of_rows_loads_again_are_not_worth_one_kernel() -> None:
    """Measured: 39.1 us in one kernel, 34.2 in two, whose product has tiles of 128 rows."""
    plan = plan_cascade(f"attention_out:batch=1,{LLAMA['8B']},q_len=128,kv_len=1024")
    assert plan.family == "eager"


@pytest.mark.slow
def test_compile_takes_its_text() -> None:
    given = spec(kv_len=64, hidden=32)
    chosen = choose(read_source(str(given)), H100)
    assert chosen.option.plan is not None and chosen.option.plan.family == "attention_out"
    assert len(chosen.lowered.image.launches) == 1
    inputs: dict[str, Any] = random_inputs(given)
    report = run_sequential(chosen.schedule, inputs)
    report.raise_if_wrong()
    check(given, inputs, report.outputs)
    assert np.isfinite(report.outputs["out"].astype(np.float32)).all()


def test_rows_of_several_sequences_in_a_tile_are_refused() -> None:
    text = "attention_out:batch=2,heads=2,q_len=16,kv_len=64,head_dim=64,hidden=64"
    with pytest.raises(PlanRefused) as caught:
        plan_cascade(text, only=("attention_out",))
    assert caught.value.refusal.found == (
        "'no warpgroup is without rows, and no tile has those of two sequences' leaves none of 256 "
        "tiles of attention_out"
    )
