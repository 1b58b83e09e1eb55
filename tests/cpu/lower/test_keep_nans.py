"""Maxima and minima that keep NaN: which are replaced, and what they compute on each target."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from crossfuse import _tvm as ir
from crossfuse._autoload import register
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.lower.extract import lower
from crossfuse.lower.hidden import MAXIMUM, MINIMUM, keep_nans

LENGTH = 64
_NAN, _INF = float("nan"), float("inf")
ONE = [_NAN, 1, -1, _INF, -_INF, 3, _NAN, -_INF]
OTHER = [1, _NAN, 2, _NAN, 1, -_INF, _NAN, _INF]
ORACLE = {MAXIMUM: np.maximum, MINIMUM: np.minimum}


def names(func: Any) -> list[str]:
    """Operators of a function that keep NaN."""
    found: list[str] = []
    ir.walk(func.body, (ir.Call, lambda each: found.append(str(each.op.name))))
    return sorted(each.removeprefix("tirx.crossfuse_") for each in found if "crossfuse" in each)


def extremes(func: Any) -> int:
    """Maxima and minima that are TVM's own."""
    found: list[Any] = []
    ir.walk(func.body, (ir.tirx.Max, found.append), (ir.tirx.Min, found.append))
    return len(found)


def element_wise(value: Any, dtype: str = "float32") -> Any:
    """A function of two vectors."""
    x, z = (te.placeholder((LENGTH,), dtype, name) for name in "XZ")
    return te.create_prim_func([x, z, te.compute((LENGTH,), lambda i: value(x[i], z[i]), "Y")])


def test_element_wise_ones_are_replaced() -> None:
    clamp = element_wise(lambda x, z: tirx.min(tirx.max(x, tirx.const(0.0, "float32")), z))
    kept = keep_nans(clamp)
    assert names(kept) == ["maximum", "minimum"] and not extremes(kept)
    assert keep_nans(kept).same_as(kept)
    assert "T.crossfuse_minimum(T.crossfuse_maximum(X[v_i], T.float32(0.0)), Z[v_i])" in str(kept)


def test_what_has_none_is_the_same_function() -> None:
    plain = element_wise(lambda x, z: x + z)
    assert keep_nans(plain).same_as(plain)
    whole = element_wise(lambda x, z: tirx.max(x, z), "int32")
    assert keep_nans(whole).same_as(whole)


def test_places_stay() -> None:
    def gather(x: Any, z: Any) -> Any:
        return tirx.max(tirx.min(x, tirx.const(3.0, "float32")), z).astype("int32")

    kept = keep_nans(element_wise(gather))
    assert names(kept) == [] and extremes(kept) == 2


def softmax() -> Any:
    """Of what a clamp leaves, times what a bound of the maximum leaves."""
    zero = tirx.const(0.0, "float32")
    x = te.placeholder((4, LENGTH), "float32", "X")
    k, n = (te.reduce_axis((0, LENGTH), name) for name in "kn")
    s = te.compute(x.shape, lambda i, j: tirx.max(x[i, j], zero), "s")
    m = te.compute((4,), lambda i: te.max(s[i, k], axis=k), "m")
    d = te.compute((4,), lambda i: te.sum(te.exp(s[i, n] - m[i]), axis=n), "d")
    y = te.compute(x.shape, lambda i, j: te.exp(s[i, j] - m[i]) / d[i] * tirx.max(m[i], zero), "Y")
    return te.create_prim_func([x, y])


def test_reductions_and_what_reads_them_stay() -> None:
    """A maximum drops NaN by itself, so that its bound is one of numbers."""
    kept = keep_nans(softmax())
    assert names(kept) == ["maximum"] and extremes(kept) == 2
    alone = te.placeholder((4, LENGTH), "float32", "X")
    k = te.reduce_axis((0, LENGTH), "k")
    top = te.create_prim_func([alone, te.compute((4,), lambda i: te.max(alone[i, k], axis=k))])
    assert names(keep_nans(top)) == [] and extremes(keep_nans(top)) == 1


def test_steps_of_rewritten_reductions_stay() -> None:
    """In named values, in other buffers than that of the state, beside numbers of all kinds."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")) -> None:
        state = T.sblock_alloc_buffer((1,), "float32", scope="local")
        best = T.sblock_alloc_buffer((1,), "float32", scope="local")
        raised = T.sblock_alloc_buffer((1,), "float32", scope="local")
        state[0] = T.float32(0)
        for i in range(8):
            found: T.let[T.float32] = T.max(T.fabs(X[i]), state[0])
            best[0] = T.max(found, state[0])
            state[0] = T.Select(best[0] > T.float32(1), best[0], T.float32(2) * best[0])
        raised[0] = T.min(state[0] * T.float32(2), T.float32(3))
        for i in range(8):
            Y[i] = T.max(X[i], T.Cast("float32", i)) + T.max(raised[0], T.Cast("float32", i))

    kept = keep_nans(func)
    assert names(kept) == ["maximum"] and extremes(kept) == 4
    assert "T.crossfuse_maximum(X[i], T.Cast" in str(kept)


def test_what_others_may_write_is_no_extreme() -> None:
    """A parameter that nothing sets to a number, a view, and a buffer whose address is taken."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")) -> None:
        local = T.sblock_alloc_buffer((1,), "float32", scope="local")
        local[0] = T.float32(0)
        T.evaluate(T.call_extern("int32", "fill", T.address_of(local[0])))
        for i in range(8):
            X[i] = T.max(X[i], T.float32(0))
            Y[i] = T.min(local[0], T.float32(1))

    kept = keep_nans(func)
    assert names(kept) == ["maximum", "minimum"] and not extremes(kept)


def test_a_deep_expression_takes_no_time() -> None:

    x, z = (tirx.Var(name, "float32") for name in "xz")
    buffer = tirx.decl_buffer((1,), "float32", "Y")
    value = x
    for _ in range(60):
        value = tirx.Max(tirx.Min(value, tirx.const(2.0, "float32")), z)
    func = tirx.PrimFunc([x, z, buffer], ir.BufferStore(buffer, value, [0]))
    assert len(names(keep_nans(func))) == 120


@pytest.fixture(scope="module")
def given() -> dict[str, np.ndarray]:
    repeated = LENGTH // len(ONE)
    return {n: np.array(v * repeated, "float32") for n, v in (("X", ONE), ("Z", OTHER))}


def scheduled(func: Any, *, vector: int, gpu: bool) -> Any:
    sch = s_tir.Schedule(func)
    (loop,) = sch.get_loops(sch.get_sblock("Y"))
    outer, middle, inner = sch.split(loop, [None, 4, vector])
    if gpu:
        sch.bind(outer, "blockIdx.x")
        sch.bind(middle, "threadIdx.x")
    sch.vectorize(inner)
    return sch


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [MAXIMUM, MINIMUM])
def test_numbers_on_the_cpu(name: str, dtype: str, given: dict[str, np.ndarray]) -> None:
    """Both orders of operands, in vectors."""
    node = {MAXIMUM: tirx.max, MINIMUM: tirx.min}[name]
    inputs = {key: each.astype(np.dtype(dtype)) for key, each in given.items()}
    due = ORACLE[name](*(each.astype("float64") for each in inputs.values()))
    for value in (lambda x, z: node(x, z), lambda x, z: node(z, x)):
        got = run_sequential(scheduled(element_wise(value, dtype), vector=8, gpu=False), inputs)
        np.testing.assert_array_equal(got.outputs["Y"].astype("float64"), due)


@pytest.mark.parametrize(
    ("dtype", "vector", "call"),
    [
        ("float32", 1, "crossfuse_{}(X_ptr["),
        ("float32", 2, "crossfuse_{}(*(float2*)(X_ptr"),
        ("float32", 4, "crossfuse_{}(*(float4*)(X_ptr"),
        ("float64", 1, " == "),
        ("bfloat16", 1, "crossfuse_{}("),
        ("float16", 2, "crossfuse_{}("),
    ],
)
@pytest.mark.parametrize("name", [MAXIMUM, MINIMUM])
def test_kernels(
    name: str, dtype: str, vector: int, call: str, given: dict[str, np.ndarray]
) -> None:
    node = {MAXIMUM: tirx.max, MINIMUM: tirx.min}[name]
    inputs = {key: each.astype(np.dtype(dtype)) for key, each in given.items()}
    sch = scheduled(element_wise(lambda x, z: node(x, z), dtype), vector=vector, gpu=True)
    image = lower(sch).image
    assert call.format(name.rpartition("_")[2]) in image.cuda
    report = emulate(image, inputs)
    report.raise_if_wrong()
    due = ORACLE[name](*(each.astype("float64") for each in inputs.values()))
    np.testing.assert_array_equal(report.outputs["Y"].astype("float64"), due)


def test_stock_builds_have_the_operators() -> None:
    """A module without our marks goes through TVM's own pipeline, and other targets compare."""
    register()
    func = keep_nans(element_wise(lambda x, z: tirx.max(x, z)))
    text = tvm.tirx.build(func, target="c").inspect_source()
    assert " < " in text and " == " in text and "crossfuse" not in text
