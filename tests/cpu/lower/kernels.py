"""Hand-written functions with exchanges, small enough to emulate in a moment."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from cpu.macros import X, Y
from crossfuse import _tvm as ir
from crossfuse.schedule.rules.threads import schedule_ffn, schedule_split_k
from crossfuse.workload import parse, prim_func


@T.prim_func(s_tir=True)
def pull(A: T.Buffer((2, 4, 32), "float32"), B: T.Buffer((2, 4, 32), "float32")):
    P = T.sblock_alloc_buffer((4, 32), "float32", scope="shared.dsm")
    S = T.sblock_alloc_buffer((2, 4, 32), "float32", scope="shared")
    for b in T.thread_binding(2, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("stage"):
                    vb, vc, vt = T.axis.remap("SSS", [b, c, t])
                    S[vb, vc, vt] = A[vb, vc, vt] * T.float32(2)
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vb, vc, vt = T.axis.remap("SSS", [b, c, t])
                    P[vc, vt] = S[vb, vc, 31 - vt]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("read"):
                    vb, vz, vt = T.axis.remap("SSS", [b, z, t])
                    B[vb, vz, vt] = P[(vz + 1) % 4, vt]


@T.prim_func(s_tir=True)
def push(A: T.Buffer((2, 4, 32), "float32"), B: T.Buffer((2, 4, 32), "float32")):
    P = T.sblock_alloc_buffer((4, 32), "float32", scope="shared.dsm")
    for b in T.thread_binding(2, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("give"):
                    vb, vc, vt = T.axis.remap("SSS", [b, c, t])
                    P[(vc + 1) % 4, vt] = A[vb, vc, vt]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("take"):
                    vb, vz, vt = T.axis.remap("SSS", [b, z, t])
                    B[vb, vz, vt] = P[vz, 31 - vt]


@T.prim_func(s_tir=True)
def temporal(A: T.Buffer((3, 4, 32), "float32"), B: T.Buffer((3, 4, 32), "float32")):
    P = T.sblock_alloc_buffer((4, 32), "float32", scope="shared.dsm")
    for s in range(3):
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vs, vc, vt = T.axis.remap("SSS", [s, c, t])
                    P[vc, vt] = A[vs, vc, vt]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("read"):
                    vs, vz, vt = T.axis.remap("SSS", [s, z, t])
                    B[vs, vz, vt] = P[(vz + 1) % 4, vt]


@T.prim_func(s_tir=True)
def two_axes(A: T.Buffer((2, 2, 3, 32), "float32"), B: T.Buffer((2, 2, 3, 32), "float32")):
    P = T.sblock_alloc_buffer((3, 32), "float32", scope="shared.dsm")
    for b in T.thread_binding(2, thread="blockIdx.y"):
        for y in T.parallel(2, annotations=Y):
            for c in T.parallel(3, annotations=X):
                for t in T.thread_binding(32, thread="threadIdx.x"):
                    with T.sblock("fill"):
                        vb, vy, vc, vt = T.axis.remap("SSSS", [b, y, c, t])
                        P[vc, vt] = A[vb, vy, vc, vt]
            for z in T.parallel(3, annotations=X):
                for t in T.thread_binding(32, thread="threadIdx.x"):
                    with T.sblock("read"):
                        vb, vy, vz, vt = T.axis.remap("SSSS", [b, y, z, t])
                        B[vb, vy, vz, vt] = P[(vz + 1) % 3, vt]


@T.prim_func(s_tir=True)
def some_clusters(A: T.Buffer((3, 4, 32), "float32"), B: T.Buffer((3, 4, 32), "float32")):
    P = T.sblock_alloc_buffer((4, 32), "float32", scope="shared.dsm")
    for b in T.thread_binding(3, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vb, vc, vt = T.axis.remap("SSS", [b, c, t])
                    P[vc, vt] = A[vb, vc, vt]
        if b < 2:
            for z in T.parallel(4, annotations=X):
                for t in T.thread_binding(32, thread="threadIdx.x"):
                    with T.sblock("read"):
                        vb, vz, vt = T.axis.remap("SSS", [b, z, t])
                        B[vb, vz, vt] = P[(vz + 1) % 4, vt]
        else:
            for z in T.parallel(4, annotations=X):
                for t in T.thread_binding(32, thread="threadIdx.x"):
                    with T.sblock("keep"):
                        vb, vz, vt = T.axis.remap("SSS", [b, z, t])
                        B[vb, vz, vt] = P[vz, vt]


@T.prim_func(s_tir=True)
def two_kernels(
    A: T.Buffer((2, 4, 32), "float32"),
    B: T.Buffer((2, 4, 32), "float32"),
    C: T.Buffer((4, 32), "float32"),
):
    P = T.sblock_alloc_buffer((4, 32), "float32", scope="shared.dsm")
    Q = T.sblock_alloc_buffer((4, 32), "float32", scope="shared.dsm")
    for b in T.thread_binding(2, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vb, vc, vt = T.axis.remap("SSS", [b, c, t])
                    P[vc, vt] = A[vb, vc, vt]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("read"):
                    vb, vz, vt = T.axis.remap("SSS", [b, z, t])
                    B[vb, vz, vt] = P[(vz + 1) % 4, vt]
    for c in T.parallel(4, annotations=X):
        for t in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("fill_again"):
                vc, vt = T.axis.remap("SS", [c, t])
                Q[vc, vt] = B[0, vc, vt]
    for z in T.parallel(4, annotations=X):
        for t in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("read_again"):
                vz, vt = T.axis.remap("SS", [z, t])
                C[vz, vt] = Q[(vz + 1) % 4, vt] + B[1, vz, vt]


def split_k(cluster: int = 4, *, scatter: bool = True, k: int = 64) -> ir.Schedule:
    spec = parse(f"gemm:M=16,K={k},N=16,dtype=float16")
    return schedule_split_k(prim_func(spec), cluster=cluster, scatter=scatter)


def chain(cluster: int = 4, *, ring: bool = True) -> ir.Schedule:
    spec = parse("gemm_chain:M=8,K=32,N=64,L=32,dtype=float16")
    return schedule_ffn(prim_func(spec), cluster=cluster, ring=ring)


def gated(cluster: int = 4) -> ir.Schedule:
    spec = parse("gated_ffn:M=8,K=32,N=64,L=32,dtype=bfloat16,act=silu")
    return schedule_ffn(prim_func(spec), cluster=cluster)


#: Kernel families: how to make the function, and the cluster barriers its text must have.
FAMILIES: dict[str, tuple[Any, int]] = {
    "pull": (lambda: pull, 2),
    "push": (lambda: push, 2),
    "temporal": (lambda: temporal, 3),
    "two axes": (lambda: two_axes, 2),
    "some clusters": (lambda: some_clusters, 2),
    "two kernels": (lambda: two_kernels, 4),
    "split-K scatter": (split_k, 2),
    "split-K all-exchange": (lambda: split_k(scatter=False), 2),
    "chain, ring": (chain, 2),
    "chain, all-gather": (lambda: chain(ring=False), 2),
    "gated": (gated, 2),
}
