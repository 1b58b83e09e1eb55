"""Functions whose clusters, slabs or barriers the lowering must refuse, each for one reason."""

from __future__ import annotations

from tvm.script import tirx as T

from cpu.macros import X, Y


@T.prim_func(s_tir=True)
def naive_bind(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    for my_loop in T.thread_binding(4, thread="clusterCtaIdx.y"):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("copy"):
                vc, vt = T.axis.remap("SS", [my_loop, t])
                B[vc, vt] = A[vc, vt]


@T.prim_func(s_tir=True)
def nested_axis(A: T.Buffer((2, 2), "float32"), B: T.Buffer((2, 2), "float32")):
    for outer in T.parallel(2, annotations=X):
        for inner in T.parallel(2, annotations=X):
            with T.sblock("copy"):
                vo, vi = T.axis.remap("SS", [outer, inner])
                B[vo, vi] = A[vo, vi]


@T.prim_func(s_tir=True)
def cluster_extents(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    P = T.sblock_alloc_buffer((4, 2), "float32", scope="shared.dsm")
    for b in T.thread_binding(1, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            for e in range(2):
                with T.sblock("fill"):
                    vc, ve = T.axis.spatial(4, c + b), T.axis.spatial(2, e)
                    P[vc, ve] = A[vc * 2 + ve]
        for halves in T.parallel(2, annotations=X):
            for e in range(4):
                with T.sblock("read"):
                    v = T.axis.spatial(8, halves * 4 + e)
                    B[v] = P[v // 2, v % 2]


@T.prim_func(s_tir=True)
def thread_extents(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
    for c in T.parallel(4, annotations=X):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("fill"):
                vc, vt = T.axis.remap("SS", [c, t])
                P[vc, vt] = A[vc, vt]
    for z in T.parallel(4, annotations=X):
        for u in range(2):
            for four in T.thread_binding(4, thread="threadIdx.x"):
                with T.sblock("read"):
                    vz, vt = T.axis.spatial(4, z), T.axis.spatial(8, u * 4 + four)
                    B[vz, vt] = P[3 - vz, vt]


@T.prim_func(s_tir=True)
def no_owner(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    P = T.sblock_alloc_buffer((4, 1), "float32", scope="shared.dsm")
    for c in T.parallel(4, annotations=X):
        with T.sblock("give"):
            vc = T.axis.spatial(4, c)
            P[(vc + 1) % 4, 0] = A[vc]
    for z in T.parallel(4, annotations=X):
        with T.sblock("read"):
            vz = T.axis.spatial(4, z)
            B[vz] = P[(vz + 2) % 4, 0]


@T.prim_func(s_tir=True)
def no_cluster(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for b in T.thread_binding(1, thread="blockIdx.x"):
        with T.sblock("tile"):
            P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
            for c in range(4):
                P[c] = A[c + b]
            for c in range(4):
                B[c] = P[3 - c]


@T.prim_func(s_tir=True)
def outside_access(A: T.Buffer((4,), "float32"), B: T.Buffer((1,), "float32")):
    P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
    for b in T.thread_binding(1, thread="blockIdx.x"):
        for c in T.parallel(4, annotations=X):
            with T.sblock("fill"):
                vc = T.axis.spatial(4, c + b)
                P[vc] = A[vc]
        with T.sblock("read"):
            vb = T.axis.spatial(1, b)
            B[vb] = P[2]


@T.prim_func(s_tir=True)
def pointer_to_slab(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for b in T.thread_binding(1, thread="blockIdx.x"):
        with T.sblock("tile"):
            P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
            for c in T.parallel(4, annotations=X):
                P[c] = A[c + b]
                B[c] = T.call_extern("float32", "look", T.address_of(P[c]))


@T.prim_func(s_tir=True)
def view_of_slab(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
    for c in T.parallel(4, annotations=X):
        with T.sblock("fill"):
            vc = T.axis.spatial(4, c)
            T.reads(A[vc, 0:8])
            T.writes(P[vc, 0:8])
            V = T.match_buffer(P[vc, 0:8], (1, 8), "float32", scope="shared.dsm")
            for e in range(8):
                V[0, e] = A[vc, e]
    for z in T.parallel(4, annotations=X):
        for e in range(8):
            with T.sblock("read"):
                vz, ve = T.axis.remap("SS", [z, e])
                B[vz, ve] = P[3 - vz, ve]


@T.prim_func(s_tir=True)
def exchange_in_one_nest(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
    for b in T.thread_binding(1, thread="blockIdx.x"):
        for both in T.parallel(4, annotations=X):
            with T.sblock("fill"):
                vc = T.axis.spatial(4, both + b)
                P[vc] = A[vc]
            with T.sblock("read"):
                vc = T.axis.spatial(4, both + b)
                B[vc] = P[3 - vc]
        for c in T.parallel(4, annotations=X):
            with T.sblock("clear"):
                P[c] = T.float32(0)


@T.prim_func(s_tir=True)
def two_pushes(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
    for give in T.parallel(4, annotations=X):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("clear"):
                vc, vt = T.axis.remap("SS", [give, t])
                P[3 - vc, vt] = T.float32(0)
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("give"):
                vc, vt = T.axis.remap("SS", [give, t])
                P[3 - vc, 7 - vt] = A[vc, vt]
    for z in T.parallel(4, annotations=X):
        for t in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("take"):
                vz, vt = T.axis.remap("SS", [z, t])
                B[vz, vt] = P[vz, vt]


@T.prim_func(s_tir=True)
def some_threads(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
    for t in T.thread_binding(8, thread="threadIdx.x"):
        if t < 4:
            for c in T.parallel(4, annotations=X):
                with T.sblock("fill"):
                    vc, vt = T.axis.remap("SS", [c, t])
                    P[vc, vt] = A[vc, vt]
            for z in T.parallel(4, annotations=X):
                with T.sblock("read"):
                    vz, vt = T.axis.remap("SS", [z, t])
                    B[vz, vt] = P[3 - vz, vt]


@T.prim_func(s_tir=True)
def some_ranks(A: T.Buffer((2, 4), "float32"), B: T.Buffer((2, 4), "float32")):
    for y in T.parallel(2, annotations=Y):
        for s in range(y + 1):
            with T.sblock("tile"):
                P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
                for c in T.parallel(4, annotations=X):
                    P[c] = A[s, c]
                for z in T.parallel(4, annotations=X):
                    B[y, z] = P[3 - z]


@T.prim_func(s_tir=True)
def value_in_memory(
    N: T.Buffer((4,), "int32"), A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")
):
    for b in T.thread_binding(1, thread="blockIdx.x"):
        with T.sblock("tile"):
            P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
            S = T.sblock_alloc_buffer((1,), "int32", scope="shared.dyn")
            S[0] = N[b]
            if S[0] > 0:
                for c in T.parallel(4, annotations=X):
                    P[c] = A[c]
                for z in T.parallel(4, annotations=X):
                    B[z] = P[3 - z]


@T.prim_func(s_tir=True)
def named_condition(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32")):
    for t in T.thread_binding(8, thread="threadIdx.x"):
        with T.sblock("tile"):
            P = T.sblock_alloc_buffer((4, 8), "float32", scope="shared.dsm")
            half: T.let[T.int32] = t // 4
            if half == 0:
                for c in T.parallel(4, annotations=X):
                    P[c, t] = A[c, t]
                for z in T.parallel(4, annotations=X):
                    B[z, t] = P[3 - z, t]


@T.prim_func(s_tir=True)
def while_around(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for b in T.thread_binding(1, thread="blockIdx.x"):
        with T.sblock("tile"):
            P = T.sblock_alloc_buffer((4,), "float32", scope="shared.dsm")
            N = T.sblock_alloc_buffer((1,), "int32", scope="local")
            N[0] = b
            while N[0] < 2:
                for c in T.parallel(4, annotations=X):
                    P[c] = A[c]
                for z in T.parallel(4, annotations=X):
                    B[z] = P[3 - z]
                N[0] = N[0] + 1


@T.prim_func(s_tir=True)
def unknown_axis(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for c in T.parallel(4, annotations={"crossfuse.cluster_axis": "w"}):
        with T.sblock("copy"):
            vc = T.axis.spatial(4, c)
            B[vc] = A[vc]


@T.prim_func(s_tir=True)
def some_virtual_threads(A: T.Buffer((4, 2), "float32"), B: T.Buffer((4, 2), "float32")):
    R = T.sblock_alloc_buffer((4, 2), "float32", scope="shared")
    for c in T.parallel(4, annotations=X):
        for v in T.thread_binding(2, thread="vthread.x"):
            with T.sblock("clear"):
                vc, vv = T.axis.remap("SS", [c, v])
                R[vc, vv] = T.float32(0)
        for e in range(2):
            with T.sblock("add"):
                vc, ve = T.axis.remap("SS", [c, e])
                R[vc, ve] = R[vc, ve] + A[vc, ve]
        for e in range(2):
            with T.sblock("out"):
                vc, ve = T.axis.remap("SS", [c, e])
                B[vc, ve] = R[vc, ve]


@T.prim_func(s_tir=True)
def diagonal(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    for c in T.parallel(1, annotations=X):
        for outer in T.thread_binding(4, thread="threadIdx.x"):
            for inner in T.thread_binding(4, thread="threadIdx.x"):
                with T.sblock("copy"):
                    vi, vj = T.axis.spatial(4, outer + c), T.axis.spatial(4, inner)
                    B[vi, vj] = A[vi, vj]


@T.prim_func(s_tir=True)
def unequal_threads(A: T.Buffer((2, 4), "float32"), B: T.Buffer((2, 4), "float32")):
    for c in T.parallel(2, annotations=X):
        for wide in T.thread_binding(2, thread="threadIdx.x"):
            for inner in T.thread_binding(4, thread="threadIdx.x"):
                with T.sblock("copy"):
                    vi, vj = T.axis.spatial(2, c + wide - wide), T.axis.spatial(4, inner)
                    B[vi, vj] = A[vi, vj]
