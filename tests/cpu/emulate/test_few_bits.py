"""Numbers of few bits on LLVM, as a GPU computes them: in the sequential check, and in models."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te
from tvm.script import tirx as T

from crossfuse.emulate.float_operators import by_bits
from crossfuse.emulate.llvm import run_sequential
from crossfuse.workload.dtypes import float_type


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


EVERY = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)


def test_choices_of_stored_numbers_keep_their_bits() -> None:
    """Within a function TVM would make wider numbers of them."""

    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((256,), "float8_e4m3fn"),
        B: T.Buffer((256,), "float8_e4m3fn"),
        C: T.Buffer((256,), "float8_e4m3fn"),
    ):
        S = T.sblock_alloc_buffer((256,), "float8_e4m3fn")
        for i in range(256):
            with T.sblock("choose"):
                v = T.axis.spatial(256, i)
                S[v] = T.Select(
                    v % 3 == 0, A[v], T.if_then_else(v % 3 == 1, B[v], T.float8_e4m3fn(-1.5))
                )
        for i in range(256):
            with T.sblock("copy"):
                v = T.axis.spatial(256, i)
                C[v] = S[v]

    other = EVERY[::-1].copy()
    found = run_sequential(func, {"A": EVERY, "B": other}).outputs["C"]
    last = np.asarray(-1.5, EVERY.dtype)
    due = [(EVERY, other, [last] * 256)[i % 3][i] for i in range(256)]
    assert np.asarray(due, EVERY.dtype).tobytes() == found.tobytes()


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Div"])
def test_arithmetic_is_rounded_again(name: str) -> None:
    operators = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
    given = [te.placeholder((256,), "float8_e4m3fn", each) for each in ("A", "B")]
    made = te.compute((256,), lambda i: getattr(tvm.tirx, name)(given[0][i], given[1][i]), "C")
    other = np.full(256, 1.75, EVERY.dtype)
    found = run_sequential(te.create_prim_func([*given, made]), {"A": EVERY, "B": other})
    with np.errstate(all="ignore"):
        exact = operators[name](EVERY.astype(np.float32), other.astype(np.float32))
    due = np.clip(exact, -448, 448).astype(EVERY.dtype)
    np.testing.assert_array_equal(
        found.outputs["C"].astype(np.float32), due.astype(np.float32), strict=True
    )


@pytest.mark.parametrize("name", ["EQ", "NE", "LT", "LE", "GT", "GE"])
def test_comparisons_are_of_numbers(name: str) -> None:
    operators = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal}
    operators |= {"GT": np.greater, "GE": np.greater_equal}
    given = [te.placeholder((256,), "float8_e4m3fn", each) for each in ("A", "B")]

    def chosen(i: tvm.tirx.Var) -> tvm.tirx.Expr:
        test = getattr(tvm.tirx, name)(given[0][i], given[1][i])
        return tvm.tirx.Select(test, tvm.tirx.const(1, "int32"), tvm.tirx.const(0, "int32"))

    func = te.create_prim_func([*given, te.compute((256,), chosen, "C")])
    other = np.roll(EVERY, 128)
    other[::2] = EVERY[::2]
    found = run_sequential(func, {"A": EVERY, "B": other}).outputs["C"]
    due = operators[name](EVERY.astype(np.float32), other.astype(np.float32))
    np.testing.assert_array_equal(found, due.astype(np.int32))


def test_functions_without_them_are_left_alone() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float16")):
        for i in range(4):
            with T.sblock("round"):
                v = T.axis.spatial(4, i)
                B[v] = T.Cast("float16", A[v])

    assert by_bits(func).same_as(func)


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_what_is_rounded_and_widened_at_once_is_rounded(dtype: str) -> None:
    values = np.concatenate([np.linspace(-400, 400, 999), 2.0 ** np.arange(-12, 8), [0.0]])
    given = values.astype(np.float32)
    source = te.placeholder(given.shape, "float32", "A")
    made = te.compute(given.shape, lambda i: source[i].astype(dtype).astype("float32"), "C")
    func = by_bits(te.create_prim_func([source, made]))
    kernel = tvm.compile(tvm.IRModule({"main": func}), target="llvm")
    found = tvm.runtime.empty(given.shape, "float32")
    kernel["main"](tvm.runtime.tensor(given), found)
    due = given.astype(float_type(dtype).numpy).astype(np.float32)
    assert np.array_equal(found.numpy(), due)
