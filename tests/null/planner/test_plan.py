"""Plans: the best of all families, in words of JSON, and what the others lose on."""

from __future__ import annotations

import json

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.planner.chain.build import chain_of, matrix_chain
from crossfuse.planner.families import EAGER
from crossfuse.planner.plan import Plan, plan, ranked
from crossfuse.workload import resolve


@pytest.mark.parametrize("text", ["G1", "G4:M=16", "S3:M=512", "gemm:M=512,K=768,N=3072"])
def test_a_plan_is_the_fastest_and_reads_back(text: str) -> None:
    found = plan(resolve(text))
    assert Plan.from_json(found.to_json()) == found
    assert found.microseconds == pytest.approx(sum(found.terms.values()))
    times = [each.microseconds for each in found.runners]
    assert times == sorted(times)
    assert all(found.microseconds <= each for each in times)
    assert EAGER in {found.family, *(each.family for each in found.runners)}
    for each in found.runners:
        assert each.microseconds == found.microseconds or each.loses


def test_small_chains_stay_in_registers_and_wide_ones_do_not() -> None:
    assert plan(resolve("G1")).family == "registers"
    assert plan(resolve("S3")).family in ("l2", "global")


def test_ranked_plans_keep_their_order_and_their_tiles_apart() -> None:
    found = ranked(resolve("G4"), only=("l2", "dsm"), keep=4)
    assert [each.microseconds for each in found] == sorted(each.microseconds for each in found)
    assert len(found) == 8
    assert len({json.dumps([each.family, each.tiles]) for each in found}) == 8


def test_a_chain_is_planned_as_its_workload() -> None:
    spec = resolve("G4:weights=nk")
    assert plan(chain_of(spec)) == plan(spec)


def test_bytes_are_counted_by_level() -> None:
    found = plan(resolve("G4"), only=("dsm",))
    chain = found.chain
    ends = [each for each in chain.tensors if each.role != "intermediate"]
    assert found.bytes["hbm"] == sum(2 * chain.elements(each.name) for each in ends)
    assert found.bytes["l2"] > found.bytes["hbm"]
    assert found.bytes["dsm"] > 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: plan(resolve("S3"), only=("dsm",)), "plan: chain of 128 x 4096 x 11008 x 4096"),
        (lambda: plan(resolve("S3"), only=("hbm",)), "only: found 'hbm'; limit: gemm, registers"),
        (lambda: plan(matrix_chain(8, [16, 16, 16], batch=2)), "kernel-chain: .*found rows b, m"),
        (lambda: Plan.from_json("{"), "limit: JSON, in a plan of version 1"),
        (lambda: Plan.from_json('{"version": 0}'), "found version 0; limit: version 1, in a plan"),
        (lambda: Plan.from_json('{"version": 1}'), "found chain: nothing; limit: all fields"),
    ],
)
def test_what_cannot_be_planned_is_refused(act: object, message: str) -> None:
    with pytest.raises(PlanRefused, match=message):
        act()  # type: ignore[operator]
