"""CTAs with tiles of rows side by side: keys and values come once for all of a cluster."""

from __future__ import annotations

from functools import cache

import pytest

from cpu.cascade.tiles.forms import scheduled
from cpu.hopper.instructions import ARRIVE, EXPECT, LEAVE
from cpu.hopper.stream.test_columns import image_of, latent, plan_of
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.errors import CascadeRefused, LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.planner.cascade.plan import ranked_cascade
from crossfuse.runtime import compile_cubin
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import check, random_inputs
from crossfuse.workload.cascades import resolve

pytestmark = pytest.mark.cpu

CASES = {
    "two, several turns": (latent(3, 128, 201), {"share": 2}),
    "four": (latent(1, 256, 130, (384, 64)), {"share": 4}),
    "two of three tiles each": (latent(1, 384, 70, (384, 64)), {"share": 3, "elements": 48}),
    "columns that fit one warpgroup": (latent(1, 256, 200, (128, 32)), {"share": 2}),
    "keys and values apart": (
        resolve("attention:batch=1,heads=2,q_len=400,kv_len=333,head_dim=64"),
        {"share": 2},
    ),
    "keys and values apart, wide": (
        resolve("attention:batch=1,heads=2,q_len=128,kv_len=100,head_dim=384"),
        {"share": 2, "elements": 32},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right_and_repeat(name: str) -> None:
    spec, tiles = CASES[name]
    given = random_inputs(spec)
    report = emulate(image_of(spec, **tiles), given, orders=3)
    report.raise_if_wrong()
    check(spec, given, report.outputs)
    for outputs in report.later:
        assert outputs["out"].tobytes() == report.outputs["out"].tobytes()


@pytest.mark.slow
def test_each_cta_loads_its_part() -> None:
    plan = plan_of(resolve("R4"), share=2)
    assert (plan.cluster_size, plan.clusters, plan.stages) == (2, 64, 2)
    assert plan.keys.map.box == (64, 32, 1)
    assert plan.readers == (2, 4, 4)


def test_two_tiles_of_latent_vectors_share_them() -> None:
    def shares(text: str) -> list[int]:
        return [int(each.tiles["share"]) for each in ranked_cascade(text, only=("tiles",))]

    assert shares("R4")[:2] == [2, 1]
    assert set(shares("R4:q_heads=64")) == {1}
    assert set(shares("R1")) == {1}


def test_nothing_spills() -> None:
    image = lower(scheduled(prim_func(resolve("R4")), share=2)).image
    for usage in compile_cubin(image.cuda).resources:
        assert not usage.complaints, usage
        assert not usage.spill_store_bytes, usage


CASE = latent(2, 128, 330, (384, 64))
REMOTE = r"tvm_builtin_ptx_mbarrier_arrive\w*cluster\w*"
MULTICAST = r"tvm_builtin_ptx_cp_async_bulk_tensor\w*multicast\w*"


@cache
def right() -> KernelImage:
    return image_of(CASE, share=2)


FAULTS = {
    "barriers reached before they are set up": lambda: drop_call(right(), LEAVE, 0),
    "a CTA that is gone when peers hand stages back": lambda: drop_call(
        drop_call(right(), ARRIVE, -1), LEAVE, -1
    ),
    "a CTA that does not leave": lambda: drop_call(right(), ARRIVE, -1),
    "a stage never handed back": lambda: drop_call(right(), REMOTE, 0),
    "a part that nobody else gets": lambda: change_argument(right(), MULTICAST, -1, "(ushort)1"),
    "the part of the peer not waited for": lambda: change_argument(
        right(), EXPECT, 1, "{} / 2u", 1
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name: str) -> None:
    assert emulate(FAULTS[name](), random_inputs(CASE), orders=3).findings


REFUSED = {
    "streams of other lengths": (
        resolve("attention:batch=1,heads=2,q_len=256,kv_len=256,head_dim=64,causal=true"),
        {"share": 2},
        "stream: loop 't': found a stream in a cluster; limit: loops over the grid alone, one loop "
        "over CTAs that go through the same keys and values, or two nests over a cluster",
    ),
    "parts that end in a pattern": (
        latent(1, 256, 100, (384, 64)),
        {"share": 4, "elements": 16},
        "found 16 keys a tile, of which 4 CTAs load a part each; limit: parts of a multiple of 8 "
        "keys, the repeat of the swizzle. Instead: take other numbers of keys, or of CTAs side by "
        "side (CascadeTiles.share)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    spec, tiles, text = REFUSED[name]
    with pytest.raises(LoweringRefused) as caught:
        image_of(spec, **tiles)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        ({"share": 3}, "found 3; limit: a divisor of the 2 tiles of rows up to 16"),
        ({"share": 2, "cluster": 2}, "or 1 beside a cluster. Instead: pass a divisor, or share=1"),
    ],
)
def test_tiles_that_do_not_divide(tiles: dict[str, int], text: str) -> None:
    with pytest.raises(CascadeRefused) as caught:
        image_of(latent(1, 128, 100), **tiles)
    assert text in str(caught.value)
