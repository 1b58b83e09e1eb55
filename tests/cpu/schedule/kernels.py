"""Unscheduled functions that the tests of the primitives start from, in TVMScript."""

from __future__ import annotations

from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def matmul(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    C: T.Buffer((8, 8), "float32"),
):
    for i, j, k in T.grid(8, 8, 32):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def scaled_matmul(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    D: T.Buffer((8, 8), "float32"),
):
    C = T.sblock_alloc_buffer((8, 8))
    for i, j, k in T.grid(8, 8, 32):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j in T.grid(8, 8):
        with T.sblock("D"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = C[vi, vj] * T.float32(2)


@T.prim_func(s_tir=True)
def chain(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 16), "float32"),
    D: T.Buffer((16, 8), "float32"),
    E: T.Buffer((8, 8), "float32"),
):
    """Two products, the second of the first as it is."""
    C = T.sblock_alloc_buffer((8, 16))
    for i, j, k in T.grid(8, 16, 32):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j, k in T.grid(8, 8, 16):
        with T.sblock("E"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                E[vi, vj] = T.float32(0)
            E[vi, vj] = E[vi, vj] + C[vi, vk] * D[vk, vj]


@T.prim_func(s_tir=True)
def row_sums(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    D: T.Buffer((8,), "float32"),
):
    """A consumer with more iteration variables than its operand has dimensions."""
    C = T.sblock_alloc_buffer((8, 8))
    for i, j, k in T.grid(8, 8, 32):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j in T.grid(8, 8):
        with T.sblock("D"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                D[vi] = T.float32(0)
            D[vi] = D[vi] + C[vi, vj]


@T.prim_func(s_tir=True)
def transposed(
    A: T.Buffer((2, 8, 32), "float32"),
    B: T.Buffer((32, 4), "float32"),
    D: T.Buffer((4, 8, 2), "float32"),
):
    """An intermediate whose dimensions stand in another order than the iteration variables."""
    C = T.sblock_alloc_buffer((4, 8, 2))
    for b, i, j, k in T.grid(2, 8, 4, 32):
        with T.sblock("C"):
            vb, vi, vj, vk = T.axis.remap("SSSR", [b, i, j, k])
            with T.init():
                C[vj, vi, vb] = T.float32(0)
            C[vj, vi, vb] = C[vj, vi, vb] + A[vb, vi, vk] * B[vk, vj]
    for j, i, b in T.grid(4, 8, 2):
        with T.sblock("D"):
            vj, vi, vb = T.axis.remap("SSS", [j, i, b])
            D[vj, vi, vb] = C[vj, vi, vb] * T.float32(2)


@T.prim_func(s_tir=True)
def mlp(
    X: T.Buffer((8, 16), "float32"),
    W: T.Buffer((8, 16), "float32"),
    Y: T.Buffer((8, 8), "float32"),
):
    """An elementwise producer and a product of it."""
    H = T.sblock_alloc_buffer((8, 16))
    for i, f in T.grid(8, 16):
        with T.sblock("H"):
            vi, vf = T.axis.remap("SS", [i, f])
            H[vi, vf] = T.max(X[vi, vf], T.float32(0))
    for i, j, k in T.grid(8, 8, 16):
        with T.sblock("Y"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                Y[vi, vj] = T.float32(0)
            Y[vi, vj] = Y[vi, vj] + H[vi, vk] * W[vj, vk]
