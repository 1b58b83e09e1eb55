"""8-bit floats as float32 in the sequential check."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm.script import tirx as T

from crossfuse.emulate.llvm import run_sequential
from crossfuse.emulate.widen import widen


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


def test_functions_that_round_are_left_alone() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float8_e4m3fn")):
        for i in range(4):
            with T.sblock("round"):
                v = T.axis.spatial(4, i)
                B[v] = T.Cast("float8_e4m3fn", A[v])

    assert widen(func).same_as(func)
