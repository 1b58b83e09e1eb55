"""Chains of three layers or more in one kernel and in one each, by both checkers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu.hopper.layers import layered
from crossfuse import compile as compiled
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.emulate.reference import draw, limits, parameters
from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.runtime.cubin import compile_cubin
from crossfuse.schedule.rules.phases import ChainTiles, PhaseTiles, schedule_phases
from crossfuse.workload import parse, prim_func

H100 = device("nvidia-h100")


def tiles(rows: int, cluster: int, *phases: tuple[int, str]) -> ChainTiles:
    return ChainTiles(rows, cluster, tuple(PhaseTiles(*each) for each in phases))


#: Rows and widths, options of the function, and tiles.
CASES: dict[str, tuple[int, tuple[int, ...], dict[str, Any], ChainTiles]] = {
    "one CTA each": (
        64,
        (64, 128, 72, 64),
        {},
        tiles(64, 1, (64, "columns"), (40, "columns"), (32, "columns")),
    ),
    "every way in clusters of two": (
        128,
        (64, 128, 128, 64),
        {"residual": True},
        tiles(64, 2, (32, "columns"), (64, "rows"), (64, "reduction")),
    ),
    "four layers in clusters of four": (
        192,
        (72, 128, 96, 256, 40),
        {"dtype": "float16", "layout": "kn"},
        tiles(64, 4, (32, "columns"), (96, "rows"), (16, "columns"), (40, "rows")),
    ),
    "odd rows": (
        97,
        (40, 136, 72, 56),
        {"residual": True, "dtype": "float16", "out": "float32"},
        tiles(64, 2, (40, "columns"), (40, "rows"), (56, "rows")),
    ),
    "one row": (
        1,
        (64, 64, 128, 64),
        {},
        tiles(64, 2, (32, "columns"), (16, "columns"), (64, "reduction")),
    ),
    "tall tiles": (
        200,
        (64, 96, 64, 48),
        {"bias": False},
        tiles(256, 1, (96, "columns"), (64, "columns"), (48, "columns")),
    ),
    "gated first and inside": (
        64,
        (64, 64, 64, 64, 64),
        {"gated": (0, 2)},
        tiles(64, 2, (32, "columns"), (32, "columns"), (32, "columns"), (32, "columns")),
    ),
    "chosen": (33, (64, 80, 96, 64), {}, ChainTiles()),
}


def judged(func: Any, schedule: Any, inputs: dict[str, Any], orders: int = 2) -> None:
    """Run a schedule and its kernels on inputs: clean, and with twice the unfused error at most."""
    allowed = limits(func, inputs)
    unfused = allowed.unfused.astype(np.float64) - allowed.reference
    report = emulate(lower(schedule).image, inputs, orders=orders)
    report.raise_if_wrong()
    sequential = run_sequential(schedule, inputs)
    sequential.raise_if_wrong()
    for outputs in (report.outputs, *report.later, sequential.outputs):
        errors = outputs["out"].astype(np.float64) - allowed.reference
        assert np.abs(errors).max() <= 2 * np.abs(unfused).max()
        assert np.linalg.norm(errors) <= 2 * np.linalg.norm(unfused)


@pytest.mark.parametrize("staged", [True, False], ids=["one kernel", "kernels"])
@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str, staged: bool) -> None:
    rows, widths, options, chosen = CASES[name]
    func = layered(rows, widths, **options)
    schedule = schedule_phases(func, tiles=chosen, staged=staged)
    judged(func, schedule, draw(parameters(func)))


def test_each_phase_waits_for_the_one_before_it() -> None:
    _, widths, options, chosen = CASES["four layers in clusters of four"]
    func = layered(192, widths, **options)
    (programs,) = recover(only_function(schedule_phases(func, tiles=chosen)))
    plan = plan_kernel(programs, H100)
    assert [each.awaits for each in plan.phases[1:]] == [e.raises for e in plan.phases[:-1]]
    assert (plan.phases[0].awaits, plan.phases[-1].raises) == (None, None)
    assert [(each.down, each.across) for each in plan.flags] == [(3, 4), (3, 1), (3, 16)]
    apart = recover(only_function(schedule_phases(func, tiles=chosen, staged=False)))
    assert [len(each) for each in apart] == [1, 1, 1, 1]
    assert [each[0].follows for each in apart] == [False, True, True, True]
