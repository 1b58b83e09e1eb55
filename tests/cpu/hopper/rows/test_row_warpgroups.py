"""Rows that multiplying warpgroups make: sizes, what they load when, and faults planted in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cpu.hopper.rows.products import (
    layernorm_gemm,
    layernorm_reference,
    of_spec,
    quantised,
    scheduled,
    spec,
)
from cpu.hopper.rows.test_rows import passed
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import check, random_inputs
from crossfuse.workload.cascade_spec import CascadeSpec

pytestmark = pytest.mark.cpu

MEET = "tvm_builtin_ptx_bar_sync_count_sync"
WAIT = "tvm_builtin_ptx_griddepcontrol_wait"
#: Of as many rows as there are warpgroups at most, with a vector of some threads and not of others.
SIZES: list[tuple[CascadeSpec, dict[str, int]]] = [
    (spec(1, 1032, 16), {"rows": 64, "columns": 16}),
    (quantised(3, 80, 48), {"rows": 64, "columns": 16}),
]


@pytest.mark.parametrize(("given", "tiles"), SIZES, ids=lambda each: str(each))
def test_sizes(given: CascadeSpec, tiles: dict[str, int]) -> None:
    schedule = of_spec(given, constant=True, **tiles)
    assert "int own_thread" in lower(schedule).image.cuda
    passed(given, schedule, random_inputs(given, 1))


def test_a_warpgroup_makes_several_rows() -> None:
    """Two rounds of 3 warpgroups, and the rows of the tile that there are not."""
    given = spec(5, 128, 16)
    stream = StreamTiles(threads=128, unroll=1, resident="registers")
    schedule = scheduled(prim_func(given), stream, rows=192, columns=16, cluster=1)
    passed(given, schedule, random_inputs(given, 3))


def test_a_state_of_several_numbers() -> None:
    """Warps of a layer norm pass one another means and sums of squares."""
    function = layernorm_gemm(4, 136, 64)
    rng = np.random.default_rng(5)
    inputs = {
        str(each.name): (rng.standard_normal([int(n) for n in each.ty.shape]) + 0.5).astype(
            np.dtype(str(each.ty.dtype))
        )
        for each in function.params[:-1]
    }
    image = lower(scheduled(function, rows=64, columns=16)).image
    assert "int own_thread" in image.cuda
    report = emulate(image, inputs, orders=2)
    report.raise_if_wrong()
    due = layernorm_reference(inputs)
    allowed = 2.0**-8 * (np.abs(due) + np.abs(due).max() / 4)
    assert (np.abs(report.outputs["out"].astype(np.float64) - due) <= allowed).all()


GIVEN = spec(4, 512, 32)


@cache
def twice() -> KernelImage:
    """Launched twice in a row, the second time before the first is over."""
    image = lower(of_spec(GIVEN, constant=True, rows=128, columns=16, cluster=2)).image
    assert [each.early for each in image.launches] == [True]
    return replace(image, launches=image.launches * 2)


@pytest.mark.slow
def test_loads_are_under_way_before_anybody_meets() -> None:
    text = twice().cuda
    kernel = text[text.rindex('extern "C" __global__') :]
    roles = kernel.index("setmaxnreg_inc")  # behind what loads, warps of which prepare the rest
    assert kernel.index("crossfuse_fetch_line((&(x_ptr") < kernel.index("setmaxnreg_dec") < roles
    kernel = kernel[roles:]
    places = [
        kernel.index("barrier_cluster_arrive_cluster_arrive_relaxed"),
        kernel.index(f"{WAIT}();"),
        kernel.index("= crossfuse_pinned("),
        kernel.index("crossfuse_load_in_order((&(x_ptr["),  # ptxas keeps the order
        kernel.index("crossfuse_load_in_order((&(gamma_ptr["),
        kernel.index("__shfl_xor_sync("),
        kernel.index(f"{MEET}("),
        kernel.index("*(uint4*)(normalised_ptr + "),
        kernel.index("crossfuse_raise_flag("),
        kernel.index("barrier_cluster_wait_cluster_wait_acquire"),
        kernel.index("wgmma_fence"),
    ]
    assert places == sorted(places)
    report = emulate(twice(), random_inputs(GIVEN), orders=2)
    report.raise_if_wrong()
    check(GIVEN, random_inputs(GIVEN), report.outputs)


FAULTS: dict[str, tuple[Callable[[], KernelImage], set[str], str]] = {
    "states are read before they are passed on": (
        lambda: drop_call(twice(), MEET, 0),
        {"race", "uninitialised-read"},
        "shared memory",
    ),
    "a flag raised before all threads have stored": (
        lambda: drop_call(twice(), MEET, 1),
        {"race"},
        "normalised",
    ),
    "no wait for the kernel before": (
        lambda: drop_call(twice(), WAIT, 1),
        {"early-launch"},
        "normalised",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    plant, kinds, place = FAULTS[name]
    report = emulate(plant(), random_inputs(GIVEN), orders=2)
    found: list[Any] = [each for each in report.findings if each.kind in kinds]
    assert found, report.findings
    assert any(place in str(each) for each in found), found


@pytest.mark.slow
def test_weights_wait_for_who_has_seen_the_rows() -> None:
    given = spec(40, 1216, 128)
    image = lower(of_spec(given, rows=64, columns=128)).image
    silent = drop_call(image, "tvm_builtin_ptx_mbarrier_arrive_nocount_arrive_shared_b64", 0)
    first = emulate(silent, random_inputs(given), orders=1).findings[0]
    assert first.kind == "deadlock" and "thread 0" in str(first)
    emulate(image, random_inputs(given), orders=2).raise_if_wrong()
