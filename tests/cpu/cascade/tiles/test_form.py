"""The tile form itself: its blocks, its trace, what is opened and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir.schedule import Trace

from cpu.cascade.small import small
from cpu.cascade.tiles.attention_forms import After, Before
from cpu.cascade.tiles.forms import found, scheduled
from cpu.cascade.tiles.masked import Masked, function
from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.tiled.tiled import tiled
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.errors import ArgumentRefused, CascadeRefused
from crossfuse.lower.tree import open_blocks
from crossfuse.schedule.planned import trace_json
from crossfuse.schedule.rules.stream import schedule_cascade_tiles
from crossfuse.workload.cascade_build import prim_func

pytestmark = pytest.mark.cpu


def loops_of(func: Any) -> list[Any]:
    found: list[Any] = []
    ir.walk(func.body, (ir.For, found.append))
    return found


def stream_of(func: Any) -> Any:
    (loop,) = [each for each in loops_of(func) if "crossfuse.stream" in each.annotations]
    return loop


def test_attention_becomes_a_stream() -> None:
    made = scheduled(Before, rows=2, elements=4).mod["main"]
    tvm.ir.assert_structural_equal(made, After)


@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        ("R1", {"rows": 4, "elements": 4, "stages": 2}),
        ("R3", {"rows": 2, "elements": 4, "cluster": 4}),
        ("R5", {"rows": 4, "elements": 16, "depth": 3}),
        ("R9", {"rows": 4, "elements": 8, "columns": 4}),
    ],
)
def test_traces_replay_from_json(name: str, tiles: dict[str, int]) -> None:
    site, derivation = found(prim_func(small(name)))
    sizes = CascadeTiles(**tiles)
    schedule = schedule_cascade_tiles(site, derivation, sizes)
    again = ir.Schedule(tiled(site, derivation, sizes))
    Trace.apply_json_to_schedule(json.loads(trace_json(schedule.trace)), again)
    tvm.ir.assert_structural_equal(again.mod, schedule.mod)
    (func,) = schedule.mod.functions.values()
    assert int(stream_of(func).annotations["crossfuse.stream"]) == tiles.get("stages", 0)
    depth = [each for each in loops_of(func) if "crossfuse.stages" in each.annotations]
    assert len(depth) == ("depth" in tiles)
    parts = [each for each in loops_of(func) if "crossfuse.cluster_axis" in each.annotations]
    assert len(parts) == 2 * ("cluster" in tiles)


def test_sizes_that_are_left_open_are_chosen() -> None:
    case = Masked(heads=2, rows=300, keys=300, depth=64, causal=True)
    func = scheduled(function(case)).mod["main"]
    bound = {
        str(each.thread_binding.thread_tag): int(each.extent)
        for each in loops_of(func)
        if each.thread_binding is not None
    }
    assert bound == {"blockIdx.x": 3, "blockIdx.y": 2}


def test_tiles_that_are_masked_for_certain_are_skipped() -> None:
    case = Masked(heads=1, rows=64, keys=64, causal=True, window=16)
    func = open_blocks(scheduled(function(case), rows=8, elements=8).mod["main"])
    place = next(
        each for each in loops_of(func) if each.thread_binding is not None and int(each.extent) == 8
    )
    known = ir.sym.Analyzer()

    def tiles(q: int) -> int:
        extent = ir.substitute(
            stream_of(func).extent,
            lambda var: tirx.const(q, "int32") if var.same_as(place.loop_var) else var,
        )
        return int(known.simplify(extent))

    # Rows 8 q to 8 q + 7 see keys from 8 q - 15 on.
    assert [tiles(q) for q in range(8)] == [1, 2, 3, 3, 3, 3, 3, 3]


def test_operands_are_staged_once() -> None:
    """Keys and values of a latent cache are one tile."""
    func = scheduled(prim_func(small("R4")), rows=2, elements=4).mod["main"]
    names: list[str] = []
    ir.walk(func.body, (ir.SBlock, lambda block: names.append(str(block.name_hint))))
    assert [each for each in names if each.endswith("_shared")] == ["q_shared", "cache_shared"]


def test_opened_blocks_leave_their_statements() -> None:
    func = scheduled(Before, rows=2, elements=4).mod["main"]
    opened = open_blocks(func)
    blocks: list[Any] = []
    ir.walk(opened.body, (ir.SBlock, blocks.append))
    root = opened.body.block
    inner = [each for each in blocks if not each.same_as(root)]
    assert all(isinstance(each.body, ir.BufferStore) for each in inner)
    assert "tile" not in {str(each.name_hint) for each in blocks}
    assert len(root.alloc_buffers) == 14
    assert open_blocks(opened).same_as(opened)


def test_a_cascade_without_products_is_refused() -> None:
    site, derivation = found(prim_func(small("R7")))
    with pytest.raises(
        CascadeRefused, match=r"cascade-tiles: function: found a cascade without products"
    ):
        tiled(site, derivation)


def test_a_single_row_is_refused() -> None:
    x, w = te.placeholder((8,), "float32", "x"), te.placeholder((5, 8), "float32", "w")
    j, k = te.reduce_axis((0, 8), "j"), te.reduce_axis((0, 8), "k")
    q = te.compute((1,), lambda _: te.sum(x[j] * x[j], axis=j), "q")
    y = te.compute(
        (5,), lambda n: te.sum(x[k] * w[n, k] / tirx.sqrt(q[0] + tirx.const(1.0)), axis=k), "y"
    )
    with pytest.raises(CascadeRefused, match="function: found results of a single row"):
        scheduled(te.create_prim_func([x, w, y]))


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (CascadeTiles(cluster=0), "tiles, cluster: found 0; limit: 1 to 16 CTAs"),
        (CascadeTiles(cluster=17), "tiles, cluster: found 17; limit: 1 to 16 CTAs"),
        (CascadeTiles(merge="l2"), "tiles, merge: found 'l2'; limit: dsm or kernel"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiles: CascadeTiles, message: str) -> None:
    site, derivation = found(prim_func(small("R3")))
    with pytest.raises(CascadeRefused, match=message):
        tiled(site, derivation, tiles)


@pytest.mark.parametrize("sizes", [{"rows": -1}, {"cluster": -1}, {"elements": 1 << 20}])
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ArgumentRefused, match="limit: a whole number of at least"):
        CascadeTiles(**sizes)


def test_rounding_of_what_nothing_scales_is_refused() -> None:
    site, derivation = found(prim_func(small("R6")))
    plain = [each for each in derivation.slots if each.monoid.name == "sum"]
    unscaled = derivation.cascade.stages[1].term.subs(derivation.cascade.stages[0].symbol, 1)
    slots = (derivation.slots[0], replace(plain[0], contribution=unscaled, carry=plain[0].symbol))
    with pytest.raises(CascadeRefused, match=r"slot product: found .*rounded to float8_e4m3fn"):
        tiled(site, replace(derivation, slots=slots), CascadeTiles(rows=4, elements=8))


def test_numbers_of_each_element_need_one_tile() -> None:
    """The probabilities of all experts, beside their logits' product."""
    x = te.placeholder((4, 6), "float16", "x")
    w = te.placeholder((10, 6), "float16", "w")
    d, j, each = (te.reduce_axis((0, n), name) for n, name in ((6, "d"), (10, "j"), (10, "each")))

    def wide(value: Any) -> Any:
        return value.astype("float32")

    logits = te.compute((4, 10), lambda i, e: te.sum(wide(x[i, d]) * wide(w[e, d]), axis=d), "z")
    m = te.compute((4,), lambda i: te.max(logits[i, j], axis=j), "m")
    s = te.compute((4,), lambda i: te.sum(tirx.exp(logits[i, each] - m[i]), axis=each), "s")
    y = te.compute((4, 10), lambda i, e: tirx.exp(logits[i, e] - m[i]) / s[i], "y")
    func = te.create_prim_func([x, w, y])
    with pytest.raises(CascadeRefused, match=r"output y: .* in 3 tiles"):
        scheduled(func, rows=4, elements=4)
    one = scheduled(func, rows=4, elements=10)

    import numpy as np

    from cpu.cascade.tiles.forms import run

    random = np.random.default_rng(0)
    given = {"x": random.standard_normal((4, 6)), "w": random.standard_normal((10, 6))}
    given = {name: value.astype(np.float16) for name, value in given.items()}
    out = run(one, given)["y"]
    exact = given["x"].astype(np.float64) @ given["w"].astype(np.float64).T
    exact = np.exp(exact - exact.max(-1, keepdims=True))
    np.testing.assert_allclose(out, exact / exact.sum(-1, keepdims=True), rtol=1e-5)
