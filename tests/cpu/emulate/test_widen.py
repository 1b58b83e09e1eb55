"""8-bit floats as float32 in the sequential check."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm.script import tirx as T

from crossfuse.emulate.float_operators import widen
from crossfuse.emulate.llvm import run_sequential


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_value_is_kept(dtype: str) -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((256,), dtype), B: T.Buffer((256,), "float32")):
        S = T.sblock_alloc_buffer((256,), dtype, scope="shared")
        for t in T.thread_binding(256, thread="threadIdx.x"):
            with T.sblock("stage"):
                v = T.axis.spatial(256, t)
                S[v] = A[v]
            with T.sblock("widen"):
                v = T.axis.spatial(256, t)
                B[v] = T.Cast("float32", S[v])

    values = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    report = run_sequential(func, {"A": values})
    np.testing.assert_array_equal(report.outputs["B"], values.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("widened", [False, True], ids=["stored", "widened at once"])
def test_rounding_is_to_the_nearest_even_and_saturates(dtype: str, widened: bool) -> None:
    @T.prim_func(s_tir=True)
    def store(A: T.Buffer((4096,), "float32"), B: T.Buffer((4096,), dtype)):
        for i in range(4096):
            with T.sblock("round"):
                v = T.axis.spatial(4096, i)
                B[v] = T.Cast(dtype, A[v])

    @T.prim_func(s_tir=True)
    def widen_at_once(A: T.Buffer((4096,), "float32"), B: T.Buffer((4096,), "float32")):
        for i in range(4096):
            with T.sblock("round"):
                v = T.axis.spatial(4096, i)
                B[v] = T.Cast("float32", T.Cast(dtype, A[v]))

    kind = ml_dtypes.finfo(dtype)
    largest, least = float(kind.max), float(kind.smallest_subnormal)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4096) * 2.0 ** rng.integers(-20, 9, 4096)).astype(np.float32)
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    between = (finite[1:] + finite[:-1]) / 2  # halfway: to the even one
    x[: between.size] = between
    x[-8:] = [0, -0.0, largest, 1e30, -1e30, least / 2, 3 * least / 2, np.nan]
    due = np.where(np.isnan(x), x, np.clip(x, -largest, largest)).astype(dtype).astype(np.float32)
    found = run_sequential(widen_at_once if widened else store, {"A": x}).outputs["B"]
    np.testing.assert_array_equal(found.astype(np.float32), due)


def test_numbers_are_chosen_as_they_are() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((8,), "float8_e4m3fn"), B: T.Buffer((8,), "float8_e4m3fn")):
        for i in range(8):
            with T.sblock("choose"):
                v = T.axis.spatial(8, i)
                B[v] = T.if_then_else(v < 4, A[v], T.float8_e4m3fn(0.5))

    values = np.arange(8, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    found = run_sequential(func, {"A": values}).outputs["B"].astype(np.float32)
    np.testing.assert_array_equal(found, [*values[:4].astype(np.float32), 0.5, 0.5, 0.5, 0.5])


def test_functions_that_compute_with_them_are_left_alone() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "float8_e4m3fn"), B: T.Buffer((4,), "float8_e4m3fn")):
        for i in range(4):
            with T.sblock("add"):
                v = T.axis.spatial(4, i)
                B[v] = A[v] + A[v]

    assert widen(func).same_as(func)


def test_functions_without_them_are_left_alone() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float16")):
        for i in range(4):
            with T.sblock("round"):
                v = T.axis.spatial(4, i)
                B[v] = T.Cast("float16", A[v])

    assert widen(func).same_as(func)


def test_bfloat16_in_a_named_value() -> None:
    """TVM converts what is stored only; the bits of 1 would be the integer 16256."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "bfloat16"), B: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("double"):
                v = T.axis.spatial(4, i)
                wide: T.let[T.float32] = T.Cast("float32", A[v])
                B[v] = wide * T.float32(2)

    values = np.array([1, -0.5, np.inf, 3e-39], ml_dtypes.bfloat16)
    found = run_sequential(func, {"A": values}).outputs["B"]
    np.testing.assert_array_equal(found, 2 * values.astype(np.float32))
