"""Tiles of keys that no row sees are passed by: by whoever loads and whoever multiplies alike."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from cpu.cascade.tiles.forms import scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs, reference
from cpu.hopper.attention import products
from cpu.hopper.stream.test_stream_split import SMALL, judge
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.emulate.cuda import change_argument, emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.stream.recover.function import recover_streams
from crossfuse.lower.hopper.stream.seen_keys import seen_keys
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin

pytestmark = pytest.mark.cpu

#: Four tokens of two sequences, and one of heads that share keys.
FEW = Masked(heads=2, rows=4, keys=416, depth=64, padding=True, apart=True)
ONE = Masked(heads=8, share=4, rows=1, keys=416, depth=64, padding=True)
DSM = {"elements": 32, "merge": "dsm"}
CASES = {
    "alone": (FEW, {"elements": 32}),
    "one token": (ONE, DSM | {"cluster": 4}),
    "more tiles than a word has bits": (replace(FEW, keys=1300, depth=16), {"elements": 32}),
    "several words": (replace(FEW, keys=1300, depth=16), {"elements": 128}),
    "tiles that are no whole words": (FEW, {"elements": 48}),
    "keys before": (replace(ONE, shift=40), {"elements": 32}),
    "two CTAs": (FEW, DSM | {"cluster": 2}),
    "three": (FEW, DSM | {"cluster": 3}),
    "four": (FEW, DSM | {"cluster": 4}),
    "eight": (FEW, DSM | {"cluster": 8}),
    "sixteen, some with fewer tiles": (replace(FEW, keys=1060, depth=16), DSM | {"cluster": 16}),
    "a second kernel": (FEW, {"elements": 32, "cluster": 4, "merge": "kernel"}),
    "rows, causal, beside a table": (
        Masked(rows=70, keys=230, depth=16, table=True, padding=True, causal=True),
        {"elements": 32},
    ),
    "soft caps and slopes": (replace(FEW, cap=20.0, alibi=True), {"elements": 32}),
    "hidden by a number": (replace(FEW, hidden=-65536.0), {"elements": 32}),
    "hidden, one token, four CTAs": (
        replace(ONE, hidden=float(np.finfo(np.float32).min)),
        DSM | {"cluster": 4},
    ),
    "hidden, lengths": (replace(FEW, hidden=-65536.0, lengths=True), DSM | {"cluster": 3}),
    "hidden, a second kernel": (
        replace(FEW, hidden=-65536.0),
        {"elements": 32, "cluster": 4, "merge": "kernel"},
    ),
    "columns shared": (
        Masked(heads=2, rows=64, keys=160, depth=384, padding=True, apart=True),
        {"elements": 32},
    ),
    "columns shared, CTAs that load for each other": (
        Masked(heads=1, rows=128, keys=160, depth=384, padding=True),
        {"elements": 32, "share": 2},
    ),
}


def masks(case: Masked, tile: int) -> dict[str, np.ndarray]:
    """Which keys are seen."""
    shape = case.shapes["filled"][0]
    key = np.broadcast_to(np.arange(case.keys), shape)
    found = {
        "none": key < 0,
        "all": key >= 0,
        "a prefix": key < case.keys // 2,
        "a suffix": key >= case.keys - 70,
        "every third tile": key // tile % 3 == 1,
        "the last key": key == case.keys - 1,
        "some of all tiles": key % 3 == 0,
    }
    if case.apart:
        heads = np.arange(shape[0])[:, None]
        found["one of two"] = np.broadcast_to(heads % 2 == 0, shape)
        found["a part of the other one"] = (key < 100) & (heads % 2 == 1)
    return {name: np.ascontiguousarray(each) for name, each in found.items()}


def kernel(case: Masked, tiles: dict[str, Any]) -> KernelImage:
    return lower(scheduled(function(case), rows=64, **tiles), SMALL).image


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right(name: str) -> None:
    case, tiles = CASES[name]
    image = kernel(case, tiles)
    assert "crossfuse_lowest" in image.cuda
    for filled in masks(case, tiles["elements"]).values():
        judge(case, image, inputs(case) | {"filled": filled})


@cache
def right() -> KernelImage:
    """Thirteen tiles, of two CTAs in turn."""
    return kernel(FEW, DSM | {"cluster": 2})


def test_what_is_passed_by_is_not_multiplied() -> None:
    # What is masked may be anything; but for the first tile of each CTA nobody looks at it.
    seen = np.zeros((2, FEW.keys), bool)
    seen[:, 100:200] = True
    given = inputs(FEW) | {"filled": seen}
    whole = emulate(right(), given, orders=1).outputs["out"]
    unseen = np.repeat(~seen.reshape(2, -1, 32).any(-1), 32, -1)  # tiles without any
    unseen[:, : 2 * 32] = False
    for each in "kv":
        given[each] = np.where(unseen[..., None], np.nan, given[each]).astype(given[each].dtype)
    report = emulate(right(), given, orders=2)
    report.raise_if_wrong()
    assert report.outputs["out"].tobytes() == whole.tobytes()


VOTE = "crossfuse_vote"
#: Votes of a role on tiles, and those of all loading roles.
TILES, LOADING = 6, 12

FAULTS = {
    "keys of a tile that nobody multiplies": (1, "true", "wrong result"),
    "no keys of a tile that is multiplied": (0, "false", "deadlock"),
    "values of a tile that nobody multiplies": (TILES + 1, "true", "wrong result"),
    "no values of a tile that is multiplied": (TILES, "false", "deadlock"),
    "a tile that nobody loads": (LOADING + 1, "true", "deadlock"),
    "a tile that nobody multiplies": (LOADING, "false", "wrong result"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_roles_that_disagree_are_caught(name: str) -> None:
    index, by, kind = FAULTS[name]
    seen = np.zeros((2, FEW.keys), bool)
    seen[:, 64:128] = seen[:, 320:] = True  # of each CTA its second tile, not its third one
    given = inputs(FEW) | {"filled": seen}
    wrong = change_argument(right(), VOTE, 0, by, index)
    if kind == "wrong result":
        with pytest.raises(AssertionError):
            judge(FEW, wrong, given)
        return
    assert kind in {each.kind for each in emulate(wrong, given, orders=2).findings}


@pytest.mark.parametrize("cluster", [1, 4])
def test_nothing_spills(cluster: int) -> None:
    case = replace(FEW, keys=4096, depth=128)
    tiles = {"elements": 128, "cluster": cluster}
    for usage in compile_cubin(kernel(case, tiles).cuda).resources:
        assert not usage.complaints, usage


# A stream in the kernel of the product behind it.

BESIDE = Masked(heads=2, share=2, rows=4, keys=224, depth=64, padding=True)


def with_product() -> Any:
    """Attention of one sequence, and a product of what its heads make side by side."""
    heads, rows, keys, depth = BESIDE.heads, BESIDE.rows, BESIDE.keys, BESIDE.depth
    q = te.placeholder((1, heads, rows, depth), "bfloat16", "q")
    k, v = (te.placeholder((1, 1, keys, depth), "bfloat16", name) for name in "kv")
    weight = te.placeholder((64, heads * depth), "bfloat16", "weight")
    filled = te.placeholder((keys,), "bool", "filled")
    lengths = {"d": depth, "j": keys, "e": keys, "o": keys, "c": heads * depth}
    d, j, e, o, c = (te.reduce_axis((0, n), name) for name, n in lengths.items())

    def wide(value: Any) -> Any:
        return value.astype("float32")

    def masked(b: Any, h: Any, i: Any, key: Any) -> Any:
        return tirx.Select(filled[key], scores[b, h, i, key] * f32(BESIDE.scale), f32(-np.inf))

    def score(b: Any, h: Any, i: Any, key: Any) -> Any:
        return te.sum(wide(q[b, h, i, d]) * wide(k[b, 0, key, d]), axis=d)

    def value(b: Any, h: Any, i: Any, n: Any) -> Any:
        return te.sum(wide(half[b, h, i, o]) * wide(v[b, 0, o, n]), axis=o)

    scores = te.compute((1, heads, rows, keys), score, "scores")
    x = te.compute(scores.shape, masked, "x")
    m = te.compute(x.shape[:3], lambda *at: te.max(x[(*at, j)], axis=j), "m")
    p = te.compute(x.shape, lambda *at: tirx.exp(x(*at) - m(*at[:3])), "p")
    s = te.compute(m.shape, lambda *at: te.sum(p[(*at, e)], axis=e), "s")
    half = te.compute(p.shape, lambda *at: p(*at).astype("bfloat16"), "half")
    total = te.compute(q.shape, value, "total")
    made = te.compute(q.shape, lambda *at: (total(*at) / s(*at[:3])).astype("bfloat16"), "made")
    beside = te.compute(
        (rows, heads * depth), lambda i, n: made[0, n // depth, i, n % depth], "beside"
    )
    y = te.compute(
        (rows, 64), lambda i, n: te.sum(wide(beside[i, c]) * wide(weight[n, c]), axis=c), "y"
    )
    out = te.compute(y.shape, lambda *at: y(*at).astype("bfloat16"), "out")
    return te.create_prim_func([q, k, v, weight, filled, out])


@pytest.mark.parametrize("cluster", [1, 2])
def test_beside_a_product(cluster: int) -> None:
    tiles = CascadeTiles(rows=64, elements=32, cluster=cluster, merge="dsm")
    schedule = products.scheduled(with_product(), tiles, cluster=cluster)
    image = lower(schedule, replace(SMALL, sms=8)).image
    assert "crossfuse_lowest" in image.cuda
    given = inputs(BESIDE)
    weight = np.random.default_rng(1).standard_normal((64, 128)).astype(given["q"].dtype)
    for name, filled in masks(BESIDE, 32).items():
        given["filled"] = filled
        given_ = {each: given[each][None] for each in "qkv"}
        report = emulate(image, given_ | {"weight": weight, "filled": filled}, orders=2)
        report.raise_if_wrong()
        found = report.outputs["out"]
        assert all(each["out"].tobytes() == found.tobytes() for each in report.later)
        exact, separate = (
            np.concatenate([*reference(BESIDE, given, each)], -1) @ weight.astype(np.float64).T
            for each in (np.float64, np.float32)
        )
        separate = separate.astype(weight.dtype).astype(np.float64)
        error = np.linalg.norm(found.astype(np.float64) - exact)
        assert error <= 2 * np.linalg.norm(separate - exact) + 1e-30, name


# Which masks there are such tiles of.


def seen_of(function_: Any, **tiles: Any) -> str | None:
    sizes = {"rows": 64, "elements": 32} | tiles
    (program,) = recover_streams(scheduled(function_, **sizes).mod["main"])
    seen = seen_keys(program)
    return None if seen is None else f"{seen.flag}{', if any' * seen.needs_some}"


def test_keys_are_seen_where_masks_of_keys_say_so() -> None:
    said = seen_of(function(FEW))
    assert said is not None and re.fullmatch(r"filled\[.*, t \* 32 \+ key\]", said)
    assert seen_of(function(ONE)) == "filled[t * 32 + key]"
    beside = Masked(rows=70, keys=230, depth=16, table=True, padding=True, causal=True)
    assert seen_of(function(beside)) == "filled[t * 32 + key]"


LENGTHS = {"q": 4, "k": 96, "v": 96}
AXES = {"d": 64, "j": 96, "e": 96, "o": 96}


def masked_by(put: Any) -> Any:
    """Attention of one head whose scores `put` changes, given a tensor of flags and a key."""
    q, k, v = (te.placeholder((1, n, 64), "bfloat16", name) for name, n in LENGTHS.items())
    flags = te.placeholder((96,), "bool", "flags")
    d, j, e, o = (te.reduce_axis((0, n), name) for name, n in AXES.items())

    def wide(value: Any) -> Any:
        return value.astype("float32")

    scores = te.compute(
        (1, 4, 96),
        lambda h, i, key: te.sum(wide(q[h, i, d]) * wide(k[h, key, d]), axis=d),
        "scores",
    )
    x = te.compute((1, 4, 96), lambda h, i, key: put(scores[h, i, key], flags, key), "x")
    m = te.compute((1, 4), lambda h, i: te.max(x[h, i, j], axis=j), "m")
    p = te.compute((1, 4, 96), lambda h, i, key: tirx.exp(x[h, i, key] - m[h, i]), "p")
    s = te.compute((1, 4), lambda h, i: te.sum(p[h, i, e], axis=e), "s")
    half = te.compute(p.shape, lambda *at: p(*at).astype("bfloat16"), "half")
    total = te.compute(
        (1, 4, 64), lambda h, i, c: te.sum(wide(half[h, i, o]) * wide(v[h, o, c]), axis=o), "total"
    )
    out = te.compute(
        (1, 4, 64), lambda h, i, c: (total[h, i, c] / s[h, i]).astype("bfloat16"), "out"
    )
    return te.create_prim_func([q, k, v, flags, out])


def f32(value: float) -> Any:
    return tirx.const(value, "float32")


FORMS = {
    "chosen": (
        lambda x, flags, key: tirx.Select(flags[key], x, f32(-np.inf)),
        "flags[t * 32 + key]",
    ),
    "left out": (
        lambda x, flags, key: tirx.Select(flags[key], f32(-np.inf), x),
        "not flags[t * 32 + key]",
    ),
    "added": (
        lambda x, flags, key: x * f32(0.125) + tirx.Select(flags[key], f32(0), f32(-np.inf)),
        "flags[t * 32 + key]",
    ),
    "a large number": (lambda x, flags, key: tirx.Select(flags[key], x, f32(-1e4)), None),
    "added, as cuDNN does": (
        lambda x, flags, key: x + tirx.Select(flags[key], f32(0), f32(-65536)),
        "flags[t * 32 + key], if any",
    ),
    "the least number": (
        lambda x, flags, key: tirx.Select(flags[key], x, f32(np.finfo(np.float32).min)),
        "flags[t * 32 + key], if any",
    ),
    "added before scaling": (
        lambda x, flags, key: (x + tirx.Select(flags[key], f32(0), f32(-65536))) * f32(0.125),
        None,
    ),
    "added, not masked": (lambda x, flags, key: x + tirx.Select(flags[key], f32(0), f32(2)), None),
    "none": (lambda x, flags, key: x, None),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_masks(name: str) -> None:
    put, said = FORMS[name]
    assert seen_of(masked_by(put)) == said


OTHERS = {
    "causal": {"causal": True},
    "a window": {"window": 50},
    "documents": {"documents": True},
    "a table": {"table": True},
    "a bias": {"bias": True},
}


@pytest.mark.parametrize("other", OTHERS)
def test_rows_that_see_no_key_for_another_reason_weigh_what_is_masked(other: str) -> None:
    """A key that is seen by flags alone says nothing of a row that another mask keeps from it."""
    case = Masked(rows=6, keys=230, depth=64, padding=True, hidden=-65536.0, **OTHERS[other])
    assert seen_of(function(case)) is None
    assert seen_of(function(replace(case, hidden=-np.inf))) is not None
    image = kernel(case, {"elements": 32})
    for shown in (slice(0, 0), slice(225, 230), slice(100, 130)):
        given = inputs(case)
        given["filled"][:] = False
        given["filled"][shown] = True
        judge(case, image, given)


def test_slopes_and_caps_leave_rows_alike() -> None:
    alike = replace(FEW, hidden=-65536.0, cap=20.0, alibi=True)
    assert seen_of(function(alike)) == "filled[i0_fused, t * 32 + key], if any"


def test_other_streams_go_through_all_tiles() -> None:
    table = Masked(rows=4, keys=96, depth=64, table=True)  # of rows and keys
    assert seen_of(function(table)) is None
    assert seen_of(function(replace(FEW, padding=False))) is None
    assert seen_of(function(replace(FEW, keys=32))) is None  # one tile
    many = Masked(heads=1, rows=128, keys=96, depth=64, padding=True)
    assert seen_of(function(many), rows=128) is None
    assert "crossfuse_lowest" not in lower(scheduled(function(table), rows=64)).image.cuda


def test_tiles_are_dealt_out_where_some_may_be_passed_by() -> None:
    def first(case: Masked) -> str:
        (program,) = recover_streams(
            scheduled(function(case), rows=64, **DSM, cluster=4).mod["main"]
        )
        return str(program.keys.origin[-2])

    assert first(FEW) == "t * 128 + part * 32"
    assert first(replace(FEW, padding=False)) == "part * 128 + t * 32"
