"""Streams of few rows, whose warps multiply keys of their own: in the emulator, and as planned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cpu.cascade.tiles.forms import scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs
from cpu.hopper.instructions import EXPECT, LEAVE, PUSH, RECEIVED
from cpu.hopper.stream.test_stream_split import SMALL, judge
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.generate import plans_of
from crossfuse.lower.hopper.stream.warps import WarpPlan
from crossfuse.lower.image import KernelImage
from crossfuse.planner.cascade.plan import plan_cascade, ranked_cascade
from crossfuse.runtime import compile_cubin

pytestmark = pytest.mark.cpu

#: One token of heads that share keys, as a decoder has it.
ONE = Masked(heads=4, share=4, rows=1, keys=333, depth=64)
PADDED = replace(ONE, padding=True)
CASES = {
    "two heads of keys": (replace(ONE, heads=8), {"elements": 64}),
    "words of flags, a part of a tile": (PADDED, {"elements": 128}),
    "half a word": (PADDED, {"elements": 64}),
    "eight warps": (replace(PADDED, keys=700), {"elements": 256}),
    "flags of keys before, which the first do not have": (
        replace(PADDED, shift=5),
        {"elements": 64},
    ),
    "eight heads a group": (replace(PADDED, heads=8, share=8), {"elements": 64}),
    "twelve, in two fragments": (
        replace(PADDED, heads=12, share=12, alibi=True, cap=20.0),
        {"rows": 16, "elements": 64, "cluster": 2},
    ),
    "rows of 128": (replace(PADDED, depth=128), {"elements": 128, "cluster": 2}),
    "rows of 192, half precision": (
        replace(ONE, depth=192, dtype="float16"),
        {"elements": 64},
    ),
    "several tokens, causal, beside a table": (
        Masked(heads=2, rows=13, keys=150, depth=64, table=True, padding=True, causal=True),
        {"elements": 64},
    ),
    "a window": (Masked(heads=1, rows=9, keys=300, depth=64, window=70), {"elements": 64}),
    "lengths": (replace(ONE, lengths=True), {"elements": 64, "cluster": 4}),
    "a bias": (replace(PADDED, bias=True), {"elements": 64}),
    **{
        f"{cluster} CTAs": (replace(PADDED, keys=1100), {"elements": 64, "cluster": cluster})
        for cluster in (2, 3, 4, 8, 9, 16)
    },
    "fewer keys than CTAs have tiles": (replace(ONE, keys=9), {"elements": 64, "cluster": 8}),
}


def kernel(case: Masked, **tiles: int) -> KernelImage:
    return lower(scheduled(function(case), **{"rows": 8, **tiles}), SMALL).image


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right_and_repeat(name: str) -> None:
    case, tiles = CASES[name]
    image, given = kernel(case, **tiles), inputs(case)
    keys = np.arange(case.keys)
    # Of tiles some keys, the first ones, or none at all.
    masks = (keys % 3 > 0, keys < 70, keys < 0) if case.padding else (keys >= 0,)
    for filled in masks:
        judge(case, image, given | {"filled": filled} if case.padding else given)


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_scores_far_from_zero(far: float) -> None:
    given = inputs(ONE)
    given["k"][:] = (given["k"].astype(np.float32) * 1e-2 + 1).astype(given["k"].dtype)
    given["q"][:] = np.sign(far) * abs(far) / ONE.depth
    judge(ONE, kernel(ONE, elements=64), given)


def test_the_last_value_may_be_infinite() -> None:
    """Tiles reach beyond the keys: what they find there is zero, and not another key."""
    given = inputs(ONE)
    given["v"][0, -1, 5] = np.inf
    report = emulate(kernel(ONE, elements=64), given, orders=1)
    report.raise_if_wrong()
    found = report.outputs["out"].astype(np.float32)
    assert np.isposinf(found[..., 5]).all()
    assert np.isfinite(np.delete(found, 5, axis=-1)).all()


@cache
def right() -> KernelImage:
    return kernel(PADDED, elements=64, cluster=2)


MEET = "tvm_builtin_cuda_cta_sync"
FAULTS = {
    "maxima that are read before all have them": (lambda: drop_call(right(), MEET, 0), "race"),
    "sums that are read before all have them": (lambda: drop_call(right(), MEET, -1), "race"),
    "states that are read before they are there": (
        lambda: drop_call(right(), RECEIVED),
        "uninitialised-read",
    ),
    "bytes that nobody announces": (lambda: drop_call(right(), EXPECT), "deadlock"),
    "a state in another one's place": (
        lambda: change_argument(right(), PUSH, 0, "{} + 8u", 1),
        "async-race",
    ),
    "peers that may not have begun": (lambda: drop_call(right(), LEAVE), "mbarrier"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name: str) -> None:
    plant, kind = FAULTS[name]
    findings = emulate(plant(), inputs(PADDED), orders=3).findings
    assert any(kind in each.kind for each in findings), findings


@pytest.mark.parametrize(
    ("depth", "tiles"),
    [(64, {"elements": 256}), (64, {"elements": 128, "cluster": 4}), (128, {"elements": 256})],
)
def test_nothing_spills(depth: int, tiles: dict[str, int]) -> None:
    case = replace(PADDED, heads=64, keys=4096, depth=depth)
    image = lower(scheduled(function(case), rows=8, **tiles)).image
    for usage in compile_cubin(image.cuda).resources:
        assert not usage.complaints, usage
        assert not usage.spill_store_bytes, usage


@pytest.mark.parametrize(
    ("case", "tiles", "found"),
    [
        (replace(ONE, depth=80), {}, "found keys of 80 and values of 80 elements"),
        (ONE, {"elements": 48}, "found tiles of 48 keys"),
        (ONE, {"elements": 2}, "found tiles of 2 keys"),
        (ONE, {"elements": 512}, "found 16 warps for tiles of 512 keys"),
        (replace(ONE, depth=256), {"elements": 128}, "registers a thread"),
        (ONE, {"cluster": 2, "merge": "kernel"}, "later, than the keys of a cluster"),
    ],
)
def test_what_warps_do_not_hold_is_refused(case: Masked, tiles: dict[str, int], found: str) -> None:
    with pytest.raises(LoweringRefused) as caught:
        lower(scheduled(function(case), **{"rows": 8, "elements": 64, **tiles}))
    assert "limit: tiles of 8 or 16 rows and 64, 128 or 256 keys" in str(caught.value)
    assert found in str(caught.value)


DECODE = "attention:batch=16,heads=32,kv_heads=8,q_len=1,kv_len=1024,head_dim={}"


def test_the_planner_takes_warps_for_few_rows() -> None:
    assert plan_cascade(DECODE.format(64), "nvidia-h200").family == "warps"
    assert plan_cascade(DECODE.format(80), "nvidia-h200").family == "tiles"
    many = DECODE.format(64).replace("q_len=1", "q_len=32")
    assert plan_cascade(many, "nvidia-h200").family == "tiles"


def test_plans_say_what_is_lowered() -> None:
    (best, *_) = ranked_cascade(DECODE.format(128), "nvidia-h200", only=("warps",))
    case = Masked(heads=512, share=4, rows=1, keys=1024, depth=128)
    sizes = {name: int(best.tiles[name]) for name in ("rows", "elements", "cluster")}
    (plan,) = plans_of(scheduled(function(case), **sizes).mod["main"], SMALL)
    assert isinstance(plan, WarpPlan)
    assert best.taken is not None
    assert (plan.clusters * plan.cluster_size, plan.threads, plan.resident) == (
        best.taken.ctas,
        best.taken.threads,
        best.taken.side,
    )
