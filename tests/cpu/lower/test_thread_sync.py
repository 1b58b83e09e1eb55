"""``__syncthreads`` between threads that share elements of shared memory, and none else."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from cpu.lower.support import checked, kernels_in
from cpu.macros import X


def syncs(func: Any) -> int:
    """``__syncthreads`` of a kernel that both checkers have passed."""
    return kernels_in(checked(func).image.cuda).count("__syncthreads()")


def test_store_by_one_thread_and_load_of_the_same_index_by_another() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((2, 4), "float32"), B: T.Buffer((2, 2, 4), "float32")):
        S = T.sblock_alloc_buffer((2, 4), "float32", scope="shared")
        for c in T.parallel(2, annotations=X):
            for ty in T.thread_binding(2, thread="threadIdx.y"):
                for tx in T.thread_binding(4, thread="threadIdx.x"):
                    with T.sblock("fill"):
                        vc, vt = T.axis.remap("SS", [c, tx])
                        T.where(ty == 0)
                        S[vc, vt] = A[vc, vt]
            for ty in T.thread_binding(2, thread="threadIdx.y"):
                for tx in T.thread_binding(4, thread="threadIdx.x"):
                    with T.sblock("read"):
                        vc, vy, vt = T.axis.remap("SSS", [c, ty, tx])
                        B[vc, vy, vt] = S[vc, vt]

    assert syncs(func) == 1


def test_two_stores_of_the_same_index_by_different_threads() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((2, 4), "float32"), B: T.Buffer((2, 4), "float32")):
        S = T.sblock_alloc_buffer((2, 4), "float32", scope="shared")
        for c in T.parallel(2, annotations=X):
            for ty in T.thread_binding(2, thread="threadIdx.y"):
                for tx in T.thread_binding(4, thread="threadIdx.x"):
                    with T.sblock("once"):
                        vc, vt = T.axis.remap("SS", [c, tx])
                        T.where(ty == 0)
                        S[vc, vt] = A[vc, vt]
            for ty in T.thread_binding(2, thread="threadIdx.y"):
                for tx in T.thread_binding(4, thread="threadIdx.x"):
                    with T.sblock("again"):
                        vc, vt = T.axis.remap("SS", [c, tx])
                        T.where(ty == 1)
                        S[vc, vt] = A[vc, vt] * T.float32(2)
            for ty in T.thread_binding(2, thread="threadIdx.y"):
                for tx in T.thread_binding(4, thread="threadIdx.x"):
                    with T.sblock("read"):
                        vc, vt = T.axis.remap("SS", [c, tx])
                        T.where(ty == 0)
                        B[vc, vt] = S[vc, vt]

    assert syncs(func) == 2


def test_two_stores_of_mirrored_indices() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((2, 64), "float32"), B: T.Buffer((2, 64), "float32")):
        S = T.sblock_alloc_buffer((2, 64), "float32", scope="shared")
        for c in T.parallel(2, annotations=X):
            for t in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("once"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    S[vc, vt] = A[vc, vt]
            for t in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("again"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    T.where(t < 8)
                    S[vc, 63 - vt] = A[vc, vt]
            for t in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("read"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    B[vc, vt] = S[vc, vt]

    assert syncs(func) == 2


def test_unrolled_stores_of_one_warp_to_different_elements() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((2, 64), "float32"), B: T.Buffer((2, 64), "float32")):
        S = T.sblock_alloc_buffer((2, 64), "float32", scope="shared")
        for c in T.parallel(2, annotations=X):
            for ty in T.thread_binding(2, thread="threadIdx.y"):
                for tx in T.thread_binding(16, thread="threadIdx.x"):
                    for s in T.unroll(4):
                        with T.sblock("fill"):
                            vc, vt = T.axis.spatial(2, c), T.axis.spatial(64, s * 16 + tx)
                            T.where(ty == 0)
                            S[vc, vt] = A[vc, vt]
            for ty in T.thread_binding(2, thread="threadIdx.y"):
                for tx in T.thread_binding(16, thread="threadIdx.x"):
                    for s in range(2):
                        with T.sblock("read"):
                            vc = T.axis.spatial(2, c)
                            vt = T.axis.spatial(64, s * 32 + ty * 16 + tx)
                            B[vc, vt] = S[vc, vt]

    assert syncs(func) == 1
