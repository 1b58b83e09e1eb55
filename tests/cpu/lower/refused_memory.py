"""Functions whose memory accesses the lowering must refuse, each for one reason."""

from __future__ import annotations

from typing import Any

from tvm import te
from tvm.script import tirx as T

from cpu.lower.kernels import temporal
from cpu.macros import X, Y
from crossfuse import _tvm as ir
from crossfuse.schedule.rules.threads import schedule_ffn
from crossfuse.workload import parse, prim_func


@T.prim_func(s_tir=True)
def private_across_ranks(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    S = T.sblock_alloc_buffer((8,), "float32", scope="shared.dyn")
    for c in T.parallel(4, annotations=X):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("fill"):
                vc, vt = T.axis.remap("SS", [c, t])
                S[vt] = A[vc, vt]
    for z in T.parallel(4, annotations=X):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("read"):
                vz, vt = T.axis.remap("SS", [z, t])
                B[vz, vt] = S[vt]


@T.prim_func(s_tir=True)
def private_inside_another_axis(
    A: T.Buffer((2, 4, 8), "float32"), B: T.Buffer((2, 4, 8), "float32")
):
    S = T.sblock_alloc_buffer((8,), "float32", scope="shared.dyn")
    for y in T.parallel(2, annotations=Y):
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vy, vc, vt = T.axis.remap("SSS", [y, c, t])
                    S[vt] = A[vy, vc, vt]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("read"):
                    vy, vz, vt = T.axis.remap("SSS", [y, z, t])
                    B[vy, vz, vt] = S[vt]


@T.prim_func(s_tir=True)
def registers_of_another_thread(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    R = T.sblock_alloc_buffer((4, 8), "float32", scope="local")
    for c in T.parallel(4, annotations=X):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("fill"):
                vc, vt = T.axis.remap("SS", [c, t])
                R[vc, vt] = A[vc, vt]
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("read"):
                vc, vt = T.axis.remap("SS", [c, t])
                B[vc, vt] = R[vc, 7 - vt]


@T.prim_func(s_tir=True)
def slab_across_another_axis(A: T.Buffer((2, 4, 8), "float32"), B: T.Buffer((2, 4, 8), "float32")):
    P = T.sblock_alloc_buffer((4, 2, 8), "float32", scope="shared.dsm")
    for y in T.parallel(2, annotations=Y):
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vy, vc, vt = T.axis.remap("SSS", [y, c, t])
                    P[vc, vy, vt] = A[vy, vc, vt]
    for y in T.parallel(2, annotations=Y):
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("read"):
                    vy, vz, vt = T.axis.remap("SSS", [y, z, t])
                    B[vy, vz, vt] = P[3 - vz, 1 - vy, vt]


@T.prim_func(s_tir=True)
def slab_across_the_grid(A: T.Buffer((2, 4, 8), "float32"), B: T.Buffer((2, 4, 8), "float32")):
    P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
    for b in T.thread_binding(2, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("fill"):
                    vb, vc, vt = T.axis.remap("SSS", [b, c, t])
                    P[vc, vt] = A[vb, vc, vt]
    for b in T.thread_binding(2, thread="blockIdx.x"):
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("read"):
                    vb, vz, vt = T.axis.remap("SSS", [b, z, t])
                    B[vb, vz, vt] = P[3 - vz, vt]


@T.prim_func(s_tir=True)
def store_outside(
    A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((1,), "float32")
):
    for b in T.thread_binding(1, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            with T.sblock("copy"):
                vc = T.axis.spatial(4, c + b)
                B[vc] = A[vc]
        with T.sblock("all_do"):
            vb = T.axis.spatial(1, b)
            C[vb] = T.float32(1)


@T.prim_func(s_tir=True)
def global_exchange(
    A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")
):
    for b in T.thread_binding(1, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            with T.sblock("fill"):
                vc = T.axis.spatial(4, c + b)
                B[vc] = A[vc]
        for z in T.parallel(4, annotations=X):
            with T.sblock("read"):
                vz = T.axis.spatial(4, z + b)
                C[vz] = B[3 - vz]


@T.prim_func(s_tir=True)
def global_threads(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    for c in T.parallel(4, annotations=X):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("clear"):
                vc, vt = T.axis.remap("SS", [c, t])
                B[vc, 7 - vt] = T.float32(0)
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("add"):
                vc, vt = T.axis.remap("SS", [c, t])
                B[vc, vt] = B[vc, vt] + A[vc, vt]


@T.prim_func(s_tir=True)
def all_threads(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
    for c in T.parallel(4, annotations=X):
        for e in range(8):
            with T.sblock("fill"):
                vc, ve = T.axis.remap("SS", [c, e])
                P[vc, ve] = A[vc, ve]
    for z in T.parallel(4, annotations=X):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("read"):
                vz, vt = T.axis.remap("SS", [z, t])
                B[vz, vt] = P[3 - vz, vt]


def first_threads(count: int) -> Any:
    """Each of the first few threads stores the first element of a CTA: one alone may."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
        P = T.sblock_alloc_buffer((4, 1), "float32", scope="shared.dsm")
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("fill"):
                    T.where(t < count)
                    vc = T.axis.spatial(4, c)
                    T.axis.spatial(8, t)
                    P[vc, 0] = A[vc, 0]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("read"):
                    vz, vt = T.axis.remap("SS", [z, t])
                    B[vz, vt] = P[3 - vz, 0] + A[vz, vt]

    return func


def idle_threads() -> Any:
    """A write-back that `reverse_compute_at` guards by the matrix and not by the rank's tile."""
    sch = ir.Schedule(prim_func(parse("gemm:M=16,K=64,N=16,dtype=float16")))
    block, out = sch.get_sblock("gemm0"), sch.get_sblock("out")
    i, j, k = sch.get_loops(block)
    rank, rest = sch.split(k, [4, None])
    sch.reorder(rank, rest, i, j)
    partial = sch.dsm_reduce(block, rank)
    *_, row, column = sch.get_loops(partial)
    _, thread = sch.split(sch.fuse(row, column), [None, 128])
    sch.bind(thread, "threadIdx.x")
    _, element, _ = sch.get_loops(block)
    _, thread = sch.split(element, [None, 128])
    sch.bind(thread, "threadIdx.x")
    sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(out, thread)
    return sch


def split_ring() -> Any:
    """A chain whose slice loop was split after the exchange was made."""
    spec = parse("gemm_chain:M=8,K=32,N=64,L=32,dtype=float16")
    sch = schedule_ffn(prim_func(spec), cluster=4, ring=True)
    loops = sch.get_loops(sch.get_sblock("gemm1_update"))
    sch.split(next(each for each in loops if str(sch.get(each).loop_var.name) == "k_0"), [2, 2])
    return sch


def ring_with_init() -> Any:
    """A ring over a reduction that is initialised in its first step."""
    sch = ir.Schedule(prim_func(parse("gemm_chain:M=8,K=32,N=64,L=32,dtype=float16")))
    hidden, block = sch.get_sblock("hidden"), sch.get_sblock("gemm1")
    i, j, k = sch.get_loops(block)
    rank, j = sch.split(j, [4, None])
    step, k = sch.split(k, [4, None])
    sch.reorder(rank, step, k, i, j)
    sch.cluster_bind(rank)
    sch.dsm_shuffle(hidden, block, 0, step)
    sch.set_scope(block, 0, "shared.dyn")
    sch.reverse_compute_at(sch.get_sblock("out"), rank)
    return sch


@T.prim_func(s_tir=True)
def virtual_threads(A: T.Buffer((2, 4), "float32"), B: T.Buffer((2, 4), "float32")):
    P = T.sblock_alloc_buffer((4, 2), "float32", scope="shared.dsm")
    for v in T.thread_binding(2, thread="vthread.x"):
        for c in T.parallel(4, annotations=X):
            with T.sblock("fill"):
                vv, vc = T.axis.remap("SS", [v, c])
                P[vc, vv] = A[vv, vc]
        for z in T.parallel(4, annotations=X):
            with T.sblock("read"):
                vv, vz = T.axis.remap("SS", [v, z])
                B[vv, vz] = P[3 - vz, vv]


@T.prim_func(s_tir=True)
def ring_of_a_scan(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for b in T.thread_binding(1, thread="blockIdx.x"):
        with T.sblock("tile"):
            P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
            for c in T.parallel(4, annotations=X):
                P[c] = A[c + b]
            for z in T.parallel(4, annotations=X):
                B[z] = T.float32(0)
                for r in range(4):
                    with T.sblock("stage"):
                        T.sblock_attr({"crossfuse.dsm_shuffle": "ring"})
                        B[z] = B[z] * T.float32(0.5) + P[r]


def bound(m: int, n: int, *tags: str) -> Any:
    """A copy whose loops of extents m and n are bound as said; "cluster.x" is a cluster axis."""
    a = te.placeholder((m, n), "float32", "A")
    sch = ir.Schedule(te.create_prim_func([a, te.compute((m, n), lambda i, j: a[i, j], name="C")]))
    for loop, tag in zip(sch.get_loops(sch.get_sblock("C")), tags, strict=True):
        if tag.startswith("cluster."):
            sch.parallel(loop)
            sch.annotate(loop, "crossfuse.cluster_axis", tag[-1])
        else:
            sch.bind(loop, tag)
    return sch


def pipelined() -> Any:
    """A software pipeline over a loop around an exchange."""
    sch = ir.Schedule(temporal)
    sch.annotate(sch.get_loops(sch.get_sblock("read"))[0], "software_pipeline_stage", [0, 1])
    return sch


def double_buffered() -> Any:
    """A double buffer over a loop around an exchange."""
    sch = ir.Schedule(temporal)
    sch.annotate(sch.get_sblock("fill"), "double_buffer_scope", 0)
    return sch


def thread_reduction() -> Any:
    """A reduction over a number of threads that no warp shuffle serves."""
    a = te.placeholder((4, 96), "float32", "A")
    k = te.reduce_axis((0, 96), "k")
    sch = ir.Schedule(
        te.create_prim_func([a, te.compute((4,), lambda i: te.sum(a[i, k], axis=k), name="C")])
    )
    i, k = sch.get_loops(sch.get_sblock("C"))
    sch.cluster_bind(i)
    _, thread = sch.split(k, [None, 48])
    sch.bind(thread, "threadIdx.x")
    return sch


def large_slab() -> Any:
    """An exchange of 300000 bytes a CTA."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 75000), "float32"), B: T.Buffer((4, 75000), "float32")):
        for b in T.thread_binding(1, thread="blockIdx.x"):
            with T.sblock("tile"):
                P = T.sblock_alloc_buffer((4, 75000), "float32", scope="shared.dsm")
                for c in T.parallel(4, annotations=X):
                    for e in range(75000):
                        P[c, e] = A[c + b, e]
                for z in T.parallel(4, annotations=X):
                    for e in range(75000):
                        B[z, e] = P[3 - z, e]

    return func


def wide_elements() -> Any:
    """An exchange of elements for which there is no DSM access."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "float64"), B: T.Buffer((4,), "float64")):
        for b in T.thread_binding(1, thread="blockIdx.x"):
            with T.sblock("tile"):
                P = T.sblock_alloc_buffer((4,), "float64", scope="shared.dsm")
                for c in T.parallel(4, annotations=X):
                    P[c] = A[c + b]
                for z in T.parallel(4, annotations=X):
                    B[z] = P[3 - z]

    return func
