"""One small softmax before and after; what nvcc says of streams at their real sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tvm.ir import assert_structural_equal
from tvm.script import tirx as T

from cpu.cascade.rewrite.cases import scheduled, stream_of
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.compiler.options import only_site
from crossfuse.lower.extract import lower
from crossfuse.planner.cascade.plan import ranked_cascade
from crossfuse.planner.cascade.shape import function_of
from crossfuse.runtime.nvcc import compile_cubin
from crossfuse.schedule.rules.stream import schedule_stream
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascades import parse, resolve

LOG2E = T.float32(1.4426950408889634)


@T.prim_func(s_tir=True)
def before(X: T.Buffer((3, 8), "float32"), Y: T.Buffer((3, 8), "float32")):
    T.func_attr({"tirx.noalias": True})
    m = T.sblock_alloc_buffer((3,))
    s = T.sblock_alloc_buffer((3,))
    for i, k in T.grid(3, 8):
        with T.sblock("m"):
            v_i, v_k = T.axis.remap("SR", [i, k])
            with T.init():
                m[v_i] = T.float32(-340282346638528859811704183484516925440.0)
            m[v_i] = T.max(m[v_i], X[v_i, v_k])
    for i, n in T.grid(3, 8):
        with T.sblock("s"):
            v_i, v_n = T.axis.remap("SR", [i, n])
            with T.init():
                s[v_i] = T.float32(0.0)
            s[v_i] = s[v_i] + T.exp(X[v_i, v_n] - m[v_i])
    for i, j in T.grid(3, 8):
        with T.sblock("Y"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            Y[v_i, v_j] = T.exp(X[v_i, v_j] - m[v_i]) / s[v_i]


@T.prim_func(s_tir=True)
def expected(X: T.Buffer((3, 8), "float32"), Y: T.Buffer((3, 8), "float32")):
    T.func_attr({"crossfuse.fast_exponentials": 1})
    m_segment = T.sblock_alloc_buffer((3, 1, 2))
    s_segment = T.sblock_alloc_buffer((3, 1, 2))
    m_cta = T.sblock_alloc_buffer((3,))
    s_cta = T.sblock_alloc_buffer((3,))
    for row in range(3):
        for thread in range(2):
            with T.sblock("segment"):
                row_, thread_ = T.axis.remap("SS", [row, thread])
                T.reads(X[0:3, 0:8])
                T.writes(m_segment[row_, 0, thread_], s_segment[row_, 0, thread_])
                m_so_far = T.sblock_alloc_buffer((1,), scope="local")
                s_so_far = T.sblock_alloc_buffer((1,), scope="local")
                m_next = T.sblock_alloc_buffer((1,), scope="local")
                s_next = T.sblock_alloc_buffer((1,), scope="local")
                m_usable_ = T.sblock_alloc_buffer((1,), scope="local")
                s_usable_ = T.sblock_alloc_buffer((1,), scope="local")
                X_0_tile_0 = T.sblock_alloc_buffer((1, 4), scope="local")
                m_tile_0_ = T.sblock_alloc_buffer((1,), scope="local")
                s_tile_0_ = T.sblock_alloc_buffer((1,), scope="local")
                h0_ = T.sblock_alloc_buffer((1,), scope="local")
                m_so_far[0] = T.float32("-inf")
                s_so_far[0] = T.float32(0.0)
                for step in T.unroll(1):
                    for lane in T.vectorized(4):
                        X_0_tile_0[step, lane] = X[row_, step * 8 + thread_ * 4 + lane]
                m_tile_0_[0] = T.float32("-inf")
                for step in T.unroll(1):
                    for lane in T.unroll(4):
                        m_tile_0_[0] = T.max(m_tile_0_[0], X_0_tile_0[step, lane])
                m_next[0] = m_tile_0_[0]
                m_usable_[0] = T.Select(m_next[0] == T.float32("-inf"), T.float32(0.0), m_next[0])
                s_tile_0_[0] = T.float32(0.0)
                h0_[0] = m_usable_[0] * T.float32(-1.0)
                for step in T.unroll(1):
                    for lane in T.unroll(4):
                        s_tile_0_[0] = s_tile_0_[0] + T.exp2(
                            (h0_[0] + X_0_tile_0[step, lane]) * LOG2E
                        )
                s_next[0] = s_tile_0_[0]
                s_usable_[0] = T.Select(s_next[0] == T.float32(0.0), T.float32(1.0), s_next[0])
                m_so_far[0] = m_next[0]
                s_so_far[0] = s_next[0]
                m_segment[row_, 0, thread_] = m_so_far[0]
                s_segment[row_, 0, thread_] = s_so_far[0]
        for thread in range(2):
            with T.sblock("merge"):
                row_, thread_ = T.axis.remap("SR", [row, thread])
                T.reads(m_segment[row_, 0, thread_], s_segment[row_, 0, thread_])
                T.writes(m_cta[row_], s_cta[row_])
                T.sblock_attr({"crossfuse.merge": 1})
                with T.init():
                    m_cta[row_] = T.float32("-inf")
                    s_cta[row_] = T.float32(0.0)
                m_b: T.let[T.float32] = m_segment[row_, 0, thread_]
                s_b: T.let[T.float32] = s_segment[row_, 0, thread_]
                m_new: T.let[T.float32] = T.max(m_cta[row_], m_b)
                m_guard: T.let[T.float32] = T.Select(
                    m_new == T.float32("-inf"), T.float32(0.0), m_new
                )
                s_new: T.let[T.float32] = s_cta[row_] * T.exp2(
                    (m_cta[row_] - m_guard) * LOG2E
                ) + s_b * T.exp2((m_b - m_guard) * LOG2E)
                m_cta[row_] = m_new
                s_cta[row_] = s_new
        for thread in range(2):
            with T.sblock("outputs"):
                row_, thread_ = T.axis.remap("SS", [row, thread])
                T.reads(m_cta[row_], s_cta[row_], X[row_, thread_ * 4 : thread_ * 4 + 4])
                T.writes(Y[row_, thread_ * 4 : thread_ * 4 + 4])
                m_final = T.sblock_alloc_buffer((1,), scope="local")
                m_usable = T.sblock_alloc_buffer((1,), scope="local")
                s_final = T.sblock_alloc_buffer((1,), scope="local")
                s_usable = T.sblock_alloc_buffer((1,), scope="local")
                h0_ = T.sblock_alloc_buffer((1,), scope="local")
                h1_ = T.sblock_alloc_buffer((1,), scope="local")
                X_0_again_0 = T.sblock_alloc_buffer((1, 4), scope="local")
                Y_out_0 = T.sblock_alloc_buffer((4,), scope="local")
                m_final[0] = m_cta[row_]
                m_usable[0] = T.Select(m_final[0] == T.float32("-inf"), T.float32(0.0), m_final[0])
                s_final[0] = s_cta[row_]
                s_usable[0] = T.Select(s_final[0] == T.float32(0.0), T.float32(1.0), s_final[0])
                h0_[0] = m_usable[0] * T.float32(-1.0)
                h1_[0] = T.float32(1.0) / s_usable[0]
                for step in T.unroll(1):
                    for lane in T.vectorized(4):
                        X_0_again_0[step, lane] = X[row_, step * 8 + thread_ * 4 + lane]
                for step in T.unroll(1):
                    for lane in T.unroll(4):
                        Y_out_0[lane] = h1_[0] * T.exp2((h0_[0] + X_0_again_0[step, lane]) * LOG2E)
                    for lane in T.vectorized(4):
                        Y[row_, step * 8 + thread_ * 4 + lane] = Y_out_0[lane]


def test_softmax_before_and_after() -> None:
    (site,) = detect(before)
    made = stream_of(site, StreamTiles(threads=2, unroll=1))
    assert_structural_equal(
        made.with_attr("global_symbol", "expected"), expected, map_free_vars=True
    )


#: Sizes of the packaged cascades with the tiles that were the fastest.
REAL: list[tuple[str, int, str, StreamTiles]] = [
    ("softmax", 32768, "bfloat16", StreamTiles(256, unroll=8, resident="shared")),
    ("softmax", 32768, "bfloat16", StreamTiles(256, unroll=4, cluster=2, resident="shared")),
    ("layer_norm", 8192, "bfloat16", StreamTiles(128, unroll=8, resident="registers")),
    ("inertia", 65536, "float32", StreamTiles(256, unroll=2)),
]


@pytest.mark.parametrize(("name", "length", "dtype", "tiles"), REAL)
def test_nvcc_compiles_without_spills(
    name: str, length: int, dtype: str, tiles: StreamTiles
) -> None:
    text: Any = lower(scheduled(name, 64, length, tiles, dtype)).image.cuda
    (usage,) = compile_cubin(text).resources
    assert (usage.complaints, usage.stack_bytes) == ((), 0)
    # As many CTAs as the multiprocessor's registers hold at 256 threads: two or more.
    assert usage.registers <= 128


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_elements_come_from_shared_memory_as_vectors(name: str, cluster: int) -> None:
    """16-bit elements one by one meet in banks: eight times as long as vectors."""
    tiles = StreamTiles(32, unroll=1, cluster=cluster, resident="shared")
    text: str = lower(scheduled(name, 2, 1024, tiles, "bfloat16")).image.cuda
    assert not re.search(r"\(nv_bfloat16\*\)\w+_ptr\)\[", text)
    # One CTA has an array of vectors, a cluster takes them out of a slab.
    vectors = r"extern __shared__ .* uint4 \w+\[\]|uint4 \w+ = \*\(uint4\*\)\(\(\(nv_bfloat16\*\)"
    assert re.search(vectors, text)


def test_what_outputs_load_of_a_row_comes_before_its_elements() -> None:
    """Behind what threads exchange it would cost each CTA the latency of memory."""
    (site,) = detect(function_of(parse("cross_entropy:rows=2,cols=512,grad")))
    tiles = StreamTiles(32, unroll=2, resident="registers")
    schedule = schedule_stream(streaming(site, derive(site.cascade), tiles), tiles)
    text: str = lower(schedule).image.cuda
    merged = text.index("__shfl_xor_sync")
    for name in ("labels_ptr[", "d_loss_ptr["):
        assert 0 < text.rindex(name) < merged, name


@pytest.mark.parametrize(
    ("name", "tiles", "registers"),
    [
        ("R10", StreamTiles(256, unroll=4, resident="registers"), 64),
        ("R10", None, 128),
        ("R11", None, 56),
        ("R12", None, 72),
    ],
)
def test_packaged_moments_keep_their_registers(
    name: str, tiles: StreamTiles | None, registers: int
) -> None:
    """With their first choice of tiles, and others: as many CTAs a multiprocessor as were timed."""
    site = only_site(prim_func(resolve(name)))
    derivation = derive(site.cascade)
    tiles = tiles or StreamTiles(**ranked_cascade(name)[0].tiles)
    text = lower(schedule_stream(streaming(site, derivation, tiles), tiles)).image.cuda
    (usage,) = compile_cubin(text).resources
    assert (usage.complaints, usage.stack_bytes) == ((), 0)
    assert usage.registers <= registers
