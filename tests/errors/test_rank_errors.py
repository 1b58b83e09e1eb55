"""Refusals of `rank_bind`, `rank_reduce` and `rank_gather`; each leaves the schedule as it was."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.s_tir import Schedule

from cpu.schedule.kernels import scaled_matmul
from cpu.schedule.ranks import all_reduced, gathered, gathered_sums, reduce_scattered
from cpu.schedule.steps import loops_of, refusal


class TestRankBind:
    def test_extent_over_8(self) -> None:
        sch, _, j, _, _ = loops_of(all_reduced)
        assert refusal(sch, lambda: sch.rank_bind(j)) == (
            "rank_bind: loop 'j': found extent 32; limit: 1 to 8 GPUs that share NVLink. Instead: "
            "split the loop so that one part has at most that extent, and pass that part."
        )

    def test_unequal_extents(self) -> None:
        sch, i, _, _ = loops_of(scaled_matmul)
        sch.rank_bind(i)
        rows, _ = sch.get_loops(sch.get_sblock("D"))
        ranks, _ = sch.split(rows, [4, None])
        assert refusal(sch, lambda: sch.rank_bind(ranks)) == (
            "rank_bind: loop 'i_0': found extent 4; limit: extent 8, as loop 'i' over the ranks "
            "has. Instead: split both loops by the same number of GPUs."
        )

    def test_reduction(self) -> None:
        sch, i, j, g, _ = loops_of(all_reduced)
        sch.reorder(g, i, j)
        assert refusal(sch, lambda: sch.rank_bind(g)) == (
            "rank_bind: loop 'g': found a reduction loop of block 'C'; limit: a data-parallel "
            "loop. Instead: bind a loop over output elements; for a reduction loop call "
            "rank_reduce, which makes partial sums in each GPU and adds them."
        )

    def test_loop_inside_of_others(self) -> None:
        sch, _, j, _ = loops_of(scaled_matmul)
        assert refusal(sch, lambda: sch.rank_bind(j)) == (
            "rank_bind: loop 'j': found loop 'i' around it; limit: the outermost loop of its nest, "
            "which is a kernel in each GPU. Instead: reorder the loop outside of all others."
        )

    def test_loop_that_is_bound(self) -> None:
        sch, i, _, _ = loops_of(scaled_matmul)
        sch.rank_bind(i)
        assert "found a loop that is already bound to the ranks;" in refusal(
            sch, lambda: sch.rank_bind(i)
        )


class TestRankReduce:
    def test_loop_over_elements(self) -> None:
        sch, i, *_ = loops_of(all_reduced)
        ranks, _ = sch.split(i, [2, None])
        block = sch.get_sblock("C")
        assert refusal(sch, lambda: sch.rank_reduce(block, ranks)) == (
            "rank_reduce: block 'C', loop 'i_0': found a loop over output elements; limit: a "
            "reduction loop. Instead: split a reduction loop of the block and pass the part that "
            "becomes the rank; for a loop over output elements use rank_bind."
        )

    def test_too_many_ranks(self) -> None:
        sch, *_, k = loops_of(all_reduced)
        block = sch.get_sblock("C")
        text = refusal(sch, lambda: sch.rank_reduce(block, k))
        assert "block 'C', loop 'k': found extent 64; limit: 1 to 8 GPUs that share NVLink." in text

    def test_decomposed(self) -> None:
        sch, *_, g, _ = loops_of(all_reduced)
        sch.decompose_reduction(sch.get_sblock("C"), g)
        block = sch.get_sblock("C_update")
        text = refusal(sch, lambda: sch.rank_reduce(block, g))
        assert "Instead: call rank_reduce on the reduction block itself, before decompose" in text

    def test_scatter_without_slices(self) -> None:
        sch, *_, g, _ = loops_of(all_reduced)
        block = sch.get_sblock("C")
        assert refusal(sch, lambda: sch.rank_reduce(block, g, scatter=True)) == (
            "rank_reduce: block 'C', loop 'g': found a result of shape (16, 32), first index i; "
            "limit: with scatter=True, 2 slices along the first dimension, one loop over them. "
            "Instead: write the result with the rank as its first dimension, or leave scatter out: "
            "then each GPU has all of it."
        )

    def test_ranks_that_differ_from_those_of_another_nest(self) -> None:
        sch, _, _, k = loops_of(scaled_matmul)
        rows, _ = sch.get_loops(sch.get_sblock("D"))
        sch.rank_bind(sch.split(rows, [4, None])[0])
        ranks, _ = sch.split(k, [2, None])
        block = sch.get_sblock("C")
        text = refusal(sch, lambda: sch.rank_reduce(block, ranks))
        assert "found extent 2; limit: extent 4, as loop 'i_0' over the ranks has." in text


class TestRankGather:
    @staticmethod
    def bound(func: Any) -> Any:
        sch = Schedule(func)
        sch.rank_bind(sch.get_loops(sch.get_sblock("Y"))[0])
        return sch

    def test_block_outside_of_the_ranks(self) -> None:
        sch = Schedule(gathered)
        block = sch.get_sblock("Y")
        assert refusal(sch, lambda: sch.rank_gather(block, 0)) == (
            "rank_gather: block 'Y': found no loop over the GPUs around it; limit: a block in a "
            "nest whose outermost loop is bound to the GPUs. Instead: call rank_bind for the loop "
            "over what each GPU makes."
        )

    def test_unknown_read(self) -> None:
        sch = self.bound(gathered)
        block = sch.get_sblock("Y")
        assert refusal(sch, lambda: sch.rank_gather(block, 2)) == (
            "rank_gather: block 'Y': found read buffer index 2; limit: one of 0: 'X', 1: 'W'. "
            "Instead: pass the index of the operand in the block's reads."
        )

    def test_operand_without_slabs(self) -> None:
        sch = Schedule(reduce_scattered)
        z, *_ = sch.get_loops(sch.get_sblock("C"))
        ranks, _ = sch.split(z, [1, None])
        sch.rank_bind(ranks)
        block = sch.get_sblock("C")
        assert refusal(sch, lambda: sch.rank_gather(block, 0)) == (
            "rank_gather: block 'C', buffer 'A': found shape (2, 16, 64) in scope global; limit: 1 "
            "slabs in global memory, one for each GPU, along the first dimension. Instead: give "
            "the operand the rank as its first dimension."
        )

    def test_maker_with_another_loop_outside(self) -> None:
        sch = self.bound(gathered_sums)
        maker = sch.get_sblock("S")
        ranks, rows, _ = sch.get_loops(maker)
        sch.reorder(rows, ranks)
        block = sch.get_sblock("Y")
        text = refusal(sch, lambda: sch.rank_gather(block, 0))
        assert "found extent 8; limit: extent 2, as loop 'g' over the ranks has." in text


@pytest.mark.parametrize("name", ["rank_bind", "rank_reduce", "rank_gather"])
def test_what_is_no_loop_or_block(name: str) -> None:
    sch = Schedule(all_reduced)
    block = sch.get_sblock("C")
    first, *_ = sch.get_loops(block)
    calls = {
        "rank_bind": lambda: sch.rank_bind(block),
        "rank_reduce": lambda: sch.rank_reduce(block, block),
        "rank_gather": lambda: sch.rank_gather(first, 0),
    }
    assert f"{name}: argument '" in refusal(sch, calls[name])
