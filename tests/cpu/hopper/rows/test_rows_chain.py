"""A norm and the two layers behind it in one kernel against float64: sizes, numbers, faults."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.rows_first import rows_before_chain
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import CheckFailed, LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.rows import schedule_rows_chain
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import parse

pytestmark = pytest.mark.cpu

ONE = {"cluster": 1, "split": 1}


def scheduled(
    spec: CascadeSpec, first: dict[str, int], second: dict[str, int], constant: bool = False
) -> Any:
    """A packaged norm and FFN in given tiles; it starts early with `constant` weights."""
    parts = rows_before_chain(prim_func(spec))
    assert parts is not None
    (site,) = detect(parts.rows)
    return schedule_rows_chain(
        parts,
        site,
        derive(site.cascade),
        first=TensorTiles(**first),
        second=TensorTiles(**second),
        constant_weights=constant,
    )


#: Workloads with tiles of both phases: rows that warps or warpgroups make, extents that tiles do
#: not divide, a second reduction split over a cluster, CTAs without a tile of the first phase.
CASES: dict[str, tuple[str, dict[str, int], dict[str, int], bool]] = {
    "one row": (
        "rmsnorm_ffn:tokens=1,K=72,N=136",
        {"rows": 64, "columns": 40, **ONE},
        {"rows": 64, "columns": 24, **ONE},
        True,
    ),
    "a plain layer behind a layer norm, by warps": (
        "layernorm_ffn:tokens=37,K=136,N=72,gated=false,act=gelu",
        {"rows": 64, "columns": 40, **ONE},
        {"rows": 64, "columns": 64, **ONE},
        False,
    ),
    "more tiles of the second phase, whose weights come first": (
        "rmsnorm_ffn:tokens=70,K=328,N=128,dtype=float16",
        {"rows": 64, "columns": 128, **ONE},
        {"rows": 64, "columns": 64, **ONE},
        True,
    ),
    "a split second reduction": (
        "rmsnorm_ffn:tokens=16,K=64,N=256",
        {"rows": 64, "columns": 64, "cluster": 2},
        {"rows": 64, "columns": 32, "split": 2},
        True,
    ),
    "no residual, other columns": (
        "rmsnorm_ffn:tokens=130,K=64,N=64,L=24,residual=false",
        {"rows": 128, "columns": 32, **ONE},
        {"rows": 128, "columns": 24, **ONE},
        False,
    ),
}


@cache
def made(name: str) -> tuple[CascadeSpec, Any, KernelImage]:
    text, first, second, constant = CASES[name]
    spec = parse(text)
    schedule = scheduled(spec, first, second, constant)
    return spec, schedule, lower(schedule).image


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_agree_with_float64(name: str) -> None:
    spec, schedule, image = made(name)
    inputs = random_inputs(spec, 1)
    sequential = run_sequential(schedule, inputs)
    sequential.raise_if_wrong()
    check(spec, inputs, sequential.outputs)
    report = emulate(image, inputs, orders=2)
    report.raise_if_wrong()
    check(spec, inputs, report.outputs)
    for later in report.later:  # flags count on from launch to launch
        assert later["out"].tobytes() == report.outputs["out"].tobytes()


@pytest.mark.parametrize("name", ["one row", "a plain layer behind a layer norm, by warps"])
def test_numbers_that_are_hard_to_norm(name: str) -> None:
    spec, _, image = made(name)
    for kind, inputs in adversarial_inputs(spec):
        report = emulate(image, inputs, orders=1)
        report.raise_if_wrong()
        try:
            check(spec, inputs, report.outputs)
        except CheckFailed as error:
            raise AssertionError(kind) from error


def test_a_small_spread_far_from_zero() -> None:
    """Deviations of a layer norm cancel: 1000 with a spread of one, in float16."""
    spec = parse("layernorm_ffn:tokens=5,K=64,N=64,gated=false")
    spec = replace(spec, dtype="float16", out="float16")
    image = lower(scheduled(spec, {"rows": 64, "columns": 64, **ONE}, {"columns": 64, **ONE})).image
    inputs = dict(random_inputs(spec, 2))
    inputs["x"] = (1000 + inputs["x"].astype("float32")).astype(inputs["x"].dtype)
    report = emulate(image, inputs, orders=1)
    report.raise_if_wrong()
    check(spec, inputs, report.outputs)


@pytest.mark.slow
def test_fewer_rows_are_right() -> None:
    text, first, second, _ = CASES["more tiles of the second phase, whose weights come first"]
    spec = parse(text)
    schedule = scheduled(spec, first, second)
    schedule.accept_fewer_rows()
    image = lower(schedule).image
    assert [each.name for each in image.buffers if each.rows] == ["x", "out"]
    inputs = dict(random_inputs(spec, 3))
    inputs["x"] = inputs["x"][:65]
    for report in (run_sequential(schedule, inputs), emulate(image, inputs, orders=1)):
        report.raise_if_wrong()
        check(replace(spec, tokens=65), inputs, report.outputs)


@pytest.mark.slow
def test_who_has_no_tile_of_the_first_phase_says_that_rows_are_made() -> None:
    """Its weights wait for that, as those of others do: each kind says it once."""
    spec, _, image = made("more tiles of the second phase, whose weights come first")
    for number in range(2):
        broken = drop_call(
            image, "tvm_builtin_ptx_mbarrier_arrive_nocount_arrive_shared_b64", number
        )
        report = emulate(broken, random_inputs(spec), orders=1)
        assert {each.kind for each in report.findings} == {"deadlock"}


def test_sums_that_leave_no_room_for_rows_are_refused() -> None:
    spec = parse("rmsnorm_ffn:tokens=200,K=64,N=384")
    tiles = {"rows": 256, "columns": 96, "cluster": 1, "split": 1}
    with pytest.raises(LoweringRefused) as caught:
        lower(scheduled(spec, tiles, {**tiles, "columns": 64}))
    assert "found 192 registers of a thread for sums; limit: 160" in str(caught.value)
