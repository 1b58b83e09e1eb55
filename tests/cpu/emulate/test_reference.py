"""References of functions without a spec, held against those of the specs that they come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossfuse.emulate.llvm import draw, in_float64, limits, parameters
from crossfuse.errors import CheckFailed, WorkloadRefused
from crossfuse.workload import prim_func, resolve
from crossfuse.workload.tolerances import judge, tolerance

pytest.importorskip("tvm")

SPECS = (
    "gemm:M=16,K=64,N=48,dtype=float16,weights=kn,act=gelu",
    "gemm_chain:M=16,K=64,N=256,L=64,dtype=bfloat16,act=relu,weights=nk",
    "gated_ffn:M=16,K=64,N=96,L=32,dtype=float16,act=silu,bias=first+last",
    "gated_ffn:M=16,K=256,N=128,L=64,dtype=float8_e4m3fn,weights=nk",
    "conv_chain:batch=1,H=8,W=8,IC=8,OC1=8,OC2=8,k1=3,k2=1,dtype=float16",
)


@pytest.mark.parametrize("text", SPECS)
def test_the_function_of_a_spec_has_the_reference_of_the_spec(text: str) -> None:
    spec = resolve(text)
    func = prim_func(spec)
    inputs = draw(parameters(func))
    found, due = limits(func, inputs), tolerance(spec, inputs)
    size = np.abs(due.reference).max()
    assert 0.01 < size < 100
    assert np.abs(found.reference - due.reference).max() < 1e-12 * size
    # Separate kernels round at the same places, in another order of sums.
    off = np.abs(found.unfused.astype(np.float64) - due.unfused.astype(np.float64)).max()
    assert off <= due.absolute.max()
    assert judge(found, due.unfused, text).worst <= 1
    wrong = due.unfused.astype(np.float64)
    wrong[(0,) * wrong.ndim] += 0.5 * size
    with pytest.raises(CheckFailed, match="element-error"):
        judge(found, wrong.astype(due.unfused.dtype), text)


def made(*tensors: Any) -> Any:
    from tvm import te

    return te.create_prim_func(list(tensors))


def test_integers_are_exact() -> None:
    from tvm import te

    a = te.placeholder((8, 32), "int8", name="a")
    b = te.placeholder((32, 16), "int8", name="b")
    k = te.reduce_axis((0, 32), "k")
    out = te.compute(
        (8, 16),
        lambda i, j: te.sum(a[i, k].astype("int32") * b[k, j].astype("int32"), k),
        name="out",
    )
    func = made(a, b, out)
    inputs = draw(parameters(func))
    assert inputs["a"].min() < 0 < inputs["a"].max()
    found = limits(func, inputs)
    exact = inputs["a"].astype(np.int32) @ inputs["b"].astype(np.int32)
    assert (found.unfused == exact).all()
    assert not found.absolute.any()
    judge(found, exact, "integers")
    exact[3, 5] += 1
    with pytest.raises(CheckFailed, match="element-error"):
        judge(found, exact, "integers")


def test_integers_become_numbers_where_the_function_says_so() -> None:
    from tvm import te

    weights = te.placeholder((64,), "int8", name="weights")
    scale = te.placeholder((64,), "float16", name="scale")
    out = te.compute((64,), lambda i: weights[i].astype("float16") * scale[i], name="out")
    func = made(weights, scale, out)
    inputs = draw(parameters(func))
    exact = inputs["weights"].astype(np.float64) * inputs["scale"].astype(np.float64)
    assert (limits(func, inputs).reference == exact).all()
    dtypes = [str(each.ty.dtype) for each in in_float64(func).params]
    assert dtypes == ["int8", "float64", "float64"]


def test_what_has_no_reference_is_refused() -> None:
    from tvm import te, tirx

    x = te.placeholder((64,), "float32", name="x")
    bits = te.compute((64,), lambda i: tirx.reinterpret("int32", x[i]), name="bits")
    func = made(x, bits)
    with pytest.raises(WorkloadRefused, match=r"call of tirx.reinterpret; limit: loads"):
        limits(func, draw(parameters(func)))
    named = tirx.Var("named", "float32")
    squares = te.compute((64,), lambda i: tirx.Let(named, x[i] + 1, named * named), name="squares")
    with pytest.raises(WorkloadRefused, match="found a variable of float32, named; limit"):
        in_float64(made(x, squares))
    first = te.compute((64,), lambda i: -x[i], name="first")
    second = te.compute((64,), lambda i: x[i] + 1, name="second")
    func = made(x, first, second)
    with pytest.raises(WorkloadRefused, match=r"found outputs first, second of 3 parameters"):
        limits(func, draw(parameters(func)))
