"""The unscheduled functions of specs: their form, and their values on LLVM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from crossfuse.workload import WorkloadSpec, adversarial_inputs, check, parse, random_inputs
from crossfuse.workload.build import prim_func
from crossfuse.workload.dtypes import float_type


def run(compiled: Any, spec: WorkloadSpec, inputs: dict[str, np.ndarray]) -> np.ndarray:
    output = tvm.runtime.tensor(np.zeros(spec.output, float_type(spec.out).numpy))
    compiled(*map(tvm.runtime.tensor, inputs.values()), output)
    return output.numpy()


@T.prim_func(s_tir=True, private=True)
def gated(
    A: T.Buffer((4, 8), "bfloat16"),
    B_gate: T.Buffer((12, 8), "bfloat16"),
    B_up: T.Buffer((12, 8), "bfloat16"),
    D: T.Buffer((6, 12), "bfloat16"),
    out: T.Buffer((4, 6), "bfloat16"),
):
    T.func_attr({"tirx.noalias": True})
    gemm0_gate = T.sblock_alloc_buffer((4, 12))
    gemm0_up = T.sblock_alloc_buffer((4, 12))
    hidden = T.sblock_alloc_buffer((4, 12), "bfloat16")
    gemm1 = T.sblock_alloc_buffer((4, 6))
    for i, j, k in T.grid(4, 12, 8):
        with T.sblock("gemm0_gate"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm0_gate[v_i, v_j] = T.float32(0)
            gemm0_gate[v_i, v_j] = gemm0_gate[v_i, v_j] + T.Cast("float32", A[v_i, v_k]) * T.Cast(
                "float32", B_gate[v_j, v_k]
            )
    for i, j, k in T.grid(4, 12, 8):
        with T.sblock("gemm0_up"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm0_up[v_i, v_j] = T.float32(0)
            gemm0_up[v_i, v_j] = gemm0_up[v_i, v_j] + T.Cast("float32", A[v_i, v_k]) * T.Cast(
                "float32", B_up[v_j, v_k]
            )
    for i, j in T.grid(4, 12):
        with T.sblock("hidden"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            hidden[v_i, v_j] = T.Cast(
                "bfloat16",
                gemm0_gate[v_i, v_j] * T.sigmoid(gemm0_gate[v_i, v_j]) * gemm0_up[v_i, v_j],
            )
    for i, j, k in T.grid(4, 6, 12):
        with T.sblock("gemm1"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm1[v_i, v_j] = T.float32(0)
            gemm1[v_i, v_j] = gemm1[v_i, v_j] + T.Cast("float32", hidden[v_i, v_k]) * T.Cast(
                "float32", D[v_j, v_k]
            )
    for i, j in T.grid(4, 6):
        with T.sblock("out"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            out[v_i, v_j] = T.Cast("bfloat16", gemm1[v_i, v_j])


@T.prim_func(s_tir=True, private=True)
def chain(
    A: T.Buffer((1, 3), "float32"),
    B: T.Buffer((3, 5), "float32"),
    D: T.Buffer((5, 2), "float32"),
    out: T.Buffer((1, 2), "float16"),
):
    T.func_attr({"tirx.noalias": True})
    gemm0 = T.sblock_alloc_buffer((1, 5))
    hidden = T.sblock_alloc_buffer((1, 5))
    gemm1 = T.sblock_alloc_buffer((1, 2))
    for i, j, k in T.grid(1, 5, 3):
        with T.sblock("gemm0"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm0[v_i, v_j] = T.float32(0)
            gemm0[v_i, v_j] = gemm0[v_i, v_j] + A[v_i, v_k] * B[v_k, v_j]
    for i, j in T.grid(1, 5):
        with T.sblock("hidden"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            hidden[v_i, v_j] = T.max(gemm0[v_i, v_j], T.float32(0))
    for i, j, k in T.grid(1, 2, 5):
        with T.sblock("gemm1"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm1[v_i, v_j] = T.float32(0)
            gemm1[v_i, v_j] = gemm1[v_i, v_j] + hidden[v_i, v_k] * D[v_k, v_j]
    for i, j in T.grid(1, 2):
        with T.sblock("out"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            out[v_i, v_j] = T.Cast("float16", gemm1[v_i, v_j])


@T.prim_func(s_tir=True, private=True)
def largest(
    A: T.Buffer((2, 3), "float8_e4m3fn"),
    B: T.Buffer((3, 5), "float8_e4m3fn"),
    out: T.Buffer((2, 5), "float32"),
):
    T.func_attr({"tirx.noalias": True})
    gemm0 = T.sblock_alloc_buffer((2, 5))
    for i, j, k in T.grid(2, 5, 3):
        with T.sblock("gemm0"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm0[v_i, v_j] = T.min_value("float32")
            gemm0[v_i, v_j] = T.max(
                gemm0[v_i, v_j], T.Cast("float32", A[v_i, v_k]) * T.Cast("float32", B[v_k, v_j])
            )
    for i, j in T.grid(2, 5):
        with T.sblock("out"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            out[v_i, v_j] = gemm0[v_i, v_j]


@T.prim_func(s_tir=True)
def with_epilogue(
    A: T.Buffer((2, 3), "float8_e4m3fn"),
    B: T.Buffer((3, 5), "float8_e4m3fn"),
    scale0: T.Buffer((1,), "float32"),
    bias0: T.Buffer((5,), "bfloat16"),
    residual: T.Buffer((2, 5), "float16"),
    out: T.Buffer((2, 5), "float16"),
) -> None:
    T.func_attr({"tirx.noalias": True})
    gemm0 = T.sblock_alloc_buffer((2, 5))
    for i, j, k in T.grid(2, 5, 3):
        with T.sblock("gemm0"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm0[v_i, v_j] = T.float32(0.0)
            gemm0[v_i, v_j] += T.Cast("float32", A[v_i, v_k]) * T.Cast("float32", B[v_k, v_j])
    for i, j in T.grid(2, 5):
        with T.sblock("out"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            out[v_i, v_j] = T.Cast(
                "float16",
                T.max(gemm0[v_i, v_j] * scale0[0] + T.Cast("float32", bias0[v_j]), T.float32(0.0))
                + T.Cast("float32", residual[v_i, v_j]),
            )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gated_ffn:M=4,K=8,N=12,L=6,dtype=bfloat16", gated),
        ("gemm_chain:M=1,K=3,N=5,L=2,dtype=float32,out=float16", chain),
        ("gemm:M=2,K=3,N=5,dtype=float8_e4m3fn,out=float32,combine=max", largest),
        (
            "gemm:M=2,K=3,N=5,dtype=e4m3,out=f16,act=relu,bias=last,scale=last,residual=out",
            with_epilogue,
        ),
    ],
)
def test_the_canonical_form(text: str, expected: Any) -> None:
    func = prim_func(parse(text))
    tvm.ir.assert_structural_equal(func, expected.with_attr("global_symbol", "main"))
    # Structural equality ignores names, which messages and plans show.
    assert [b.name for b in func.params] == [b.name for b in expected.params]
    assert block_names(func) == block_names(expected)


def block_names(func: Any) -> list[str]:
    schedule = tvm.s_tir.Schedule(func)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    return [schedule.get(block).name_hint for block in blocks]


@pytest.mark.parametrize("weights", ["kn", "nk"])
def test_weights_are_read_as_they_are_stored(weights: str) -> None:
    spec = parse(f"gated_ffn:M=4,K=8,N=12,L=6,weights={weights}")
    shapes = [tuple(map(int, buffer.ty.shape)) for buffer in prim_func(spec).params]
    assert shapes == [*spec.inputs.values(), spec.output]
    # Neither copies nor transpositions: the three products, the intermediate, the output.
    assert block_names(prim_func(spec)) == ["gemm0_gate", "gemm0_up", "hidden", "gemm1", "out"]


@pytest.mark.parametrize("combine", ["sum", "prod", "max", "min"])
def test_every_reduction_can_be_factored(combine: str) -> None:
    """rfactor knows only reductions whose combiner and identity it can read."""
    schedule = tvm.s_tir.Schedule(prim_func(parse(f"gemm:M=4,K=8,N=4,combine={combine}")))
    *_, reduction = schedule.get_loops(schedule.get_sblock("gemm0"))
    outer, _ = schedule.split(reduction, [2, None])
    schedule.rfactor(outer, 0)


SHAPES = ("M=1,K=33,N=65,L=17", "M=24,K=64,N=40,L=32")
TEXTS = [
    *(
        f"{kind}:{shape},dtype={dtype},act={act},weights={weights}"
        for kind in ("gated_ffn", "gemm_chain")
        for shape in SHAPES
        for dtype, act, weights in (
            ("f16", "silu", "nk"),
            ("bf16", "gelu_tanh", "kn"),
            ("f32", "gelu", "nk"),
            ("f16", "max(x,0.1*x)**2/(1+abs(x))", "kn"),
        )
    ),
    *(
        f"gemm:M=5,K=33,N=7,dtype={dtype},combine={combine}"
        for dtype in ("f16", "bf16", "f32")
        for combine in ("sum", "prod", "max", "min")
    ),
    "gemm:M=8,K=2048,N=8,dtype=f32",
    *(
        f"{kind}:M=5,K=33,N=21,L=17,dtype={dtype},out={out},bias={places},scale={places},residual=in"
        for kind in ("gated_ffn", "gemm_chain")
        for dtype, out, places in (
            ("f16", "f16", "first"),
            ("bf16", "f32", "last"),
            ("f32", "bf16", "first+last"),
        )
    ),
    "gemm:M=6,K=33,N=7,dtype=bf16,act=gelu,bias=last,scale=last,residual=out",
    "gemm:M=6,K=33,N=7,dtype=f32,combine=max,bias=last,scale=last",
    "gated_gemm:M=6,K=33,N=7,dtype=bf16,act=gelu,bias=last,scale=last,residual=out",
    "gemm_chain:M=8,K=16,N=32,L=8,dtype=bf16,out=f32",
    "gemm:M=3,K=9,N=4,dtype=f16,act=exp(min(x,1))+sqrt(abs(x))",
]


@pytest.mark.parametrize("text", TEXTS)
def test_values_on_llvm(text: str) -> None:
    spec = parse(text)
    compiled = tvm.compile(prim_func(spec), target="llvm")
    for name, inputs in [("random", random_inputs(spec)), *adversarial_inputs(spec)]:
        assert check(spec, inputs, run(compiled, spec, inputs)).worst <= 1, name


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_values_of_8_bit_types_on_llvm(dtype: str) -> None:
    """TVM's conversion on LLVM is wrong for zeros and denormals, so inputs are kept from them."""
    spec = parse(f"gemm:M=6,K=40,N=9,dtype={dtype},out=float32")
    kind = float_type(dtype)
    inputs = random_inputs(spec)
    for name, array in inputs.items():
        values = array.astype(np.float32)
        values = np.where(np.abs(values) < 16 * kind.smallest, np.float32(0.5), values)
        inputs[name] = values.astype(kind.numpy)
    compiled = tvm.compile(prim_func(spec), target="llvm")
    assert check(spec, inputs, run(compiled, spec, inputs)).worst <= 1
