"""Schedules off the beaten track that must lower to right kernels."""

from __future__ import annotations

import pytest
from tvm.script import tirx as T

from cpu.lower.kernels import chain
from cpu.lower.support import after, barriers, checked, kernels_in
from cpu.macros import X, Y, Z
from crossfuse.lower.extract import lower


@pytest.mark.parametrize("threads", [16, 32, 64])
def test_reduction_over_threads_inside_a_nest(threads: int) -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((2, 4, 3 * threads), "float32"), B: T.Buffer((2, 4), "float32")):
        P = T.sblock_alloc_buffer((4, 1), "float32", scope="shared.dsm")
        for b in T.thread_binding(2, thread="blockIdx.x"):
            for c in T.parallel(4, annotations=X):
                for k in range(3):
                    for t in T.thread_binding(threads, thread="threadIdx.x"):
                        with T.sblock("total"):
                            vb, vc = T.axis.remap("SS", [b, c])
                            vk = T.axis.reduce(3 * threads, k * threads + t)
                            with T.init():
                                P[vc, 0] = T.float32(0)
                            P[vc, 0] = P[vc, 0] + A[vb, vc, vk]
            for z in T.parallel(4, annotations=X):
                for t in T.thread_binding(threads, thread="threadIdx.x"):
                    with T.sblock("read"):
                        T.where(t == 0)
                        vb, vz = T.axis.remap("SS", [b, z])
                        B[vb, vz] = P[3 - vz, 0]

    lowered = checked(func, tolerance=1e-4)
    assert barriers(lowered.image) == 2


def test_last_rank_with_less_work() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 32), "float32"), B: T.Buffer((100,), "float32")):
        P = T.sblock_alloc_buffer((4, 32), "float32", scope="shared.dsm")
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    P[vc, vt] = A[vc, vt]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("read"):
                    T.where(z * 32 + t < 100)
                    v = T.axis.spatial(100, z * 32 + t)
                    B[v] = P[(v // 32 + 1) % 4, v % 32]

    checked(func)


def test_cluster_loop_that_starts_elsewhere() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
        P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
        for c in T.parallel(3, 7, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vc, vt = T.axis.spatial(4, c - 3), T.axis.spatial(8, t)
                    P[vc, vt] = A[vc, vt]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("read"):
                    vz, vt = T.axis.remap("SS", [z, t])
                    B[vz, vt] = P[3 - vz, vt]

    checked(func)


def test_indices_of_64_bits() -> None:
    four, eight = T.int64(4), T.int64(8)

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((four, eight), "float32"), B: T.Buffer((four, eight), "float32")):
        P = T.sblock_alloc_buffer((four, eight), "float32", scope="shared.dsm")
        for c in T.parallel(four, annotations=X):
            for t in T.thread_binding(eight, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    P[vc, vt] = A[vc, vt]
        for z in T.parallel(four, annotations=X):
            for t in T.thread_binding(eight, thread="threadIdx.x"):
                with T.sblock("read"):
                    vz, vt = T.axis.remap("SS", [z, t])
                    B[vz, vt] = P[T.int64(3) - vz, vt]

    checked(func)


def test_three_axes_of_one_cta_each_need_no_barrier() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
        P = T.sblock_alloc_buffer((1, 8), "float32", scope="shared.dsm")
        for x in T.parallel(1, annotations=X):
            for y in T.parallel(1, annotations=Y):
                for z in T.parallel(1, annotations=Z):
                    for t in T.thread_binding(8, thread="threadIdx.x"):
                        with T.sblock("fill"):
                            vx, vt = T.axis.spatial(1, x + y + z), T.axis.spatial(8, t)
                            P[vx, vt] = A[vt]
        for x in T.parallel(1, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("read"):
                    vx, vt = T.axis.remap("SS", [x, t])
                    B[vt] = P[(vx + 1) % 1, 7 - vt]

    lowered = checked(func)
    assert barriers(lowered.image) == 0
    assert lowered.image.launches[0].cluster == (1, 1, 1)


def test_slab_of_one_element_and_a_condition_on_a_remote_value() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((2, 4), "float32"), B: T.Buffer((2, 4), "float32")):
        P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
        for b in T.thread_binding(2, thread="blockIdx.x"):
            for c in T.parallel(4, annotations=X):
                with T.sblock("fill"):
                    vb, vc = T.axis.remap("SS", [b, c])
                    P[vc] = A[vb, vc]
            for z in T.parallel(4, annotations=X):
                with T.sblock("read"):
                    vb, vz = T.axis.remap("SS", [b, z])
                    if P[(vz + 1) % 4] > T.float32(0):
                        B[vb, vz] = T.float32(1)
                    else:
                        B[vb, vz] = T.float32(-1)

    assert barriers(checked(func).image) == 2


def test_unrolled_loop_around_an_exchange() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((3, 4, 8), "float32"), B: T.Buffer((3, 4, 8), "float32")):
        P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
        for s in T.unroll(3):
            for c in T.parallel(4, annotations=X):
                for t in T.thread_binding(8, thread="threadIdx.x"):
                    with T.sblock("fill"):
                        vs, vc, vt = T.axis.remap("SSS", [s, c, t])
                        P[vc, vt] = A[vs, vc, vt]
            for z in T.parallel(4, annotations=X):
                for t in T.thread_binding(8, thread="threadIdx.x"):
                    with T.sblock("read"):
                        vs, vz, vt = T.axis.remap("SSS", [s, z, t])
                        B[vs, vz, vt] = P[3 - vz, vt]

    assert barriers(checked(func).image) == 3 * 2 + 1


def test_trip_count_that_differs_between_clusters() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((3, 4, 8), "float32"), B: T.Buffer((3, 4, 8), "float32")):
        P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
        for b in T.thread_binding(3, thread="blockIdx.x"):
            for c in T.parallel(4, annotations=X):
                for t in T.thread_binding(8, thread="threadIdx.x"):
                    with T.sblock("clear"):
                        vb, vc, vt = T.axis.remap("SSS", [b, c, t])
                        B[vb, vc, vt] = T.float32(0)
            for s in range(b):
                for c in T.parallel(4, annotations=X):
                    for t in T.thread_binding(8, thread="threadIdx.x"):
                        with T.sblock("fill"):
                            vs, vc, vt = T.axis.remap("SSS", [s, c, t])
                            P[vc, vt] = A[vs, vc, vt]
                for z in T.parallel(4, annotations=X):
                    for t in T.thread_binding(8, thread="threadIdx.x"):
                        with T.sblock("add"):
                            vb, vz, vt, vs = T.axis.remap("SSSR", [b, z, t, s])
                            B[vb, vz, vt] = B[vb, vz, vt] + P[3 - vz, vt]

    checked(func)


def test_buffers_of_which_each_cta_keeps_to_its_part() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((3, 32), "float32"), B: T.Buffer((3, 32), "float32")):
        S = T.sblock_alloc_buffer((96,), "float32", scope="shared.dyn")
        R = T.sblock_alloc_buffer((3, 32), "float32", scope="local")
        for c in T.parallel(3, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("stage"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    S[vc * 32 + vt] = A[vc, vt]
        for c in T.parallel(3, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("keep"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    R[vc, vt] = S[vc * 32 + 31 - vt]
        for c in T.parallel(3, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("store"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    B[vc, vt] = R[vc, vt]

    assert barriers(checked(func).image) == 0


def test_virtual_threads_of_extent_one() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
        P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
        for v in T.thread_binding(1, thread="vthread.x"):
            for c in T.parallel(4, annotations=X):
                for t in T.thread_binding(8, thread="threadIdx.x"):
                    with T.sblock("fill"):
                        vc, vt = T.axis.spatial(4, c + v), T.axis.spatial(8, t)
                        P[vc, vt] = A[vc, vt]
            for z in T.parallel(4, annotations=X):
                for t in T.thread_binding(8, thread="threadIdx.x"):
                    with T.sblock("read"):
                        vz, vt = T.axis.spatial(4, z + v), T.axis.spatial(8, t)
                        B[vz, vt] = P[3 - vz, vt]

    checked(func)


def test_buffers_of_one_name_are_told_apart() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
        P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
        P_peers = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    P[vc, vt] = A[vc, vt]
                    P_peers[vc, vt] = A[vc, vt] * T.float32(3)
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("read"):
                    vz, vt = T.axis.remap("SS", [z, t])
                    B[vz, vt] = P[3 - vz, vt] - P_peers[(vz + 1) % 4, vt]

    checked(func)


def test_storage_rewrite_does_not_touch_cluster_kernels() -> None:
    text = str(after(chain(), "crossfuse.StorageRewriteElsewhere").script())
    assert text == str(after(chain(), "s_tir.InjectDoubleBuffer").script())


def test_helper_of_cuda_on_a_pointer_to_a_staged_tile() -> None:
    helper = "__device__ float first_of(const float* tile) { return tile[0]; }"

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
        P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
        S = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dyn")
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    P[vc, vt] = A[vc, vt]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("stage"):
                    vz, vt = T.axis.remap("SS", [z, t])
                    S[vz, vt] = P[3 - vz, vt]
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("read"):
                    vz, vt = T.axis.remap("SS", [z, t])
                    T.reads(S[vz, 0:8])
                    T.writes(B[vz, vt])
                    B[vz, vt] = T.cuda.func_call(
                        "first_of",
                        S.access_ptr("r", offset=vz * 8),
                        source_code=helper,
                        return_type="float32",
                    )

    text = kernels_in(lower(func).image.cuda)
    assert "first_of((&(((float*)crossfuse_shared_ptr)[" in text
