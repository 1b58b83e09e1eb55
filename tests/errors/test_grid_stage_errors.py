"""Refusals of `grid_stage`: by the primitive, by both lowerings, by the plan of a kernel."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from cpu.schedule.kernels import matmul, mlp, scaled_matmul
from cpu.schedule.steps import refusal
from crossfuse.errors import LoweringRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.recover import recover
from crossfuse.schedule.markers import GRID_STAGE
from crossfuse.schedule.rules.ffn import schedule_ffn
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func

H100 = device("nvidia-h100")
INTERMEDIATE = (
    "limit: an intermediate in global memory that a later nest loads. Instead: call it for the "
    "block that stores the intermediate, before its scope is changed."
)
LIVE = (
    "limit: SBlockRV of a block of this schedule that still exists. Instead: take it anew from "
    "sch.get_sblock(name); primitives that make loops or blocks anew end the variables of the old "
    "ones."
)
APART = (
    "Instead: give both phases tiles of the same rows, or leave grid_stage out: then the "
    "intermediate passes from one kernel to the next."
)


@T.prim_func(s_tir=True)
def output_that_is_loaded(
    A: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32"), D: T.Buffer((8, 8), "float32")
):
    for i, j in T.grid(8, 8):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] + T.float32(1)
    for i, j in T.grid(8, 8):
        with T.sblock("D"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = C[vi, vj] * T.float32(2)


class TestPrimitive:
    @pytest.mark.parametrize(
        ("func", "block"), [(matmul, "C"), (scaled_matmul, "D"), (output_that_is_loaded, "C")]
    )
    def test_output(self, func: Any, block: str) -> None:
        sch = Schedule(func)
        stored = sch.get_sblock(block)
        assert refusal(sch, lambda: sch.grid_stage(stored)) == (
            f"grid_stage: block '{block}': found '{block}', an output of the function; "
            f"{INTERMEDIATE}"
        )

    @pytest.mark.parametrize("scope", ["shared", "shared.dyn", "local", "shared.dsm"])
    def test_intermediate_that_is_not_in_global_memory(self, scope: str) -> None:
        sch = Schedule(scaled_matmul)
        block = sch.get_sblock("C")
        sch.set_scope(block, 0, scope)
        assert refusal(sch, lambda: sch.grid_stage(block)) == (
            f"grid_stage: block 'C': found 'C_{scope}' in scope {scope}; {INTERMEDIATE}"
        )

    def test_block_that_was_inlined(self) -> None:
        sch = Schedule(mlp)
        block = sch.get_sblock("H")
        sch.compute_inline(block)
        assert refusal(sch, lambda: sch.grid_stage(block)) == (
            f"grid_stage: argument 'block': found a block that no longer exists; {LIVE}"
        )

    def test_block_of_another_schedule(self) -> None:
        sch, other = Schedule(scaled_matmul), Schedule(scaled_matmul)
        foreign = other.get_sblock("C")
        assert refusal(sch, lambda: sch.grid_stage(foreign)) == (
            f"grid_stage: argument 'block': found a block of another schedule; {LIVE}"
        )

    @pytest.mark.parametrize("item", [None, "C", 3])
    def test_what_is_no_block(self, item: Any) -> None:
        sch = Schedule(scaled_matmul)
        assert refusal(sch, lambda: sch.grid_stage(item)) == (
            f"grid_stage: argument 'block': found {type(item).__name__}; {LIVE}"
        )


def text_of(call: Any) -> str:
    with pytest.raises(LoweringRefused) as caught:
        call()
    return str(caught.value)


def ffn(text: str, first: TensorTiles | None = None, second: TensorTiles | None = None) -> Any:
    return schedule_tiled_ffn(prim_func(parse(text)), first=first, second=second)


FFN = "gated_ffn:M=64,K=128,N=256,L=128,dtype=bfloat16"


class TestGeneralLowering:
    def test_function_without_pipelined_loops(self) -> None:
        sch = Schedule(scaled_matmul)
        sch.grid_stage(sch.get_sblock("C"))
        for name in ("C", "D"):
            sch.bind(sch.get_loops(sch.get_sblock(name))[0], "blockIdx.x")
        assert text_of(lambda: lower(sch)) == (
            "grid-stage: block 'C': found an intermediate that stays in L2, in a kernel of the "
            "general lowering; limit: kernels of the Hopper pipeline, in which CTAs tell each "
            "other what is stored. Instead: schedule both products with stages "
            "(crossfuse.schedule.rules.tiled_ffn), or leave grid_stage out."
        )

    def test_cluster_function(self) -> None:
        """A mark that the primitive would not set."""
        sch = schedule_ffn(
            prim_func(parse("gemm_chain:M=4,K=16,N=16,L=16,dtype=float16")), cluster=2
        )
        sch.annotate(sch.get_sblock("hidden"), GRID_STAGE, 1)
        assert text_of(lambda: lower(sch)).startswith(
            "grid-stage: block 'hidden': found an intermediate that stays in L2, in a kernel of "
            "the general lowering; "
        )


class TestRecovery:
    def test_block_inside_a_nest(self) -> None:
        sch = schedule_tiled_gemm(prim_func(parse("gemm:M=64,N=64,K=64,dtype=float16,weights=nk")))
        sch.annotate(sch.get_sblock("gemm0"), GRID_STAGE, 1)
        text = text_of(lambda: lower(sch))
        assert text.startswith(
            "tile-program: blocks 'gemm0': found grid_stage of a block inside a nest; limit: "
            "grid_stage of blocks that store what a nest computes. "
        )

    def test_further_block_inside_a_nest(self) -> None:
        sch = ffn(FFN)
        sch.annotate(sch.get_sblock("gemm1"), GRID_STAGE, 1)
        assert text_of(lambda: recover(only_function(sch))).startswith(
            "tile-program: blocks 'hidden', 'gemm1': found grid_stage of a block inside a nest; "
        )
