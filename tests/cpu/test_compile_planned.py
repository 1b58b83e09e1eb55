"""Plans through the public surface: plan, schedule, compile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import crossfuse
from crossfuse.compiler.options import planned_options
from crossfuse.compiler.source import read_source
from crossfuse.errors import PlanRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.schedule.planned import schedule_planned
from crossfuse.workload import prim_func, resolve

H100 = device("nvidia-h100")


@pytest.mark.parametrize("text", ["G1", "S8:M=16", "gemm:M=64,K=256,N=512,weights=nk"])
def test_a_workload_is_scheduled_by_its_plan(text: str) -> None:
    plan = crossfuse.plan(text)
    spec = resolve(text)
    wanted = schedule_planned(prim_func(spec), plan).mod
    for workload in (text, spec, prim_func(spec)):
        found = crossfuse.schedule(workload, plan).mod
        assert found.script() == wanted.script()


def test_the_package_of_primitives_is_still_a_package() -> None:
    import crossfuse.schedule.rules

    assert crossfuse.schedule.rules.__name__ == "crossfuse.schedule.rules"
    assert "schedule" in dir(crossfuse) and "plan" in dir(crossfuse)


def test_a_plan_of_other_extents_is_refused() -> None:
    plan = crossfuse.plan("G1:M=16")
    with pytest.raises(ScheduleRefused, match="found m = 128; limit: m = 16, which the plan is of"):
        crossfuse.schedule("G1", plan)


@pytest.mark.parametrize("text", ["G4:M=16", "G1:weights=nk", "gemm:M=64,K=256,N=512"])
def test_functions_are_planned_as_their_specs(text: str) -> None:
    by_spec = planned_options(read_source(text), None, False, H100)
    func = prim_func(resolve(text))
    by_func = planned_options(read_source(func), None, False, H100)
    plans = [each.plan for each in by_spec if each.plan is not None]
    assert len(plans) == len(by_spec)
    assert [each.plan for each in by_func] == plans
    times = [each.microseconds for each in plans]
    assert times == sorted(times)
    assert "eager" not in {each.family for each in plans}


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("G4", "l2"),
        ("G4:M=512", "l2"),
        ("G4:M=512,weights=nk", "global"),
        ("gemm:M=512,K=768,N=3072", "gemm"),
        ("gemm:M=16,K=4096,N=1024", "gemm"),
        ("S3", "global"),
    ],
)
def test_the_explained_cluster_lies_as_the_schedule_binds_it(text: str, family: str) -> None:
    plan = crossfuse.plan(text, only=(family,))
    layout = crossfuse.schedule(text, plan).cluster_layout()
    # Loops over rows, columns and reductions are named i, j and k; others go with these.
    bound = [(each.name[0], each.axis, each.extent) for each in layout.loops]
    bound = [each for each in bound if each[0] in "ijk" and each[2] > 1]
    assert [each for phase in (0, 1) for each in axes(plan, phase, dict(layout.axes))] == bound


def axes(plan: Any, phase: int, extents: dict[str, int]) -> list[tuple[str, str, int]]:
    """Along which of a phase's loops the CTAs of each cluster axis have different ranges."""
    shares = [each for each in plan.explain().layout if each.phase == phase]
    found: list[tuple[str, str, int]] = []
    step = 1
    for axis, extent in extents.items():
        along = shares[: step * extent : step]
        for letter, field in (("i", "rows"), ("j", "columns"), ("k", "reduction")):
            if len({getattr(each, field) for each in along}) > 1:
                found.append((letter, axis, extent))
        step *= extent
    return found


@pytest.mark.slow
def test_what_is_planned_is_compiled() -> None:
    plan = crossfuse.plan("G1:M=16")
    (kernel,) = plan.kernels
    for given in (plan, None):
        found = crossfuse.compile("G1:M=16", plan=given)
        (launch,) = found.lowered.image.launches
        assert launch.grid[0] == kernel.ctas
        assert launch.cluster[0] == kernel.cluster
        assert launch.dynamic_shared_bytes == kernel.shared_bytes


@pytest.mark.parametrize(
    "options",
    [{"rule": "threads"}, {"placement": "l2"}],
    ids=["rule", "placement"],
)
def test_a_plan_that_nothing_looks_at_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ScheduleRefused, match=r"compile: plan: found a plan with rule="):
        crossfuse.compile("G1:M=16", plan=crossfuse.plan("G1:M=16"), **options)


def test_a_plan_beside_a_cluster_is_refused() -> None:
    plan = crossfuse.plan("G1:M=16")
    with pytest.raises(ScheduleRefused, match="found a plan, which has clusters, and cluster=4"):
        crossfuse.compile("G1:M=16", plan=plan, cluster=4)


def test_a_plan_beside_a_schedule_is_refused() -> None:
    plan = crossfuse.plan("G1:M=16")
    with pytest.raises(ScheduleRefused, match="found a plan and a schedule"):
        crossfuse.compile(crossfuse.schedule("G1:M=16", plan), plan=plan)


def test_a_plan_not_to_fuse_compiles_nothing() -> None:
    plan = crossfuse.plan("G1:M=16", only=("eager",))
    with pytest.raises(ScheduleRefused, match="leaves the chain to a library"):
        crossfuse.compile("G1:M=16", plan=plan)


def test_tiles_that_do_not_fit_are_refused_when_compiled() -> None:
    plan = crossfuse.plan("G1:M=16")
    wide = replace(plan, tiles={**plan.tiles, "columns": 512})
    with pytest.raises((ScheduleRefused, PlanRefused)):
        crossfuse.compile("G1:M=16", plan=wide)
