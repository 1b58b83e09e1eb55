"""Functions without a gradient, in TVMScript."""

from __future__ import annotations

from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def two_writers(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for i in T.grid(4):
        with T.sblock("zero"):
            v_i = T.axis.remap("S", [i])
            B[v_i] = T.float32(0)
    for i in T.grid(4):
        with T.sblock("copy"):
            v_i = T.axis.remap("S", [i])
            B[v_i] = A[v_i]


@T.prim_func(s_tir=True)
def too_early(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    C = T.sblock_alloc_buffer((4,))
    for i in T.grid(4):
        with T.sblock("out"):
            v_i = T.axis.remap("S", [i])
            B[v_i] = C[v_i]
    for i in T.grid(4):
        with T.sblock("copy"):
            v_i = T.axis.remap("S", [i])
            C[v_i] = A[v_i]


@T.prim_func(s_tir=True)
def never(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    C = T.sblock_alloc_buffer((4,))
    for i in T.grid(4):
        with T.sblock("out"):
            v_i = T.axis.remap("S", [i])
            B[v_i] = A[v_i] + C[v_i]


@T.prim_func(s_tir=True)
def half(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for i in T.grid(2):
        with T.sblock("half"):
            v_i = T.axis.remap("S", [i])
            B[v_i] = A[v_i]


@T.prim_func(s_tir=True)
def scan(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for i in T.grid(4):
        with T.sblock("scan"):
            v_i = T.axis.remap("S", [i])
            B[v_i] = T.if_then_else(v_i > 0, B[v_i - 1], T.float32(0)) + A[v_i]


@T.prim_func(s_tir=True)
def from_zero(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4,), "float32")):
    for i, k in T.grid(4, 4):
        with T.sblock("largest"):
            v_i, v_k = T.axis.remap("SR", [i, k])
            with T.init():
                B[v_i] = T.float32(0)
            B[v_i] = T.max(B[v_i], A[v_i, v_k])


@T.prim_func(s_tir=True)
def strided(A: T.Buffer((16,), "float32"), B: T.Buffer((4,), "float32"), n: T.int32):
    for i in T.grid(4):
        with T.sblock("strided"):
            v_i = T.axis.remap("S", [i])
            B[v_i] = A[v_i * n]


@T.prim_func(s_tir=True)
def nothing(A: T.Buffer((4,), "float32")):
    T.evaluate(0)
