"""Stages go to those who fill them next, in whatever phase that is."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cpu.hopper.checkers import passed
from crossfuse.emulate.cuda import emulate
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan import kernel as kernel_plan
from crossfuse.lower.hopper.plan.kernel import KernelPlan, fillers_of, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import parse, prim_func, random_inputs

#: Chains of which more CTAs share a tile in the second phase than in the first, on either side.
LEFT = "gated_ffn:M=16,K=256,N=576,L=64,dtype=bfloat16"
RIGHT = "gated_ffn:M=100,K=256,N=768,L=64,dtype=bfloat16"
TILES = {
    # 64 rows have no six parts of eight rows, but two.
    LEFT: (TensorTiles(64, 32, cluster=3, across=2), TensorTiles(64, 32, split=3)),
    # Two CTAs share the weights of 32 columns, and not those of 24.
    RIGHT: (TensorTiles(64, 24, 2, stacked=True), TensorTiles(64, 32, 2)),
}


@cache
def scheduled(text: str) -> Any:
    first, second = TILES[text]
    return schedule_tiled_ffn(prim_func(parse(text)), first=first, second=second)


def plan_of(text: str) -> KernelPlan:
    (program,) = recover(only_function(scheduled(text)))
    return plan_kernel(program, device("nvidia-h100"), 0)


def tags(ring: kernel_plan.RingPlan) -> list[list[str]]:
    return [[place.tag for place in each] for each in ring.fillers]


def test_who_shares_later_hears_of_a_stage_before() -> None:
    plan = plan_of(LEFT)
    assert [each.left.sharers for each in plan.phases] == [1, 2]
    assert tags(plan.left) == [["cluster.y"], ["cluster.y"]]
    assert tags(plan.right) == [[], []]
    plan = plan_of(RIGHT)
    assert [each.rights[0].sharers for each in plan.phases] == [1, 2]
    assert tags(plan.right) == [["cluster.x"], ["cluster.x"]]
    assert plan.right.sharers == 2


def test_who_shared_before_hears_no_more() -> None:
    plan = plan_of(LEFT)
    first, second = plan.phases
    turned = [(second.program, second.lefts), (first.program, first.lefts)]
    assert [len(each) for each in fillers_of(turned)] == [1, 0]


@pytest.mark.parametrize("text", TILES)
def test_chains_are_right(text: str) -> None:
    passed(parse(text), scheduled(text))


def test_stages_handed_to_those_of_their_own_phase_alone_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_own_phase(phases: Any) -> Any:
        return tuple(fillers_of([each])[0] for each in phases)

    monkeypatch.setattr(kernel_plan, "fillers_of", of_own_phase)
    image = lower(scheduled(RIGHT)).image
    report = emulate(image, random_inputs(parse(RIGHT)), orders=3)
    assert "async-race" in {each.kind for each in report.findings}
