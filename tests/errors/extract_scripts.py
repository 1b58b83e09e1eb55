"""Functions that are no chains of products, in TVMScript."""

from __future__ import annotations

from tvm.script import tirx as T


@T.macro
def copy(name, A, B):
    for i, j in T.grid(4, 4):
        with T.sblock(name):
            v_i, v_j = T.axis.remap("SS", [i, j])
            B[v_i, v_j] = A[v_i, v_j]


@T.prim_func(s_tir=True)
def two_writers(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    C = T.sblock_alloc_buffer((4, 4))
    for i, j in T.grid(4, 4):
        with T.sblock("zero"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            C[v_i, v_j] = T.float32(0)
    copy("one", A, C)
    copy("out", C, B)


@T.prim_func(s_tir=True)
def without_init(
    A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32"), C: T.Buffer((4, 4), "float32")
):
    for i, j, k in T.grid(4, 4, 4):
        with T.sblock("out"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            C[v_i, v_j] = C[v_i, v_j] + A[v_i, v_k] * B[v_k, v_j]


@T.prim_func(s_tir=True)
def from_one(
    A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32"), C: T.Buffer((4, 4), "float32")
):
    for i, j, k in T.grid(4, 4, 4):
        with T.sblock("out"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[v_i, v_j] = T.float32(1)
            C[v_i, v_j] = C[v_i, v_j] + A[v_i, v_k] * B[v_k, v_j]


@T.prim_func(s_tir=True)
def half_written(A: T.Buffer((4, 4), "float32"), B: T.Buffer((8, 4), "float32")):
    for i, j in T.grid(4, 4):
        with T.sblock("out"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            B[v_i * 2, v_j] = A[v_i, v_j]


@T.prim_func(s_tir=True)
def half_run(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    for i, j in T.grid(2, 4):
        with T.sblock("out"):
            v_i = T.axis.spatial(4, i)
            v_j = T.axis.spatial(4, j)
            B[v_i, v_j] = A[v_i, v_j]


@T.prim_func(s_tir=True)
def read_again(
    A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32"), C: T.Buffer((4, 4), "float32")
):
    copy("first", A, C)
    copy("second", C, B)


@T.prim_func(s_tir=True)
def copied_back(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    C = T.sblock_alloc_buffer((4, 4))
    copy("out", A, B)
    copy("copy", B, C)


@T.prim_func(s_tir=True)
def idle(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    C = T.sblock_alloc_buffer((4, 4))
    copy("idle", A, C)
    copy("out", A, B)


@T.prim_func(s_tir=True)
def too_early(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    C = T.sblock_alloc_buffer((4, 4))
    copy("out", C, B)
    copy("late", A, C)


@T.prim_func(s_tir=True)
def conditional(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    for i, j in T.grid(4, 4):
        with T.sblock("out"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            if v_i < v_j:
                B[v_i, v_j] = A[v_i, v_j]


@T.prim_func(s_tir=True)
def view(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
    for i, j in T.grid(4, 4):
        with T.sblock("out"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            T.reads(A[v_i, v_j])
            T.writes(B[v_i, v_j])
            C = T.match_buffer(A[v_i, v_j], (1, 1), offset_factor=1, strides=[4, 1])
            B[v_i, v_j] = C[0, 0]
