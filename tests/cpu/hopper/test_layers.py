"""Chains of three layers or more in one kernel and in one each, by both checkers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpu.hopper.layers import form, layered
from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_layers
from crossfuse.compiler.compiled import Wanted, choose
from crossfuse.compiler.source import read_source
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import draw, limits, parameters, run_sequential
from crossfuse.errors import RefusedError, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.planner.chain.build import chain_of_blocks
from crossfuse.planner.families.phases import LAUNCHES, PHASES
from crossfuse.planner.kernels.shape import count, select, shape_of_blocks
from crossfuse.runtime.nvcc import compile_cubin
from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows
from crossfuse.schedule.rules.phases import ChainTiles, PhaseTiles, schedule_phases
from crossfuse.schema import Damaged
from crossfuse.workload.build import Layer, emit
from crossfuse.workload.tolerances import judge

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


def test_sums_of_three_wide_phases_do_not_spill() -> None:
    func = layered(256, (64, 192, 256, 256))
    wide = tiles(128, 2, (192, "columns"), (256, "columns"), (256, "rows"))
    (usage,) = compile_cubin(lower(schedule_phases(func, tiles=wide)).image.cuda).resources
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.advisories) == (0, 0, ())


@pytest.mark.parametrize(
    ("widths", "placement", "kernels"),
    [((64, 128, 96, 64), "auto", 0), ((64, 72, 64, 80, 64), "l2", 1), ((64,) * 7, "global", 6)],
)
def test_functions_are_compiled(widths: tuple[int, ...], placement: str, kernels: int) -> None:
    func = layered(40, widths, residual=True)
    chosen = choose(read_source(func), H100, Wanted(placement=placement))
    assert len(chosen.lowered.image.launches) == (kernels or len(chosen.option.plan.kernels))
    if not kernels:
        assert chosen.option.plan.family in ("phases", "launches")
        assert chosen.option.plan.chain == chain_of_blocks(read_layers(ir.Schedule(func)))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (ChainTiles(64, 2, (PhaseTiles(64),)), "for 3 layers; limit: rows, a cluster and a phase"),
        (ChainTiles(64, 17), "clusters that fit nvidia-h100"),
        (
            tiles(64, 2, (64, "columns"), (64, "reduction"), (64, "columns")),
            "grid-stage: .*found sums of several CTAs; limit: tiles that one CTA computes",
        ),
        (
            tiles(64, 4, (64, "columns"), (64, "columns"), (64, "reduction")),
            "found a reduction of 128 split over 4 CTAs",
        ),
    ],
)
def test_tiles_that_do_not_fit_are_refused(chosen: ChainTiles, message: str) -> None:
    func = layered(64, (64, 128, 128, 64))
    with pytest.raises(RefusedError, match=message):
        lower(schedule_phases(func, tiles=chosen))


def test_products_of_a_gated_layer_are_not_split() -> None:
    func = layered(64, (128, 128, 128, 64), gated=(0,))
    chosen = tiles(64, 2, (64, "reduction"), (64, "columns"), (64, "columns"))
    with pytest.raises(ScheduleRefused, match="found reductions of 2 products split over 2 CTAs"):
        schedule_phases(func, tiles=chosen)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(Damaged, match="'diagonal'; expected columns, rows, reduction"):
        PhaseTiles(64, "diagonal")


def test_intermediates_that_are_used_twice_are_refused() -> None:
    made = form(64, (64, 64, 64, 64))
    hidden = made.inner[0].element
    skipping = Layer(
        made.inner[0].products,
        lambda t, i, j: hidden(t, i, j) + t["gemm0"](i, j),
    )
    with pytest.raises(ScheduleRefused, match="of one layer that multiply different"):
        schedule_phases(emit(replace(made, inner=(skipping,))))


@pytest.mark.parametrize("staged", [True, False], ids=["one kernel", "kernels"])
@pytest.mark.parametrize("rows", [1, 70])
def test_fewer_rows_are_taken(rows: int, staged: bool) -> None:
    widths, chosen = (64, 96, 64, 40), tiles(64, 2, (48, "columns"), (64, "rows"), (24, "columns"))
    schedule = schedule_phases(layered(128, widths, residual=True), tiles=chosen, staged=staged)
    accept_fewer_rows(schedule)
    func = layered(rows, widths, residual=True)
    inputs = draw(parameters(func))
    report = emulate(lower(schedule).image, inputs, orders=1)
    report.raise_if_wrong()
    judge(limits(func, inputs), report.outputs["out"], "kernels")


@pytest.mark.slow
def test_what_is_infinite_or_far_from_zero_passes_all_phases() -> None:
    """Rows of infinities and NaN stay in their rows; others are 1e4 with a spread of 1e-2."""
    func = layered(66, (64, 64, 72, 64), acts=("relu", "identity"), dtype="float16")
    inputs = draw(parameters(func))
    inputs["A"] = (1e4 + 1e-2 * inputs["A"].astype(np.float32)).astype(np.float16)
    inputs["A"][3], inputs["A"][5, 2], inputs["A"][65] = -np.inf, np.nan, 7.0
    for name in ("W0", "W1", "W2"):
        inputs[name] = (inputs[name].astype(np.float32) / 64).astype(np.float16)
    chosen = tiles(64, 2, (32, "columns"), (40, "columns"), (32, "columns"))
    report = emulate(lower(schedule_phases(func, tiles=chosen)).image, inputs, orders=1)
    report.raise_if_wrong()
    judge(limits(func, inputs), report.outputs["out"], "kernels")
    assert np.isfinite(report.outputs["out"][[0, 1, 2, 4, 64, 65]].astype(np.float64)).all()


@pytest.mark.parametrize("family", [PHASES, LAUNCHES], ids=lambda each: each.name)
def test_what_is_counted_lowers(family: Any) -> None:
    """Grids, threads and stages of some of the kernels that the planner lists."""
    draws = np.random.default_rng(0)
    chains: list[tuple[int, tuple[int, ...], dict[str, Any]]] = [
        (128, (256, 512, 384, 128), {}),
        (33, (104, 72, 40, 56), {"layout": "kn", "out": "float32"}),
        (640, (128, 192, 128, 192, 72), {"gated": (1,), "residual": True}),
    ]
    for rows, widths, options in chains:
        func = layered(rows, widths, **options)
        shape = shape_of_blocks(read_layers(ir.Schedule(func)))
        listed = family.every(shape, H100)
        for place in draws.choice(count(listed), 2, replace=False):
            kernel = select(listed, int(place))
            kernels = recover(only_function(family.schedule(func, kernel.tiles(), H100)))
            plans = [plan_kernel(each, H100, number) for number, each in enumerate(kernels)]
            assert [
                (each.clusters, each.cluster_size, each.threads, each.arena.size) for each in plans
            ] == [
                (each.ctas // each.cluster, each.cluster, each.threads, each.shared_bytes)
                for each in kernel.resources(shape, H100)
            ]
