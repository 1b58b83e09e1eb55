"""The function that a model becomes: block by block, and equal to that of the spec."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn as relax_nn
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from crossfuse.relax.outline import outline
from crossfuse.workload import parse
from crossfuse.workload.build import prim_func


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 3, 8), "float16"),
        expand: R.Tensor((12, 8), "float16"),
        expand_bias: R.Tensor((12,), "float16"),
        project: R.Tensor((12, 6), "float16"),
    ):
        with R.dataflow():
            rows = R.reshape(x, R.shape([6, 8]))
            turned = R.permute_dims(expand)
            first = R.matmul(rows, turned)
            biased = R.add(first, expand_bias)
            positive = R.nn.relu(biased)
            square = R.power(positive, R.const(2.0, "float16"))
            again = R.reshape(square, R.shape([2, 3, 12]))
            second = R.matmul(again, project, out_dtype="float32")
            half = R.multiply(second, R.const(0.5, "float32"))
            result = R.astype(half, "float16")
            R.output(result)
        return result


@T.prim_func(s_tir=True)
def main(
    A: T.Buffer((6, 8), "float16"),
    B: T.Buffer((12, 8), "float16"),
    D: T.Buffer((12, 6), "float16"),
    expand_bias: T.Buffer((12,), "float16"),
    out: T.Buffer((6, 6), "float16"),
):
    T.func_attr({"tirx.noalias": True})
    gemm0 = T.sblock_alloc_buffer((6, 12))
    hidden = T.sblock_alloc_buffer((6, 12), "float16")
    gemm1 = T.sblock_alloc_buffer((6, 6))
    for i, j, k in T.grid(6, 12, 8):
        with T.sblock("gemm0"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm0[v_i, v_j] = T.float32(0)
            gemm0[v_i, v_j] = gemm0[v_i, v_j] + T.Cast("float32", A[v_i, v_k]) * T.Cast(
                "float32", B[v_j, v_k]
            )
    for i, j in T.grid(6, 12):
        with T.sblock("hidden"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            hidden[v_i, v_j] = T.Cast(
                "float16",
                T.max(gemm0[v_i, v_j] + T.Cast("float32", expand_bias[v_j]), T.float32(0))
                * T.max(gemm0[v_i, v_j] + T.Cast("float32", expand_bias[v_j]), T.float32(0)),
            )
    for i, j, k in T.grid(6, 6, 12):
        with T.sblock("gemm1"):
            v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
            with T.init():
                gemm1[v_i, v_j] = T.float32(0)
            gemm1[v_i, v_j] = gemm1[v_i, v_j] + T.Cast("float32", hidden[v_i, v_k]) * T.Cast(
                "float32", D[v_k, v_j]
            )
    for i, j in T.grid(6, 6):
        with T.sblock("out"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            out[v_i, v_j] = T.Cast("float16", gemm1[v_i, v_j] * T.float32(0.5))


def test_reshapes_casts_and_transpositions_fold_away() -> None:
    result = outline(Before)
    tvm.ir.assert_structural_equal(result.func, main)
    assert [buffer.name for buffer in result.func.params] == ["A", "B", "D", "expand_bias", "out"]
    assert [(a.source, a.position, a.shape) for a in result.arguments] == [
        ("x", 0, (6, 8)),
        ("expand", 1, (12, 8)),
        ("project", 3, (12, 6)),
        ("expand_bias", 2, (12,)),
    ]
    assert result.output_shape == (2, 3, 6)
    bracket = "max(gemm0[i, j] + expand_bias[j], 0)"
    assert (result.middle, result.epilogue) == (f"{bracket} * {bracket}", "gemm1[i, j] * 0.5")
    assert result.summary == (
        "gemm_chain:M=6,K=8,N=12,L=6,dtype=float16,out=float16 "
        "from A[6, 8] B[12, 8] D[12, 6] expand_bias[12]"
    )


class FeedForward(relax_nn.Module):
    """A model that never was a torch module."""

    def __init__(self, hidden: int, width: int) -> None:
        self.gate = relax_nn.Linear(hidden, width, bias=False)
        self.up = relax_nn.Linear(hidden, width, bias=False)
        self.down = relax_nn.Linear(width, hidden, bias=False)

    def forward(self, x: relax_nn.Tensor) -> Any:
        return self.down(relax_nn.op.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gated_ffn_becomes_the_function_of_its_spec(dtype: str) -> None:
    model = FeedForward(16, 24)
    model.to(dtype)
    mod, _ = model.export_tvm(spec={"forward": {"x": relax_nn.spec.Tensor((4, 16), dtype)}})
    forward = mod["forward"].with_attr("global_symbol", "main")
    func = outline(tvm.IRModule({"main": forward})).func
    expected = prim_func(parse(f"gated_ffn:M=4,K=16,N=24,L=16,dtype={dtype}"))
    tvm.ir.assert_structural_equal(func, expected)
    assert func.script() == expected.script()


def test_a_single_function_need_not_be_called_main() -> None:
    function = Before["main"].with_attr("global_symbol", "forward")
    result = outline(tvm.IRModule({"forward": function}))
    tvm.ir.assert_structural_equal(result.func, main)


def graph(dtype: str, *shapes: tuple[int, ...]) -> tuple[relax.BlockBuilder, list[relax.Var]]:
    variables = [relax.Var(f"p{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]
    return relax.BlockBuilder(), variables


def test_names_of_the_model_never_clash_with_those_of_the_form() -> None:
    shapes = {"B": (4, 8), "gemm0": (8, 5), "D": (5, 6), "A": (5,), "out": (6,), "gemm1": (6,)}
    variables = {n: relax.Var(n, relax.TensorType(s, "float32")) for n, s in shapes.items()}
    builder = relax.BlockBuilder()
    with builder.function("main", list(variables.values())):
        with builder.dataflow():
            first = relax.op.matmul(variables["B"], variables["gemm0"])
            middle = builder.emit(relax.op.multiply(builder.emit(first), variables["A"]))
            second = builder.emit(relax.op.matmul(middle, variables["D"]))
            second = builder.emit(relax.op.add(second, variables["out"]))
            output = builder.emit_output(relax.op.add(second, variables["gemm1"]))
        builder.emit_func_output(output)
    result = outline(builder.get())
    arguments = {a.name: a.source for a in result.arguments}
    assert arguments == {
        "A": "B",
        "B": "gemm0",
        "D": "D",
        "A_1": "A",
        "out_1": "out",
        "gemm1_1": "gemm1",
    }
    assert result.middle == "gemm0[i, j] * A_1[j]"


def test_one_weight_may_serve_twice() -> None:
    builder, (x, weight) = graph("float32", (3, 8), (8, 8))
    with builder.function("main", [x, weight]):
        with builder.dataflow():
            first = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(x, weight))))
            turned = builder.emit(relax.op.permute_dims(weight))
            output = builder.emit_output(relax.op.matmul(first, turned))
        builder.emit_func_output(output)
    result = outline(builder.get())
    assert [(a.name, a.position) for a in result.arguments] == [("A", 0), ("B", 1), ("D", 1)]


def test_results_in_float32_of_a_2_byte_model_stay_float32() -> None:
    """What TVM's own torch importer makes of Linear without bias."""
    builder, (x, first, second) = graph("float16", (3, 8), (8, 5), (5, 4))
    with builder.function("main", [x, first, second]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, first, out_dtype="float32"))
            middle = builder.emit(relax.op.astype(relax.op.tanh(product), "float16"))
            output = builder.emit_output(relax.op.matmul(middle, second, out_dtype="float32"))
        builder.emit_func_output(output)
    result = outline(builder.get())
    assert (result.dtype, result.output_dtype) == ("float16", "float32")
    expected = prim_func(parse("gemm_chain:M=3,K=8,N=5,L=4,dtype=float16,out=float32,act=tanh"))
    tvm.ir.assert_structural_equal(result.func, expected)
