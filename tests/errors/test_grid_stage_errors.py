"""Refusals of `grid_stage`: by the primitive, by both lowerings, by the plan of a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tvm.s_tir import Schedule
from tvm.script import tirx as T

import crossfuse
from cpu.schedule.kernels import matmul, mlp, scaled_matmul
from cpu.schedule.steps import refusal
from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.markers import GRID_STAGE
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.threads import schedule_ffn
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func
from errors import tile_programs as t

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


@T.macro
def make(C, E):
    for i, j in T.grid(64, 64):
        with T.sblock("make"):
            vi, vj = T.axis.remap("SS", [i, j])
            T.sblock_attr({"crossfuse.grid_stage": 1})
            E[vi, vj] = T.Cast("float16", C[vi, vj])


@T.prim_func(s_tir=True)
def through_the_right_operand(
    A: T.Buffer((64, 128), "float16"),
    B: T.Buffer((64, 128), "float16"),
    E: T.Buffer((64, 64), "float16"),
):
    H = T.sblock_alloc_buffer((64, 128), "float16")
    P = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
    Q = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
    C = T.sblock_alloc_buffer((64, 64), "float32", scope="local")
    for _b in T.thread_binding(1, thread="blockIdx.x"):
        t.both_steps(A, B, P, Q, C)
        make(C, H)
    for _b in T.thread_binding(1, thread="blockIdx.x"):
        t.both_steps(A, H, P, Q, C)
        t.store(C, E)


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
#: Tiles of both phases, the second reduction split.
NARROW = TensorTiles(64, 8, 4), TensorTiles(64, 16, split=4)


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

    def test_intermediate_that_is_a_right_operand(self) -> None:
        assert text_of(lambda: recover(through_the_right_operand)).startswith(
            "tile-program: tensor 'H': found an intermediate that a later phase of the same "
            "kernel loads; limit: left operands of a product that grid_stage was called for. "
        )


def programs(sch: Any) -> tuple[Any, ...]:
    (kernel,) = recover(only_function(sch))
    return kernel


CHAIN = "gemm_chain:M=128,K=128,N=256,L=128,dtype=bfloat16"


class TestPlan:
    def test_phases_of_other_rows(self) -> None:
        sch = ffn(FFN, TensorTiles(128, 8, 4), TensorTiles(64, 16, split=4))
        text = text_of(lambda: lower(sch))
        assert text == (
            "grid-stage: phases of one kernel: found tiles of 64 rows in clusters of 4; limit: "
            "128 rows in clusters of 4, as in the first phase. Instead: give all phases tiles of "
            "the same rows and one cluster size."
        )
        assert text_of(lambda: plan_kernel(programs(sch), H100)) == text

    def test_clusters_of_other_sizes(self) -> None:
        """A function has one extent on each axis: phases of two functions."""
        first, _ = programs(ffn(FFN, TensorTiles(cluster=2)))
        _, second = programs(ffn(FFN, TensorTiles(cluster=4)))
        assert text_of(lambda: plan_kernel((first, second), H100)) == (
            "grid-stage: phases of one kernel: found tiles of 64 rows in clusters of 4; limit: "
            "64 rows in clusters of 2, as in the first phase. Instead: give all phases tiles of "
            "the same rows and one cluster size."
        )

    def test_reader_of_several_tiles(self) -> None:
        sch = ffn(CHAIN, TensorTiles(64, 64, 1), TensorTiles(128, 64, 1))
        assert text_of(lambda: lower(sch)) == (
            "grid-stage: tensor 'hidden': found tiles of 128 rows from 0; limit: tiles within "
            f"the 64 rows of one that is stored. {APART}"
        )

    def test_reader_of_a_part_of_a_tile(self) -> None:
        sch = ffn(CHAIN, TensorTiles(128, 64, 1), TensorTiles(64, 64, 1))
        text = text_of(lambda: lower(sch))
        assert text.startswith("grid-stage: tensor 'hidden': found tiles of 64 rows from ")
        assert text.endswith(f"; limit: tiles within the 128 rows of one that is stored. {APART}")

    def test_tiles_that_do_not_start_on_their_multiples(self) -> None:
        first, second = programs(ffn(FFN, TensorTiles(columns=64, cluster=2)))
        row, column = first.store.tile.origin
        tile = replace(first.store.tile, origin=(row, column + 8))
        moved = replace(first, store=replace(first.store, tile=tile))
        text = text_of(lambda: plan_kernel((moved, second), H100))
        assert text.startswith("grid-stage: tensor 'hidden': found tiles of 64 from ")
        assert text.endswith(f"; limit: tiles side by side. {APART}")

    def test_sums_of_several_ctas(self) -> None:
        _, second = programs(ffn(FFN, *NARROW))
        assert text_of(lambda: plan_kernel((replace(second, staged=True),), H100)) == (
            "grid-stage: tensor 'out': found sums of several CTAs; limit: tiles that one CTA "
            f"computes. {APART}"
        )


class TestClusters:
    @pytest.mark.parametrize(("rows", "tiles"), [(256, 32), (512, 64)])
    def test_more_tiles_of_a_split_reduction_than_clusters(self, rows: int, tiles: int) -> None:
        spec = f"gated_ffn:M={rows},K=256,N=512,L=4096,dtype=bfloat16"
        sch = ffn(spec, TensorTiles(128, 64, 4, stacked=False), TensorTiles(128, 256, split=4))
        assert text_of(lambda: lower(sch)) == (
            f"grid-stage: clusters of 4 on nvidia-h100: found {tiles} tiles of a split "
            "reduction; limit: 30 clusters that run at the same time, each with one tile. "
            "Instead: take wider tiles, or leave grid_stage out."
        )

    @pytest.mark.slow
    def test_what_is_chosen_fits(self, tmp_path: Any) -> None:
        """Two kernels are estimated to be faster than one here."""
        spec = "gated_ffn:M=512,K=1024,N=2048,L=4096,dtype=bfloat16"
        for placement, cooperative in (("l2", [True]), ("auto", [False, False])):
            compiled = crossfuse.compile(spec, placement=placement, directory=tmp_path / placement)
            launches = compiled.lowered.image.launches
            assert [each.cooperative for each in launches] == cooperative

    def test_given_rows_that_differ_leave_no_kernel(self) -> None:
        with pytest.raises(ScheduleRefused) as caught:
            ffn(FFN, TensorTiles(rows=128), TensorTiles(rows=64))
        others = "columns=0, cluster=0, split=1, across=0, stages=0, stacked=None"
        assert str(caught.value) == (
            "tensor-tiles: block 'gemm0_gate': found 64 x 128 x 256 x 128, for "
            f"TensorTiles(rows=128, {others}) and TensorTiles(rows=64, {others}); limit: columns "
            "in multiples of 8 that registers hold sums of, clusters of 1, 2, 4, 8 or 16 CTAs, and "
            "reductions that they share evenly; one number of rows, and one size of clusters. "
            "Instead: leave tiles open, or give rows, columns and cluster of each product."
        )

    def test_a_device_with_fewer_sms(self) -> None:
        """The first phase may go through many tiles; the second one may not."""
        sch = ffn(FFN, *NARROW)
        few = replace(H100, name="few", sms=4)
        assert text_of(lambda: lower(sch, few)).startswith(
            "grid-stage: clusters of 4 on few: found 8 tiles of a split reduction; limit: 1 "
        )
