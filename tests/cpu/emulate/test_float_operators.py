"""Conversions that models compute by bits on LLVM, as a GPU computes them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te

from crossfuse.emulate.float_operators import by_bits
from crossfuse.workload.dtypes import float_type


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
