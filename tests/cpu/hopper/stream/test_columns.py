"""Streams of wide sums, and of a tile that is keys and values at once, in the emulator."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cpu.cascade.tiles.forms import scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs, reference
from cpu.hopper.instructions import FENCE
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.errors import LoweringRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan, plan_stream
from crossfuse.lower.hopper.stream.recover.function import recover_streams
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import resolve

pytestmark = pytest.mark.cpu

#: Fewer SMs than tiles: CTAs take several, whose queries lie where results left from.
SMALL = replace(device("nvidia-h100"), sms=3)


def latent(batch: int, heads: int, keys: int, widths: tuple[int, int] = (512, 64)) -> CascadeSpec:
    """Decoding over a cache of latent vectors."""
    latents, rope = widths
    return resolve(
        f"mla_decode:batch={batch},q_heads={heads},kv_len={keys},latent_dim={latents},"
        f"rope_dim={rope}"
    )


def image_of(spec: CascadeSpec, **tiles: int) -> KernelImage:
    return lower(scheduled(prim_func(spec), **tiles), SMALL).image


def plan_of(spec: CascadeSpec, **tiles: int) -> StreamPlan:
    schedule = scheduled(prim_func(spec), **tiles)
    (program,) = recover_streams(schedule.mod["main"])
    return plan_stream(program, device("nvidia-h100"))


CASES = {
    "an odd number of keys": (latent(1, 128, 201), {}),
    "fewer keys than a tile has": (latent(2, 16, 20), {}),
    "heads that do not divide, several turns": (latent(4, 37, 70), {}),
    "tiles of 32 keys": (latent(1, 64, 100), {"elements": 32}),
    "192 columns each": (latent(1, 64, 90, (384, 64)), {}),
    "columns that fit one warpgroup": (latent(2, 128, 200, (128, 32)), {}),
    "few rows, columns that fit": (latent(5, 16, 300, (128, 32)), {"rows": 64}),
    "one stage": (latent(1, 64, 200, (384, 64)), {"stages": 1}),
    "few rows, keys split over a cluster": (
        latent(1, 16, 400, (128, 32)),
        {"elements": 64, "rows": 64, "cluster": 4},
    ),
    "one that scores, one that adds": (latent(1, 64, 300, (256, 64)), {"rows": 64, "elements": 96}),
    "keys and values apart": (
        resolve("attention:batch=1,heads=2,q_len=70,kv_len=150,head_dim=512,causal=true"),
        {},
    ),
    "256 columns apart, two boxes of weights": (
        resolve("attention:batch=1,heads=2,q_len=90,kv_len=300,head_dim=256"),
        {"rows": 64, "elements": 80},
    ),
    "256 columns, two warpgroups of rows": (
        resolve("attention:batch=1,heads=1,q_len=128,kv_len=130,head_dim=256"),
        {"elements": 64},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right_and_repeat(name: str) -> None:
    spec, tiles = CASES[name]
    given = random_inputs(spec)
    report = emulate(image_of(spec, **tiles), given, orders=2)
    report.raise_if_wrong()
    check(spec, given, report.outputs)
    for outputs in report.later:
        assert outputs["out"].tobytes() == report.outputs["out"].tobytes()


@pytest.mark.slow
def test_inputs_of_all_kinds() -> None:
    spec = latent(1, 16, 70, (384, 64))
    image = image_of(spec)
    for _, given in adversarial_inputs(spec):
        report = emulate(image, given, orders=1)
        report.raise_if_wrong()
        check(spec, given, report.outputs)


MASKED = {
    "lengths and a table": Masked(
        heads=1, rows=64, keys=150, depth=384, lengths=True, table=True, alibi=True
    ),
    "more rows than keys, a bound": Masked(
        heads=1, rows=130, keys=70, depth=384, causal=True, cap=20.0
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks(name: str) -> None:
    case = MASKED[name]
    given = inputs(case)
    image = lower(scheduled(function(case), rows=64, elements=32), SMALL).image
    report = emulate(image, given, orders=1)
    report.raise_if_wrong()
    out = report.outputs["out"].astype(np.float64)
    exact, separate = (reference(case, given, each) for each in (np.float64, np.float32))
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - exact) <= 2 * np.linalg.norm(separate - exact)


@pytest.mark.slow
def test_the_cache_is_loaded_once() -> None:
    plan = plan_of(resolve("R4"))
    assert [each.buffer for each in plan.tensor_maps] == ["q", "cache", "out"]
    assert (plan.stages, plan.slots, plan.adders, plan.threads) == (2, 1, 2, 512)
    assert plan.arena["values"].size == 0
    assert plan.arena["keys"].size == 2 * 64 * 576 * 2
    assert plan.readers[:2] == (2, 2)
    narrow = plan_of(latent(4, 128, 4096, (128, 32)))
    assert (narrow.adders, narrow.consumers, narrow.stages) == (0, 2, 2)


CUBINS = {
    "R4": (resolve("R4"), {}),
    "one that adds": (latent(4, 64, 4096, (256, 64)), {"rows": 64, "elements": 96}),
    "columns that fit": (latent(4, 128, 4096, (128, 32)), {}),
    "keys and values apart, causal": (
        resolve("attention:batch=4,heads=4,q_len=1024,kv_len=1024,head_dim=512,causal=true"),
        {},
    ),
    "256 columns": (
        resolve("attention:batch=4,heads=4,q_len=1024,kv_len=1024,head_dim=256,causal=true"),
        {"elements": 64},
    ),
}


@pytest.mark.parametrize("name", CUBINS)
def test_nothing_spills(name: str) -> None:
    spec, tiles = CUBINS[name]
    image = lower(scheduled(prim_func(spec), **tiles)).image
    for usage in compile_cubin(image.cuda).resources:
        assert not usage.complaints, usage
        assert not usage.spill_store_bytes, usage


SYNC = r"tvm_builtin_ptx_bar_sync\w+"
ARRIVE = r"tvm_builtin_ptx_bar_arrive\w+"
PRODUCTS = r"tvm_builtin_ptx_wgmma_wait_group\w+_0"
BOXES = r"tvm_builtin_ptx_cp_async_bulk_wait_group\w+"
RELEASE = r"tvm_builtin_ptx_mbarrier_arrive_nocount\w+"
WAIT = "tvm_builtin_cuda_mbarrier_wait"
CASE = latent(4, 64, 330, (384, 64))


@cache
def right() -> KernelImage:
    """Two tiles of rows for one of three CTAs, six of keys: all stages are used again."""
    return image_of(CASE)


#: Instructions left out, in the order of the text: who scores, then who adds.
FAULTS = {
    "weights read before they are there": (SYNC, 1, "async-race"),
    "weights overwritten before they have been read": (SYNC, 0, "async-race"),
    "weights that nobody says are there": (ARRIVE, 0, "deadlock"),
    "weights that nobody says have been read": (ARRIVE, 1, "deadlock"),
    "no fence behind the weights": (FENCE, 0, "async-race"),
    "scores read before they are made": (PRODUCTS, 0, "register-race"),
    "a stage handed back before the second product has read it": (PRODUCTS, 1, "async-race"),
    "a stage never handed back": (RELEASE, 0, "deadlock"),
    "queries loaded before results have left": (BOXES, 0, "async-race"),
    "no fence before results are copied": (FENCE, 1, "async-race"),
    "results copied before all have stored": (SYNC, 2, "async-race"),
    "keys multiplied before they are there": (WAIT, 3, "async-race"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name: str) -> None:
    instruction, index, kind = FAULTS[name]
    report = emulate(drop_call(right(), instruction, index), random_inputs(CASE), orders=3)
    assert kind in {each.kind for each in report.findings}, report.findings


REFUSED = {
    "columns that two warpgroups cannot share": (
        latent(1, 64, 100, (320, 64)),
        {},
        "stream-columns: sums 'o': found 320 columns; limit: at most 256, or a multiple of 128 up "
        "to 512 that two warpgroups share: each begins with a box of 64. Instead: pad the columns "
        "with zeros, or leave the annotation out for the general lowering",
    ),
    "two tiles of 64 rows": (
        latent(1, 128, 100),
        {"rows": 128},
        "stream-registers: scores 'scores': found 304 registers for 1 arrays of 64 keys, their "
        "weights and 512 columns of sums; limit: 184 registers a thread with 2 multiplying "
        "warpgroups. Instead: take 64 rows a tile, whose columns several warpgroups share",
    ),
    "keys shared by a cluster": (
        latent(1, 16, 400),
        {"cluster": 2},
        "stream-columns: loop 'part': found 2 CTAs that share keys, whose 512 columns of sums 2 "
        "warpgroups of a CTA hold apart from the rows; limit: sums, weights and rows of a tile in "
        "one warpgroup, which hands them over. Instead: take one CTA a tile",
    ),
    "one stage of keys and values at once": (
        latent(1, 128, 400, (128, 32)),
        {"stages": 1},
        "stream-stages: loop 't': found 1 stage of a tile that is keys and values; limit: 2: keys "
        "of a tile are multiplied before the values of the one before. Instead: annotate the loop "
        "with 2 stages, or 0 for as many as fit",
    ),
    "too many keys for the one that scores": (
        latent(1, 64, 400, (384, 64)),
        {"elements": 128},
        "stream-registers: scores 'scores': found 96 registers for 1 arrays of 128 keys and their "
        "weights; limit: 80 registers a thread of the warpgroup that makes them beside 2 that add. "
        "Instead: take fewer keys a tile",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    spec, tiles, text = REFUSED[name]
    with pytest.raises(LoweringRefused) as caught:
        image_of(spec, **tiles)
    assert text in str(caught.value)
