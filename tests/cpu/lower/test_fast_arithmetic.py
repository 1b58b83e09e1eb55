"""Passes for functions marked as fast: exponentials, packed registers; bounds on registers."""

from __future__ import annotations

from tvm.script import tirx as T

from cpu.lower.support import apply, assert_becomes
from crossfuse.lower.buffers import order_loads, pack_registers
from crossfuse.lower.lower_cluster import bound_registers
from crossfuse.lower.pipeline import fast_exponentials
from crossfuse.markers import FAST, RESIDENT_CTAS


def test_exponentials_of_float32_become_one_instruction() -> None:
    @T.prim_func
    def before(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float64")):
        T.func_attr({FAST: 1})
        A[0] = T.exp2(A[1] + T.exp2(A[2]))
        A[3] = T.exp(A[3])
        B[0] = T.exp2(B[1])

    @T.prim_func
    def expected(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float64")):
        A[0] = T.cuda.func_call(
            "crossfuse_exp2",
            A[1] + T.cuda.func_call("crossfuse_exp2", A[2], source_code="", return_type="float32"),
            source_code="",
            return_type="float32",
        )
        A[3] = T.exp(A[3])
        B[0] = T.exp2(B[1])

    assert_becomes(fast_exponentials, before, expected)
    plain = before.without_attr(FAST)
    assert apply(fast_exponentials, plain).same_as(plain)


def test_bfloat16_is_packed_two_by_two() -> None:
    @T.prim_func
    def before(X: T.Buffer((16,), "bfloat16"), Y: T.Buffer((4,), "float32")):
        T.func_attr({FAST: 1})
        A = T.alloc_local((16,), "bfloat16")
        A[T.ramp(8, 1, 8)] = X[T.ramp(0, 1, 8)]
        A[T.ramp(0, 1, 2)] = X[T.ramp(8, 1, 2)]
        Y[0] = T.float32(A[8])
        Y[1] = T.float32(A[9])

    @T.prim_func
    def expected(X: T.Buffer((16,), "bfloat16"), Y: T.Buffer((4,), "float32")):
        W = T.alloc_local((8,), "uint32")
        W[T.ramp(4, 1, 4)] = T.reinterpret("uint32x4", X[T.ramp(0, 1, 8)])
        W[0] = T.reinterpret("uint32", X[T.ramp(8, 1, 2)])
        Y[0] = T.reinterpret("float32", W[4] << T.uint32(16))
        Y[1] = T.reinterpret("float32", T.bitwise_and(W[4], T.uint32(0xFFFF0000)))

    assert_becomes(pack_registers, before, expected)


def test_loads_under_conditions_are_asked_for_in_order() -> None:
    """All of a thread outside loops: where ptxas begins loads of the next turn, it still does."""

    @T.prim_func
    def before(X: T.Buffer((64,), "bfloat16"), Y: T.Buffer((4,), "float32"), n: T.int32):
        T.func_attr({FAST: 1})
        A = T.alloc_local((24,), "bfloat16")
        A[T.ramp(0, 1, 8)] = X[T.ramp(0, 1, 8)]
        if n > 1:
            A[T.ramp(8, 1, 8)] = X[T.ramp(n * 8, 1, 8)]
        for i in range(n):
            if i > 1:
                A[T.ramp(16, 1, 8)] = X[T.ramp(i * 8, 1, 8)]
            Y[i] = T.float32(A[0])

    found = str(apply(order_loads, before))
    assert found.count('T.cuda.func_call("crossfuse_load_in_order"') == 2
    assert "A[16:24] = X[T.Ramp(i * 8, 1, 8)]" in found

    @T.prim_func
    def plain(X: T.Buffer((64,), "bfloat16"), n: T.int32):
        T.func_attr({FAST: 1})
        A = T.alloc_local((16,), "bfloat16")
        A[T.ramp(0, 1, 8)] = X[T.ramp(0, 1, 8)]
        for i in range(n):
            if i > 1:
                A[T.ramp(8, 1, 8)] = X[T.ramp(i * 8, 1, 8)]

    assert apply(order_loads, plain).same_as(plain)


def test_copies_part_what_computes_over_words() -> None:
    """Each array that is copied into has a number of its own."""

    @T.prim_func
    def before(X: T.Buffer((8,), "bfloat16"), Y: T.Buffer((2,), "float32")):
        T.func_attr({FAST: 1})
        A = T.alloc_local((8,), "bfloat16")
        B = T.alloc_local((4,), "bfloat16")
        A[T.ramp(0, 1, 8)] = X[T.ramp(0, 1, 8)]
        B[T.ramp(0, 1, 4)] = A[T.ramp(4, 1, 4)]
        Y[0] = T.float32(A[4])
        Y[1] = T.float32(B[0])

    found = str(apply(pack_registers, before))
    assert found.count('"crossfuse_opaque"') == 2


def test_arrays_that_are_used_otherwise_stay() -> None:
    """One is stored to at an odd place, one read whole, one at a place that is not known."""

    @T.prim_func
    def before(X: T.Buffer((16,), "bfloat16"), Y: T.Buffer((4,), "float32")):
        T.func_attr({FAST: 1})
        A = T.alloc_local((16,), "bfloat16")
        B = T.alloc_local((16,), "bfloat16")
        C = T.alloc_local((16,), "bfloat16")
        A[T.ramp(1, 1, 8)] = X[T.ramp(0, 1, 8)]
        Y[0] = T.float32(A[1])
        B[T.ramp(0, 1, 8)] = X[T.ramp(0, 1, 8)]
        X[T.ramp(8, 1, 8)] = B[T.ramp(0, 1, 8)]
        C[T.ramp(0, 1, 8)] = X[T.ramp(0, 1, 8)]
        for i in range(4):
            Y[i] = T.float32(C[i])

    assert_becomes(pack_registers, before, before)


def test_bounds_on_registers_stand_at_the_kernel() -> None:
    @T.prim_func
    def before(A: T.Buffer((8,), "float32")):
        T.func_attr({RESIDENT_CTAS: 3})
        with T.launch_thread("blockIdx.x", 2) as b, T.launch_thread("threadIdx.x", 4) as t:
            A[b * 4 + t] = T.float32(0)

    text = apply(bound_registers, before).script()
    assert text.count("tirx.launch_bounds_min_blocks_per_sm") == 1
    assert text.index("blockIdx.x") < text.index("min_blocks_per_sm") < text.index("threadIdx.x")
    plain = before.without_attr(RESIDENT_CTAS)
    assert apply(bound_registers, plain).same_as(plain)
