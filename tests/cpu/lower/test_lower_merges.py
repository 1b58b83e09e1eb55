"""Merges of tuples over threads, on blocks written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from cpu.lower.support import apply
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.lower_merges import lower_merges
from crossfuse.markers import MERGE, MERGED, marked_blocks
from crossfuse.schedule.rules.stream import schedule_stream


def sums(threads: int, rows: int = 1, tag: str = "threadIdx.x") -> Any:
    """The last number and the sum of numbers, each times the last of those before it.

    No commutative operator: the order of the two sides of every pair shows.
    """

    @T.prim_func(s_tir=True)
    def function(
        A: T.Buffer((4, threads), "float32"),
        B: T.Buffer((4, threads), "float32"),
        C: T.Buffer((4,), "float32"),
        D: T.Buffer((4,), "float32"),
    ):
        last = T.sblock_alloc_buffer((4,), scope="local")
        total = T.sblock_alloc_buffer((4,), scope="local")
        for r in T.thread_binding(4 // rows, thread="blockIdx.x"):
            for y in T.thread_binding(rows, thread="threadIdx.y"):
                for t in T.thread_binding(threads, thread=tag):
                    with T.sblock("merge"):
                        vr = T.axis.spatial(4, r * rows + y)
                        vt = T.axis.reduce(threads, t)
                        T.reads(A[vr, vt], B[vr, vt])
                        T.writes(last[vr], total[vr])
                        T.sblock_attr({MERGE: 1})
                        with T.init():
                            last[vr] = T.float32(1)
                            total[vr] = T.float32(0)
                        a: T.let[T.float32] = A[vr, vt]
                        b: T.let[T.float32] = B[vr, vt]
                        scaled: T.let[T.float32] = last[vr] * b
                        both: T.let[T.float32] = total[vr] + scaled
                        last[vr] = last[vr] * a
                        total[vr] = both
                for t in T.thread_binding(threads, thread="threadIdx.x"):
                    with T.sblock("store"):
                        vr = T.axis.spatial(4, r * rows + y)
                        vt = T.axis.spatial(threads, t)
                        T.where(t == 0)
                        C[vr] = last[vr]
                        D[vr] = total[vr]

    return function


@pytest.mark.parametrize(("threads", "rows"), [(1, 1), (2, 2), (16, 4), (32, 2), (64, 2), (512, 1)])
def test_every_number_of_threads(threads: int, rows: int) -> None:
    """Compositions of affine maps, whose order must stay; products of numbers near 1."""
    random = np.random.default_rng(threads)
    a = (1 + 0.1 * random.standard_normal((4, threads))).astype("float32")
    b = random.standard_normal((4, threads)).astype("float32")
    function = sums(threads, rows)
    report = emulate(lower(function).image, {"A": a, "B": b})
    assert report.ok, "\n".join(map(str, report.findings))
    before = np.cumprod(np.concatenate([np.ones((4, 1)), a[:, :-1]], axis=1), axis=1)
    np.testing.assert_allclose(report.outputs["C"], np.prod(a.astype("float64"), axis=1), rtol=1e-4)
    np.testing.assert_allclose(report.outputs["D"], (before * b).sum(axis=1), rtol=1e-3, atol=1e-4)
    sequential = run_sequential(function, {"A": a, "B": b}).outputs
    np.testing.assert_allclose(report.outputs["D"], sequential["D"], rtol=1e-3, atol=1e-4)


def test_one_number_of_several_warps() -> None:
    """Such as the sum of squares of a norm: one store into shared memory is no list of them."""

    @T.prim_func(s_tir=True)
    def squares(x: T.Buffer((2, 256), "float32"), s: T.Buffer((2,), "float32")):
        for i, k in T.grid(2, 256):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    s[vi] = T.float32(0)
                s[vi] = s[vi] + x[vi, vk] * x[vi, vk]

    tiles = StreamTiles(threads=64)
    (site,) = detect(squares)
    derivation = derive(site.cascade)
    assert len(derivation.slots) == 1
    x = np.random.default_rng(0).standard_normal((2, 256)).astype("float32")
    scheduled = schedule_stream(streaming(site, derivation, tiles), tiles)
    report = emulate(lower(scheduled).image, {"x": x})
    assert report.ok, "\n".join(map(str, report.findings))
    np.testing.assert_allclose(report.outputs["s"], (x.astype("float64") ** 2).sum(1), rtol=1e-5)


def test_shuffles_and_shared_memory() -> None:
    """Five exchanges of two numbers in a warp, one between two warps, one barrier."""
    lowered = lower(sums(64))
    text = lowered.image.cuda
    assert text.count("__shfl_xor_sync") == 12
    assert text.count(", 16, 32)") == 2 and text.count("__syncthreads()") == 1
    (block,) = marked_blocks(apply(lower_merges, sums(64)), MERGED)
    assert [each.name for each in block.alloc_buffers if each.scope() == "shared"] == [
        "last_warps",
        "total_warps",
    ]


def test_functions_without_merges_stay() -> None:
    @T.prim_func(s_tir=True)
    def function(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("copy"):
                v = T.axis.spatial(4, i)
                B[v] = A[v]

    assert apply(lower_merges, function).same_as(function)


def test_threads_that_are_no_power_of_two() -> None:
    with pytest.raises(LoweringRefused, match=r"block 'merge': found 48 threads along threadIdx.x"):
        lower(sums(48))


def test_a_block_of_another_form() -> None:
    @T.prim_func(s_tir=True)
    def function(A: T.Buffer((32,), "float32"), C: T.Buffer((1,), "float32")):
        for t in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("merge"):
                v = T.axis.reduce(32, t)
                T.sblock_attr({MERGE: 1})
                with T.init():
                    C[0] = T.float32(0)
                C[0] = C[0] + A[v]

    with pytest.raises(LoweringRefused) as caught:
        lower(function)
    assert str(caught.value) == (
        "merge: block 'merge': found 1 statements, 1 stores among them, and 1 reduced "
        "iterators; limit: bindings of as many loads as there are stores, bindings and stores to "
        "buffers of the block, then the stores; one iterator that is reduced. "
        "Instead: leave the block as the rewriting made it."
    )
