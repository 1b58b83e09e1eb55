"""Products for the Hopper pipeline, each with one part that it refuses."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from crossfuse import _tvm as ir

#: Annotations of the pipelined loop.
STAGES = {"crossfuse.stages": 0}


@T.macro
def load_left(A, S, k):
    for i, d in T.grid(64, 64):
        with T.sblock("load_left"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d)
            S[vi, vk] = A[vi, vk]


@T.macro
def load_right(B, S, k):
    for j, d in T.grid(64, 64):
        with T.sblock("load_right"):
            vj, vk = T.axis.spatial(64, j), T.axis.spatial(128, k * 64 + d)
            S[vj, vk] = B[vj, vk]


@T.macro
def multiply(P, Q, C, k):
    for i, j, d in T.grid(64, 64, 64):
        with T.sblock("product"):
            vi, vj = T.axis.remap("SS", [i, j])
            vk = T.axis.reduce(128, k * 64 + d)
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] += T.Cast("float32", P[vi, vk]) * T.Cast("float32", Q[vj, vk])


@T.macro
def store(C, E):
    for i, j in T.grid(64, 64):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast("float16", C[vi, vj])


@T.macro
def both_steps(A, B, P, Q, C):
    for k in T.serial(2, annotations=STAGES):
        load_left(A, P, k)
        load_right(B, Q, k)
        multiply(P, Q, C, k)


def program(
    left: Any = load_left,
    right: Any = load_right,
    product: Any = multiply,
    last: Any = store,
    *,
    dtypes: tuple[str, str] = ("float16", "float16"),
    sums: tuple[str, str] = ("float32", "local"),
) -> Any:
    """``E = A B^T`` by two steps of one tile, of the given parts; sums of a type in a scope."""
    first, second = dtypes
    kind, scope = sums

    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((64, 128), first),
        B: T.Buffer((64, 128), second),
        E: T.Buffer((64, 64), "float16"),
    ):
        P = T.sblock_alloc_buffer((64, 128), first, scope="shared.dyn")
        Q = T.sblock_alloc_buffer((64, 128), second, scope="shared.dyn")
        C = T.sblock_alloc_buffer((64, 64), kind, scope=scope)
        for _b in T.thread_binding(1, thread="blockIdx.x"):
            for k in T.serial(2, annotations=STAGES):
                left(A, P, k)
                right(B, Q, k)
                product(P, Q, C, k)
            last(C, E)

    return named(func)


def named(func: Any) -> Any:
    """The function with blocks named as in their macros, which TVM numbers in a further use."""

    def rename(block: Any, mutator: Any) -> Any:
        name = str(block.name_hint).rstrip("_0123456789")
        return ir.block_like(mutator.default_mutate(block), name_hint=name)

    return ir.with_body(func, ir.mutate(func.body, (ir.SBlock, rename)))


def around(kind: str) -> Any:
    """The product inside one more loop: ``"serial"``, or bound to the coordinate of this name."""

    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((64, 128), "float16"),
        B: T.Buffer((64, 128), "float16"),
        E: T.Buffer((64, 64), "float16"),
    ):
        P = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
        Q = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
        C = T.sblock_alloc_buffer((64, 64), "float32", scope="local")
        for _b in T.thread_binding(1, thread="blockIdx.x"):
            for again in T.serial(1) if kind == "serial" else T.thread_binding(1, thread=kind):
                for k in T.serial(2, annotations=STAGES):
                    load_left(A, P, k + again)
                    load_right(B, Q, k)
                    multiply(P, Q, C, k)
                store(C, E)

    return named(func)


@T.prim_func(s_tir=True)
def two_products(
    A: T.Buffer((64, 128), "float16"),
    B: T.Buffer((64, 128), "float16"),
    E: T.Buffer((64, 64), "float16"),
):
    P = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
    Q = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
    C = T.sblock_alloc_buffer((64, 64), "float32", scope="local")
    for _b in T.thread_binding(1, thread="blockIdx.x"):
        both_steps(A, B, P, Q, C)
        store(C, E)
        both_steps(A, B, P, Q, C)
        store(C, E)


@T.prim_func(s_tir=True)
def three_dimensions(A: T.Buffer((1, 64, 64), "float16"), E: T.Buffer((64, 64), "float16")):
    P = T.sblock_alloc_buffer((1, 64, 64), "float16", scope="shared.dyn")
    C = T.sblock_alloc_buffer((64, 64), "float32", scope="local")
    for _b in T.thread_binding(1, thread="blockIdx.x"):
        for k in T.serial(2, annotations=STAGES):
            for z, i, d in T.grid(1, 64, 64):
                with T.sblock("batch"):
                    vz, vi, vk = T.axis.remap("SSS", [z, i, d])
                    P[vz, vi, vk] = A[vz, vi, vk]
            load_right(E, E, k)
            multiply(E, E, C, k)
        store(C, E)


@T.macro
def load_by_threads(A, S, k):
    for i in T.thread_binding(64, thread="threadIdx.x"):
        for d in range(64):
            with T.sblock("load"):
                vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d)
                S[vi, vk] = A[vi, vk]


@T.macro
def load_scaled(A, S, k):
    for i, d in T.grid(64, 64):
        with T.sblock("load"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d)
            S[vi, vk] = A[vi, vk] * T.float16(2)


@T.macro
def load_transposed(A, S, k):
    for i, d in T.grid(64, 64):
        with T.sblock("load"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d)
            S[vi, vk] = A[vk % 64, vi]


@T.macro
def load_strided(A, S, k):
    for i, d in T.grid(64, 64):
        with T.sblock("load"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, d * 2 + k)
            S[vi, vk] = A[vi, vk]


@T.macro
def load_by_two_loops(A, S, k):
    for i, d, e in T.grid(64, 8, 8):
        with T.sblock("load"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d * 8 + e)
            S[vi, vk] = A[vi, vk]


@T.macro
def load_in_part(A, S, k):
    for i, d in T.grid(64, 64):
        with T.sblock("load"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d)
            T.where(i < 60)
            S[vi, vk] = A[vi, vk]


@T.macro
def load_half(A, S, k):
    for i, d in T.grid(32, 64):
        with T.sblock("load"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d)
            S[vi, vk] = A[vi, vk]


@T.macro
def load_other_step(A, S, k):
    for i, d in T.grid(64, 64):
        with T.sblock("load"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, (1 - k) * 64 + d)
            S[vi, vk] = A[vi, vk]


@T.macro
def load_twice(A, S, k):
    load_left(A, S, k)
    load_right(A, S, k)


@T.macro
def load_two_blocks(A, S, k):
    for i, d in T.grid(64, 64):
        with T.sblock("load"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d)
            S[vi, vk] = A[vi, vk]
        with T.sblock("again"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, k * 64 + d)
            S[vi, vk] = A[vi, vk]


@T.macro(hygienic=False)
def multiply_unstaged(P, Q, C, k):
    multiply(P, B, C, k)  # noqa: F821  (of the function that uses it)


@T.macro
def multiply_without_init(P, Q, C, k):
    for i, j, d in T.grid(64, 64, 64):
        with T.sblock("product"):
            vi, vj = T.axis.remap("SS", [i, j])
            vk = T.axis.reduce(128, k * 64 + d)
            C[vi, vj] += T.Cast("float32", P[vi, vk]) * T.Cast("float32", Q[vj, vk])


@T.macro
def add(P, Q, C, k):
    for i, j, d in T.grid(64, 64, 64):
        with T.sblock("product"):
            vi, vj = T.axis.remap("SS", [i, j])
            vk = T.axis.reduce(128, k * 64 + d)
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] += T.Cast("float32", P[vi, vk]) + T.Cast("float32", Q[vj, vk])


@T.macro
def multiply_twice_reduced(P, Q, C, k):
    for i, j, d, e in T.grid(64, 64, 8, 8):
        with T.sblock("product"):
            vi, vj, vd, ve = T.axis.remap("SSRR", [i, j, d, e])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] += T.Cast("float32", P[vi, vd + ve]) * T.Cast("float32", Q[vj, vd + ve])


@T.macro
def store_half(C, E):
    for i, j in T.grid(64, 32):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast("float16", C[vi, vj])


@T.macro
def store_transposed(C, E):
    for i, j in T.grid(64, 64):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast("float16", C[vj, vi])


@T.macro(hygienic=False)
def store_of_staged(C, E):
    for i, j in T.grid(64, 64):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast("float16", C[vi, vj]) + P[vi, vj]  # noqa: F821


@T.macro
def store_sums(C, E):
    for i, j, d in T.grid(64, 64, 64):
        with T.sblock("store"):
            vi, vj, vd = T.axis.remap("SSR", [i, j, d])
            with T.init():
                E[vi, vj] = T.float16(0)
            E[vi, vj] += T.Cast("float16", C[vi, vd])
