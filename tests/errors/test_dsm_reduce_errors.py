"""Refusals of `dsm_reduce`; each leaves the schedule as it was."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te, tirx
from tvm.s_tir import Schedule

from cpu.schedule.kernels import chain, matmul, mlp, scaled_matmul
from cpu.schedule.steps import DTYPES, loops_of, refusal, split_reduction


def reduction(func: Any = matmul, ranks: int = 4, rows: int = 4) -> tuple[Any, Any, Any]:
    sch = Schedule(func)
    block = sch.get_sblock("C")
    return sch, block, split_reduction(sch, block, rows, ranks)


def product(
    rows: int, columns: int, depth: int, dtype: str = "float32", *, read_twice: bool = False
) -> Any:
    left = te.placeholder((rows, depth), dtype, "A")
    right = te.placeholder((depth, columns), dtype, "B")
    k = te.reduce_axis((0, depth), "k")
    result = te.compute(
        (rows, columns), lambda i, j: te.sum(left[i, k] * right[k, j], axis=k), name="C"
    )
    results = [result]
    if read_twice:
        results = [te.compute((rows, columns), lambda i, j: -result[i, j], name=n) for n in "DE"]
    return te.create_prim_func([left, right, *results])


def argmax() -> Any:
    values = te.placeholder((8, 32), "float32", "V")
    indices = te.placeholder((8, 32), "int32", "I")
    k = te.reduce_axis((0, 32), "k")

    def larger(x: Any, y: Any) -> tuple[Any, Any]:
        first = x[1] >= y[1]
        return tirx.Select(first, x[0], y[0]), tirx.Select(first, x[1], y[1])

    def start(index: str, value: str) -> tuple[Any, Any]:
        return tirx.const(-1, index), tirx.min_value(value)

    reducer = te.comm_reducer(larger, start, name="argmax")
    results = te.compute((8,), lambda i: reducer((indices[i, k], values[i, k]), axis=k), name="C")
    return te.create_prim_func([indices, values, *results])


class TestDsmReduce:
    def test_loop_over_output_elements(self) -> None:
        sch, block, _ = reduction()
        loop = sch.get_loops(block)[0]
        assert refusal(sch, lambda: sch.dsm_reduce(block, loop)) == (
            "dsm_reduce: block 'C', loop 'i_0': found a loop over output elements; limit: a "
            "reduction loop. Instead: split a reduction loop of the block and pass the part that "
            "becomes the rank; for a loop over output elements use cluster_bind."
        )

    def test_loop_of_another_block(self) -> None:
        sch, block, _ = reduction(scaled_matmul)
        loop = sch.get_loops(sch.get_sblock("D"))[0]
        assert refusal(sch, lambda: sch.dsm_reduce(block, loop)) == (
            "dsm_reduce: block 'C', loop 'i': found a loop that does not enclose the block; "
            "limit: one of the block's own loops (i_0, k_0, k_1, i_1, j). Instead: take the loop "
            "from sch.get_loops(block)."
        )

    def test_block_that_reduces_nothing(self) -> None:
        sch = Schedule(scaled_matmul)
        block = sch.get_sblock("D")
        loop = sch.get_loops(block)[0]
        assert refusal(sch, lambda: sch.dsm_reduce(block, loop)) == (
            "dsm_reduce: block 'D', loop 'i': found a block without one initialised sum, "
            "product, max or min; limit: a reduction by sum, product, max or min that is not "
            "decomposed. Instead: call dsm_reduce on the reduction block itself, before "
            "decompose_reduction."
        )

    def test_decomposed_block(self) -> None:
        sch, block, rank = reduction()
        sch.decompose_reduction(block, rank)
        text = refusal(sch, lambda: sch.dsm_reduce(block, rank))
        assert "block 'C_update', loop 'k_0': found a block without one initialised" in text

    def test_reduction_of_tuples(self) -> None:
        sch = Schedule(argmax())
        (block,) = sch.get_child_blocks(sch.get_sblock("root"))
        i, k = sch.get_loops(block)
        rank, rest = sch.split(k, [4, None])
        sch.reorder(rank, rest, i)
        text = refusal(sch, lambda: sch.dsm_reduce(block, rank))
        assert "found a block without one initialised sum, product, max or min" in text

    def test_extent_over_16(self) -> None:
        sch, i, j, k = loops_of(matmul)
        sch.reorder(k, i, j)
        block = sch.get_sblock("C")
        assert refusal(sch, lambda: sch.dsm_reduce(block, k)) == (
            "dsm_reduce: block 'C', loop 'k': found extent 32; limit: a serial loop of extent 1 "
            "to 16, one iteration a CTA. Instead: split the reduction loop by the number of CTAs "
            "and pass that part."
        )

    def test_bound_loop(self) -> None:
        sch, block, rank = reduction()
        sch.unroll(rank)
        text = refusal(sch, lambda: sch.dsm_reduce(block, rank))
        assert "loop 'k_0': found a loop that is already bound; limit: a serial loop" in text

    def test_unknown_axis(self) -> None:
        sch, block, rank = reduction()
        text = refusal(sch, lambda: sch.dsm_reduce(block, rank, axis="rows"))
        assert "found axis 'rows'; limit: 'x', 'y' or 'z'" in text

    def test_reduction_loop_outside_the_rank(self) -> None:
        sch, i, j, k = loops_of(matmul)
        outer, rank, rest = sch.split(k, [2, 4, None])
        sch.reorder(outer, rank, rest, i, j)
        block = sch.get_sblock("C")
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank)) == (
            "dsm_reduce: block 'C', loop 'k_1': found reduction loop 'k_0' outside it; limit: "
            "loops over output elements outside the loop that becomes the rank. Instead: reorder "
            "the reduction loops so that this one is the outermost."
        )

    def test_element_types_without_dsm_access(self) -> None:
        for dtype in ("float64", "int8"):
            sch, block, rank = reduction(product(8, 8, 32, dtype))
            assert refusal(sch, lambda: sch.dsm_reduce(block, rank)) == (  # noqa: B023
                f"dsm_reduce: block 'C', loop 'k_0': found element type {dtype}; limit: {DTYPES}. "
                "Instead: compute the exchanged tile in one of these types and cast afterwards."
            )

    @pytest.mark.parametrize("scatter", [True, False])
    def test_slab_over_the_shared_memory_of_a_cta(self, scatter: bool) -> None:
        sch, block, rank = reduction(product(256, 256, 32), rows=256)
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank, scatter=scatter)) == (
            "dsm_reduce: block 'C', loop 'k_0': found a slab of 256 x 256 float32, 262144 bytes; "
            "limit: 232448 bytes of shared memory in a CTA. Instead: split the output loops and "
            "reorder the parts outside the exchange, so that a smaller tile is exchanged at a "
            "time."
        )

    def test_rank_that_disagrees_with_other_cluster_loops(self) -> None:
        sch, block, rank = reduction(scaled_matmul)
        rows, _ = sch.get_loops(sch.get_sblock("D"))
        other, _ = sch.split(rows, [2, None])
        sch.cluster_bind(other)
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank)) == (
            "dsm_reduce: block 'C', loop 'k_0': found extent 4 on axis x; limit: extent 2, as "
            "loop 'i_0' has on that axis. Instead: split both loops by the same number of CTAs."
        )

    def test_cluster_over_16_on_several_axes(self) -> None:
        sch, block, rank = reduction(scaled_matmul)
        rows, _ = sch.get_loops(sch.get_sblock("D"))
        sch.cluster_bind(rows, "y")
        text = refusal(sch, lambda: sch.dsm_reduce(block, rank))
        assert "found a cluster of 32 CTAs (x=4 x y=8); limit: 16 CTAs over all axes" in text

    def test_tile_loop_on_the_axis_of_the_ranks(self) -> None:
        sch, block, rank = reduction()
        sch.cluster_bind(sch.get_loops(block)[0])
        text = refusal(sch, lambda: sch.dsm_reduce(block, rank))
        assert "found loop 'i_0' of the same nest bound to axis x too" in text

    def test_other_blocks_in_the_loops(self) -> None:
        sch, block, rank = reduction()
        stage = sch.cache_read(block, 0, "shared")
        sch.compute_at(stage, sch.get_loops(block)[0])
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank)) == (
            "dsm_reduce: block 'C', loop 'k_0': found The first child block of the outermost "
            "loop is not the reduction block; limit: a complete reduction block alone in its "
            "loops. Instead: call dsm_reduce before decompose_reduction and before other blocks "
            "are moved into the loops of this one."
        )

    def test_inferred_part_of_a_sampled_split(self) -> None:
        sch, i, j, k = loops_of(matmul)
        size = sch.sample_categorical([4, 8], [0.5, 0.5], decision=0)
        rank, rest = sch.split(k, [None, size])
        sch.reorder(rank, rest, i, j)
        block = sch.get_sblock("C")
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank)) == (
            "dsm_reduce: loop 'k_0': found extent 8, what sampled factors leave over; limit: an "
            "extent that the trace can mutate: a number or a sampled factor. Instead: give the "
            "sampled size to split as the factor of this loop and leave another factor None, or "
            "sample all factors with sample_perfect_tile."
        )

    def test_block_that_was_inlined(self) -> None:
        sch = Schedule(mlp)
        block = sch.get_sblock("H")
        loop = sch.get_loops(block)[0]
        sch.compute_inline(block)
        text = refusal(sch, lambda: sch.dsm_reduce(block, loop))
        assert "argument 'block': found a block that no longer exists; limit: SBlockRV" in text
        assert "take it anew from sch.get_sblock(name)" in text


class TestAllExchange:
    def test_intermediate_without_a_cluster_bound_consumer(self) -> None:
        sch, block, rank = reduction(scaled_matmul)
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank, scatter=False)) == (
            "dsm_reduce: block 'C', loop 'k_0': found no consumer in a loop bound to cluster "
            "axis x; limit: all-exchange leaves the tile with the CTAs that consume it. Instead: "
            "cluster_bind a loop of the consumer first, or use scatter=True."
        )

    def test_consumer_on_another_axis(self) -> None:
        sch, block, rank = reduction(scaled_matmul)
        other, _ = sch.split(sch.get_loops(sch.get_sblock("D"))[0], [4, None])
        sch.cluster_bind(other, "y")
        text = refusal(sch, lambda: sch.dsm_reduce(block, rank, scatter=False))
        assert "found no consumer in a loop bound to cluster axis x" in text

    def test_output_tile_that_does_not_divide(self) -> None:
        sch, i, j, k = loops_of(matmul)
        (i0, i1), (j0, j1) = sch.split(i, [None, 2]), sch.split(j, [None, 4])
        rank, rest = sch.split(k, [16, None])
        sch.reorder(i0, j0, rank, rest, i1, j1)
        block = sch.get_sblock("C")
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank, scatter=False)) == (
            "dsm_reduce: block 'C', loop 'k_0': found a tile of 2 x 4 for 16 CTAs; limit: with "
            "scatter=False, a tile that divides into one slice a CTA. Instead: choose a tile with "
            "an extent that the cluster size divides, a cluster size of 1, 2, 4, or scatter=True."
        )

    def test_unequal_shares_of_an_intermediate_reduction(self) -> None:
        sch, block, rank = reduction(chain, ranks=5)
        i, j, k = sch.get_loops(sch.get_sblock("E"))
        nest, column = sch.split(j, [5, None])
        sch.reorder(nest, i, column, k)
        sch.cluster_bind(nest)
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank, scatter=False)) == (
            "dsm_reduce: block 'C', loop 'k_0': found 5 CTAs with unequal shares of the "
            "reduction; limit: with scatter=False on an intermediate, splits that divide the "
            "reduction. Instead: choose a cluster size and inner splits that divide it, or use "
            "scatter=True."
        )

    def test_consumer_that_masks_its_slice(self) -> None:
        sch, block, rank = reduction(scaled_matmul)
        i, j = sch.get_loops(sch.get_sblock("D"))
        nest, element = sch.split(sch.fuse(i, j), [4, None])
        sch.split(element, [None, 5])
        sch.cluster_bind(nest)
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank, scatter=False)) == (
            "dsm_reduce: block 'C', loop 'k_0', consumer block 'D': found a mask within the "
            "slice of a CTA: i_j_fused_1_0 * 5 + i_j_fused_1_1 < 16; limit: a consumer whose "
            "loops cover its slice exactly. Instead: call dsm_reduce before the consumer's slice "
            "is split for threads, or split it by factors that divide it."
        )

    def test_consumer_whose_slices_begin_within_a_row(self) -> None:
        sch, block, rank = reduction(scaled_matmul, ranks=16)
        i, j = sch.get_loops(sch.get_sblock("D"))
        nest, _ = sch.split(sch.fuse(i, j), [16, None])
        sch.cluster_bind(nest)
        assert refusal(sch, lambda: sch.dsm_reduce(block, rank, scatter=False)) == (
            "dsm_reduce: block 'C', loop 'k_0': found a tile whose place depends on loop "
            "'i_j_fused_0'; limit: the same tile in every CTA: slices that begin and end with a "
            "row or column. Instead: bind a part of one loop over rows or columns of the tile "
            "instead of a part of a fused loop, or choose a tile with whole rows in each slice."
        )

    def test_second_consumer_outside_the_nest(self) -> None:
        sch, block, rank = reduction(product(8, 8, 32, read_twice=True))
        nest, _ = sch.split(sch.get_loops(sch.get_sblock("D"))[0], [4, None])
        sch.cluster_bind(nest)
        text = refusal(sch, lambda: sch.dsm_reduce(block, rank, scatter=False))
        assert "limit: a tile that can be combined at the consumer's cluster-bound loop" in text
        assert "Instead: bring all consumers of the block under loop 'i_0'" in text
