"""The packaged cascades with products, in tile form, against float64 and separate kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cpu.cascade.small import small
from cpu.cascade.tiles.forms import Compiled, found, run, scheduled
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.cascade.spec import left, right, value
from crossfuse.errors import CheckFailed
from crossfuse.schedule.rules.stream import schedule_cascade_tiles
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascade_spec import CascadeSpec

pytestmark = pytest.mark.cpu

#: Tiles that divide neither rows nor elements nor columns, and clusters.
TILES = {
    "R1": [{"rows": 4, "elements": 4}, {"rows": 16, "elements": 2, "cluster": 3}],
    "R2": [{"rows": 3, "elements": 5}],
    "R3": [{"rows": 4, "elements": 5}, {"rows": 2, "elements": 4, "cluster": 4}],
    "R4": [{"rows": 2, "elements": 4}, {"rows": 3, "elements": 4, "cluster": 4}],
    "R5": [{"rows": 4, "elements": 16}, {"rows": 2, "elements": 5, "depth": 3, "cluster": 2}],
    "R9": [{"rows": 4, "elements": 8}, {"rows": 2, "elements": 5, "columns": 4, "cluster": 2}],
}


def cases(spec: CascadeSpec) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    yield "random", random_inputs(spec, 1)
    for name, inputs in adversarial_inputs(spec):
        # Sums of denormals are scaled behind the sum, not before it: no kernel that reads each
        # element once can do better.
        if name != "denormal" or spec.kind != "rmsnorm_gemm" or spec.dtype != "float32":
            yield name, inputs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "tiles"), [(n, each) for n in TILES for each in TILES[n]])
def test_tile_forms_compute_what_numpy_does(name: str, tiles: dict[str, int], dtype: str) -> None:
    spec = small(name, dtype)
    compute = Compiled(scheduled(prim_func(spec), **tiles))
    for case, inputs in cases(spec):
        try:
            check(spec, inputs, compute(inputs))
        except CheckFailed as error:
            raise AssertionError(case) from error


@pytest.mark.parametrize(
    ("name", "tiles"),
    [("R3", {"rows": 4, "elements": 4, "cluster": 3}), ("R5", TILES["R5"][-1])],
    ids=["more rows than a group", "selections"],
)
def test_a_second_kernel_merges(name: str, tiles: dict[str, int]) -> None:
    """Run forwards and backwards: the parts of a tile do not depend on each other."""
    spec = small(name)
    schedule = scheduled(prim_func(spec), **tiles, merge="kernel")
    inputs = random_inputs(spec)
    check(spec, inputs, run(schedule, inputs))


@pytest.mark.parametrize("name", ["R1", "R3", "R5", "R9"])
def test_parallel_iterations_are_independent(name: str) -> None:
    spec = small(name)
    schedule = scheduled(prim_func(spec), **TILES[name][-1])
    inputs = random_inputs(spec)
    check(spec, inputs, run(schedule, inputs))


@pytest.mark.parametrize(
    "tiles", [{"rows": 4, "elements": 8}, {"rows": 2, "elements": 5, "columns": 5, "cluster": 2}]
)
def test_a_quantised_product_is_scaled_by_the_largest_so_far(tiles: dict[str, int]) -> None:
    """On numbers whose quotients are no denormals: TVM converts those wrongly on the CPU."""
    spec = small("R6")
    schedule = scheduled(prim_func(spec), **tiles)
    inputs = random_inputs(spec)
    rng = np.random.default_rng(1)
    for name in ("x", "weight"):
        shape, kind = inputs[name].shape, inputs[name].dtype
        signs = rng.choice([-1.0, 1.0], shape)
        inputs[name] = (signs * np.exp(rng.uniform(-2, 2, shape))).astype(kind)
    errors = check(spec, inputs, run(schedule, inputs))
    assert 0 < errors["out"].error < 0.05


def test_a_merge_without_its_correction_is_found() -> None:
    spec = small("R3")
    site, derivation = found(prim_func(spec))
    wrong = tuple(
        each
        if each.monoid.name == "max"
        else replace(each, merge=left(each.name) + right(each.name))
        for each in derivation.slots
    )
    tiles = CascadeTiles(rows=2, elements=4, cluster=4)
    inputs = random_inputs(spec)
    right_one = schedule_cascade_tiles(site, derivation, tiles)
    check(spec, inputs, run(right_one, inputs))
    schedule = schedule_cascade_tiles(site, replace(derivation, slots=wrong), tiles)
    with pytest.raises(CheckFailed, match="decode_attention"):
        check(spec, inputs, run(schedule, inputs))


def test_a_step_without_its_correction_is_found() -> None:
    spec = small("R1")
    site, derivation = found(prim_func(spec))
    wrong = tuple(replace(each, carry=value(each.name)) for each in derivation.slots)
    tiles = CascadeTiles(rows=4, elements=4)
    inputs = random_inputs(spec)
    schedule = schedule_cascade_tiles(site, replace(derivation, slots=wrong), tiles)
    with pytest.raises(CheckFailed, match="attention"):
        check(spec, inputs, run(schedule, inputs))
