"""Refusals of `cluster_bind` and `verify_cluster`; each leaves the schedule as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from cpu.schedule.kernels import chain, matmul, scaled_matmul
from cpu.schedule.steps import loops_of, refusal
from crossfuse.errors import ScheduleRefused


def annotate_axis(sch: Any, loop: Any, axis: str) -> None:
    """What nothing but `cluster_bind` should do."""
    sch.parallel(loop)
    sch.annotate(loop, "crossfuse.cluster_axis", axis)


@T.prim_func(s_tir=True)
def symbolic(a: T.handle, b: T.handle):
    n = T.int32()
    A = T.match_buffer(a, (n, 16), "float32")
    B = T.match_buffer(b, (n, 16), "float32")
    for i, j in T.grid(n, 16):
        with T.sblock("B"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj]


class TestClusterBind:
    def test_extent_over_16(self) -> None:
        sch, _, _, k = loops_of(matmul)
        assert refusal(sch, lambda: sch.cluster_bind(k)) == (
            "cluster_bind: loop 'k': found extent 32; limit: 1 to 16 CTAs in a cluster. Instead: "
            "split the loop so that one part has at most that extent, and pass that part."
        )

    def test_cluster_over_16_on_several_axes(self) -> None:
        sch, i, j, _ = loops_of(matmul)
        sch.cluster_bind(i)
        rank, _ = sch.split(j, [4, None])
        assert refusal(sch, lambda: sch.cluster_bind(rank, "y")) == (
            "cluster_bind: loop 'j_0': found a cluster of 32 CTAs (x=8 x y=4); limit: 16 CTAs "
            "over all axes. Instead: bind a smaller loop on one of the axes."
        )

    def test_unequal_extents_on_an_axis(self) -> None:
        sch, i, _, _ = loops_of(scaled_matmul)
        sch.cluster_bind(i)
        rows, _ = sch.get_loops(sch.get_sblock("D"))
        rank, _ = sch.split(rows, [4, None])
        assert refusal(sch, lambda: sch.cluster_bind(rank)) == (
            "cluster_bind: loop 'i_0': found extent 4 on axis x; limit: extent 8, as loop 'i' has "
            "on that axis. Instead: split both loops by the same number of CTAs."
        )

    def test_unknown_axis(self) -> None:
        sch, i, _, _ = loops_of(matmul)
        assert refusal(sch, lambda: sch.cluster_bind(i, "w")) == (
            "cluster_bind: loop 'i': found axis 'w'; limit: 'x', 'y' or 'z'. Instead: name one of "
            "the three cluster axes."
        )

    @pytest.mark.parametrize(
        ("prepare", "state"),
        [
            (lambda sch, loop: sch.bind(loop, "threadIdx.x"), "bound to threadIdx.x"),
            (lambda sch, loop: sch.unroll(loop), "unrolled"),
            (lambda sch, loop: sch.parallel(loop), "parallel"),
            (lambda sch, loop: sch.cluster_bind(loop, "z"), "bound to cluster axis z"),
        ],
        ids=["bound", "unrolled", "parallel", "cluster-bound"],
    )
    def test_loop_that_has_a_kind(self, prepare: Callable[[Any, Any], None], state: str) -> None:
        sch, i, _, _ = loops_of(matmul)
        prepare(sch, i)
        assert refusal(sch, lambda: sch.cluster_bind(i)) == (
            f"cluster_bind: loop 'i': found a loop that is already {state}; limit: a serial loop. "
            "Instead: split the loop and bind one of the parts."
        )

    def test_vectorised_loop(self) -> None:
        sch, i, j, k = loops_of(matmul)
        sch.reorder(k, i, j)
        sch.vectorize(j)
        assert "a loop that is already vectorized" in refusal(sch, lambda: sch.cluster_bind(j))

    def test_reduction_loop(self) -> None:
        sch, _, _, k = loops_of(matmul)
        rank, _ = sch.split(k, [4, None])
        assert refusal(sch, lambda: sch.cluster_bind(rank)) == (
            "cluster_bind: loop 'k_0': found a reduction loop of block 'C'; limit: a "
            "data-parallel loop. Instead: bind a loop over output elements; for a reduction loop "
            "call dsm_reduce, which makes one partial result a CTA and combines them."
        )

    def test_symbolic_extent(self) -> None:
        sch, i, _ = loops_of(symbolic, "B")
        assert refusal(sch, lambda: sch.cluster_bind(i)) == (
            "cluster_bind: loop 'i': found extent n; limit: a constant extent. Instead: split the "
            "loop by a constant factor first."
        )

    @pytest.mark.parametrize("inner_first", [True, False])
    def test_second_loop_of_a_nest_on_the_axis(self, inner_first: bool) -> None:
        sch, i, j, _ = loops_of(matmul)
        (rank, _), (other, _) = sch.split(i, [4, None]), sch.split(j, [4, None])
        first, second = (other, rank) if inner_first else (rank, other)
        sch.cluster_bind(first)
        names = ("i_0", "j_0") if inner_first else ("j_0", "i_0")
        assert refusal(sch, lambda: sch.cluster_bind(second)) == (
            f"cluster_bind: loop '{names[0]}': found loop '{names[1]}' of the same nest bound to "
            "axis x too; limit: one loop a nest on each cluster axis. Instead: bind the second "
            "loop to another axis, or fuse the two loops and bind that."
        )

    def test_loop_that_a_split_ended(self) -> None:
        sch, i, _, _ = loops_of(matmul)
        sch.split(i, [4, None])
        assert refusal(sch, lambda: sch.cluster_bind(i)) == (
            "cluster_bind: argument 'loop': found a loop that no longer exists; limit: LoopRV of "
            "a loop of this schedule that still exists. Instead: take it anew from "
            "sch.get_loops(block); primitives that make loops or blocks anew end the variables "
            "of the old ones."
        )

    def test_loop_of_another_schedule(self) -> None:
        sch, *_ = loops_of(matmul)
        _, foreign, _, _ = loops_of(matmul)
        text = refusal(sch, lambda: sch.cluster_bind(foreign))
        assert "argument 'loop': found a loop of another schedule; limit: LoopRV" in text

    @pytest.mark.parametrize("item", [None, "i", 3])
    def test_what_is_no_loop(self, item: Any) -> None:
        sch, *_ = loops_of(matmul)
        text = refusal(sch, lambda: sch.cluster_bind(item))
        assert f"argument 'loop': found {type(item).__name__}; limit: LoopRV" in text

    def test_block_in_place_of_a_loop(self) -> None:
        sch, *_ = loops_of(matmul)
        block = sch.get_sblock("C")
        assert "found SBlockRV; limit: LoopRV" in refusal(sch, lambda: sch.cluster_bind(block))


class TestVerifyCluster:
    def test_plain_bind_to_a_cluster_tag(self) -> None:
        sch, i, _ = loops_of(scaled_matmul, "D")
        rank, _ = sch.split(i, [2, None])
        sch.bind(rank, "clusterCtaIdx.x")
        assert refusal(sch, sch.verify_cluster) == (
            "verify_cluster: loop 'i_0': found a plain bind to clusterCtaIdx.x; limit: TVM "
            "launches too few CTAs for it and gives each the shared tiles of all. Instead: call "
            'sch.cluster_bind(loop, axis="x") in its place.'
        )

    def test_extents_that_disagree(self) -> None:
        sch, i, _ = loops_of(scaled_matmul, "D")
        rank, _ = sch.split(sch.get_loops(sch.get_sblock("C"))[0], [4, None])
        annotate_axis(sch, rank, "x")
        annotate_axis(sch, i, "x")
        assert refusal(sch, sch.verify_cluster) == (
            "verify_cluster: loop 'i': found extent 8 on axis x; limit: extent 4, as loop 'i_0' "
            "has on that axis. Instead: split both loops by the same number of CTAs."
        )

    def test_unknown_axis(self) -> None:
        sch, i, _ = loops_of(scaled_matmul, "D")
        annotate_axis(sch, i, "q")
        assert refusal(sch, sch.verify_cluster) == (
            "verify_cluster: loop 'i': found axis 'q'; limit: 'x', 'y' or 'z'. Instead: name one "
            "of the three cluster axes."
        )

    def test_cluster_over_16(self) -> None:
        sch, i, j, _ = loops_of(matmul)
        annotate_axis(sch, i, "x")
        annotate_axis(sch, j, "y")
        assert refusal(sch, sch.verify_cluster) == (
            "verify_cluster: function: found a cluster of 64 CTAs (x=8 x y=8); limit: 16 CTAs "
            "over all axes. Instead: bind a smaller loop on one of the axes."
        )

    def test_buffer_without_a_loop_over_its_slabs(self) -> None:
        sch = Schedule(scaled_matmul)
        sch.set_scope(sch.get_sblock("C"), 0, "shared.dsm")
        assert refusal(sch, sch.verify_cluster) == (
            "verify_cluster: buffer 'C_shared.dsm': found no cluster-bound loop over its leading "
            "dimension where it is written; limit: one slab for each CTA of a cluster axis "
            "(bound: none). Instead: cluster_bind the loop that fills the slabs, or make the "
            "buffer with dsm_reduce or dsm_shuffle."
        )

    def test_leading_extent_of_no_cluster_axis(self) -> None:
        sch, i, _, _ = loops_of(scaled_matmul)
        sch.set_scope(sch.get_sblock("C"), 0, "shared.dsm")
        rank, _ = sch.split(i, [4, None])
        sch.cluster_bind(rank)
        assert refusal(sch, sch.verify_cluster) == (
            "verify_cluster: buffer 'C_shared.dsm': found 8 slabs on axis x; limit: one slab for "
            "each CTA of a cluster axis (bound: x=4). Instead: give the buffer a leading "
            "dimension of the cluster's extent."
        )

    def test_mutation_of_a_number_that_was_baked_in(self) -> None:
        """A trace written by hand, which binds one loop by a sampled size and one by a number."""
        sch, i, _ = loops_of(scaled_matmul, "D")
        size = sch.sample_categorical([4, 8], [0.5, 0.5], decision=0)
        rank, _ = sch.split(i, [size, None])
        other, _ = sch.split(sch.get_loops(sch.get_sblock("C"))[0], [4, None])
        sch.cluster_bind(rank)
        sch.cluster_bind(other)
        mutant = Schedule(scaled_matmul)
        sampling = next(each for each in sch.trace.insts if each.kind.name == "SampleCategorical")
        sch.trace.with_decision(sampling, 1, True).apply_to_schedule(mutant, remove_postproc=False)
        assert "found extent 8 on axis x; limit: extent 4" in refusal(mutant, mutant.verify_cluster)

    def test_module_of_several_functions(self) -> None:
        module = IRModule({"first": matmul, "second": chain})
        sch = Schedule(module)
        with pytest.raises(ScheduleRefused) as caught:
            sch.verify_cluster()
        assert str(caught.value) == (
            "schedule: module: found 2 functions (first, second); limit: one PrimFunc, or one "
            "that is worked on. Instead: call sch.work_on(name) first."
        )
