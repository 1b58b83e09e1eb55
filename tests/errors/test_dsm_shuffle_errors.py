"""Refusals of `dsm_shuffle`; each leaves the schedule as it was."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te, tirx
from tvm.s_tir import Schedule

from cpu.schedule.kernels import mlp, scaled_matmul
from cpu.schedule.steps import DTYPES, cluster_columns, loops_of, refusal


def shuffle(func: Any = mlp, ranks: int = 4, part: int = 2) -> tuple[Any, Any, Any, dict[str, Any]]:
    sch = Schedule(func)
    consumer = sch.get_sblock("Y")
    loops = cluster_columns(sch, consumer, 4, ranks, part)
    return sch, sch.get_sblock("H"), consumer, loops


def layer(rows: int, width: int, dtype: str = "float32", *, outputs: str = "Y") -> Any:
    """`mlp` of other sizes, whose outputs are some of Y, H and a second reader Z of H."""
    left = te.placeholder((rows, width), dtype, "X")
    right = te.placeholder((rows, width), dtype, "W")
    k = te.reduce_axis((0, width), "k")
    one = tirx.const(1, dtype)
    made = {"H": te.compute((rows, width), lambda i, f: left[i, f] + one, name="H")}
    made["Y"] = te.compute(
        (rows, rows), lambda i, j: te.sum(made["H"][i, k] * right[j, k], axis=k), name="Y"
    )
    made["Z"] = te.compute((rows, width), lambda i, f: made["H"][i, f] * one, name="Z")
    return te.create_prim_func([left, right, *(made[name] for name in outputs)])


class TestDsmShuffle:
    def test_consumer_without_a_cluster_bound_loop(self) -> None:
        sch, i, j, k = loops_of(mlp, "Y")
        step, rest = sch.split(k, [4, None])
        sch.reorder(step, i, j, rest)
        blocks = sch.get_sblock("H"), sch.get_sblock("Y")
        assert refusal(sch, lambda: sch.dsm_shuffle(*blocks, 0, step)) == (
            "dsm_shuffle: block 'H' -> block 'Y', loop 'k_0': found no cluster-bound loop of the "
            "consumer outside the staging loop; limit: the consumer runs on the CTAs of a "
            "cluster. Instead: split a loop over the consumer's output by the cluster size, "
            "reorder it outside the reduction and cluster_bind it."
        )

    def test_cluster_bound_loop_inside_the_slice_loop(self) -> None:
        sch, i, j, k = loops_of(mlp, "Y")
        step, rest = sch.split(k, [4, None])
        rank, row = sch.split(i, [4, None])
        sch.reorder(step, rank, row, j, rest)
        sch.cluster_bind(rank)
        blocks = sch.get_sblock("H"), sch.get_sblock("Y")
        assert refusal(sch, lambda: sch.dsm_shuffle(*blocks, 0, rest)) == (
            "dsm_shuffle: block 'H' -> block 'Y', loop 'k_1': found slice loop 'k_0' outside the "
            "cluster-bound loop; limit: every CTA walks over all slices. Instead: reorder the "
            "cluster-bound loop outside the consumer's reduction."
        )

    @pytest.mark.parametrize("index", [1, 2, -1])
    def test_wrong_read_index(self, index: int) -> None:
        sch, producer, consumer, loops = shuffle()
        call = lambda: sch.dsm_shuffle(producer, consumer, index, loops["slice"])  # noqa: E731
        assert refusal(sch, call) == (
            f"dsm_shuffle: block 'H' -> block 'Y', loop 'k_0': found read buffer index {index}; "
            "limit: the read of 'H' among 0: 'H', 1: 'W'. Instead: pass the index of the "
            "producer's buffer in the consumer's reads."
        )

    def test_columns_that_do_not_divide(self) -> None:
        sch, producer, consumer, loops = shuffle(ranks=3, part=1)
        assert refusal(sch, lambda: sch.dsm_shuffle(producer, consumer, 0, loops["slice"])) == (
            "dsm_shuffle: block 'H' -> block 'Y', loop 'k_0': found 3 slices of 16 columns for 3 "
            "CTAs; limit: one slice a CTA, all of one width. Instead: split the consumer's "
            "reduction loop and its cluster-bound loop by the same number, one of 1, 2, 4, 8, 16."
        )

    def test_other_number_of_slices_than_ctas(self) -> None:
        sch, i, j, k = loops_of(mlp, "Y")
        rank, column = sch.split(j, [4, None])
        step, rest = sch.split(k, [8, None])
        sch.reorder(rank, step, i, column, rest)
        sch.cluster_bind(rank)
        blocks = sch.get_sblock("H"), sch.get_sblock("Y")
        text = refusal(sch, lambda: sch.dsm_shuffle(*blocks, 0, step))
        assert "found 8 slices of 16 columns for 4 CTAs; limit: one slice a CTA" in text

    def test_slices_of_columns_that_lie_apart(self) -> None:
        sch, i, j, k = loops_of(mlp, "Y")
        rank, column = sch.split(j, [4, None])
        rest, step = sch.split(k, [None, 4])
        sch.reorder(rank, step, i, column, rest)
        sch.cluster_bind(rank)
        blocks = sch.get_sblock("H"), sch.get_sblock("Y")
        assert refusal(sch, lambda: sch.dsm_shuffle(*blocks, 0, step)) == (
            "dsm_shuffle: block 'H' -> block 'Y', loop 'k_1': found slice loop 'k_1' over "
            "columns k_0 * 4 + k_1; limit: 4 consecutive columns in each of its iterations. "
            "Instead: split the consumer's reduction loop by [slices, None] and use the outer "
            "part."
        )

    def test_ring_of_all_slices_at_once(self) -> None:
        sch, producer, consumer, loops = shuffle()
        assert refusal(sch, lambda: sch.dsm_shuffle(producer, consumer, 0, loops["rank"])) == (
            "dsm_shuffle: block 'H' -> block 'Y', loop 'j_0': found all slices staged at once, "
            "outside slice loop 'k_0'; limit: a ring stages one slice, or a part of one, at a "
            "time. Instead: pass ring=False for an all-gather, or stage at the slice loop or "
            "inside it."
        )

    @pytest.mark.parametrize("place", ["tile", "slice"])
    def test_producer_that_was_moved(self, place: str) -> None:
        sch, producer, consumer, loops = shuffle()
        sch.compute_at(producer, loops[place])
        text = refusal(sch, lambda: sch.dsm_shuffle(producer, consumer, 0, loops["slice"]))
        assert text.endswith(
            "limit: a producer that can be computed in front of the consumer's cluster nest. "
            "Instead: call dsm_shuffle before the producer is moved, and place the producer's "
            "own producers afterwards."
        )

    def test_producer_that_was_split_where_it_stays(self) -> None:
        sch, i, j, k = loops_of(mlp, "Y")
        producer, consumer = sch.get_sblock("H"), sch.get_sblock("Y")
        sch.split(sch.get_loops(producer)[1], [2, 8])
        rank, column = sch.split(j, [4, None])
        step, rest = sch.split(k, [4, None])
        sch.reorder(rank, step, i, column, rest)
        sch.cluster_bind(rank)
        assert refusal(sch, lambda: sch.dsm_shuffle(producer, consumer, 0, step)) == (
            "dsm_shuffle: block 'H' -> block 'Y', loop 'k_0': found a producer that writes "
            "column vf in several loops; limit: one loop of the producer for the columns. "
            "Instead: call dsm_shuffle before the producer's layout or loops are transformed."
        )

    def test_elementwise_consumer(self) -> None:
        sch, i, j = loops_of(scaled_matmul, "D")
        rank, _ = sch.split(j, [4, None])
        sch.reorder(rank, i)
        sch.cluster_bind(rank)
        blocks = sch.get_sblock("C"), sch.get_sblock("D")
        assert refusal(sch, lambda: sch.dsm_shuffle(*blocks, 0, rank, ring=False)) == (
            "dsm_shuffle: block 'C' -> block 'D', loop 'j_0': found no reduction loop over 'C'; "
            "limit: a consumer that reduces over the columns of the intermediate. Instead: use "
            "compute_at: an intermediate that is read element by element needs no exchange."
        )

    def test_element_type_without_dsm_access(self) -> None:
        sch, producer, consumer, loops = shuffle(layer(8, 16, "float64"))
        text = refusal(sch, lambda: sch.dsm_shuffle(producer, consumer, 0, loops["slice"]))
        assert f"found element type float64; limit: {DTYPES}. Instead: compute" in text

    @pytest.mark.parametrize(
        ("outputs", "use"), [("HY", "it is an output"), ("YZ", "block 'Z' reads it too")]
    )
    def test_intermediate_with_other_uses(self, outputs: str, use: str) -> None:
        sch, producer, consumer, loops = shuffle(layer(8, 16, outputs=outputs))
        assert refusal(sch, lambda: sch.dsm_shuffle(producer, consumer, 0, loops["slice"])) == (
            f"dsm_shuffle: block 'H' -> block 'Y', loop 'k_0': found other uses of 'H': {use}; "
            "limit: an intermediate that lives in the cluster, for one consumer. Instead: compute "
            "the other use from a copy of its own (cache_read, or reindex)."
        )

    def test_slab_over_the_shared_memory_of_a_cta(self) -> None:
        sch, i, j, k = loops_of(layer(64, 4096), "Y")
        rank, column = sch.split(j, [4, None])
        step, rest = sch.split(k, [4, None])
        sch.reorder(rank, step, i, column, rest)
        sch.cluster_bind(rank)
        blocks = sch.get_sblock("H"), sch.get_sblock("Y")
        text = refusal(sch, lambda: sch.dsm_shuffle(*blocks, 0, step))
        assert "found a slab of 64 x 1024 float32, 262144 bytes; limit: 232448 bytes" in text

    def test_staging_loop_of_another_block(self) -> None:
        sch, producer, consumer, _ = shuffle()
        loop = sch.get_loops(producer)[0]
        text = refusal(sch, lambda: sch.dsm_shuffle(producer, consumer, 0, loop))
        assert "block 'Y', loop 'i': found a loop that does not enclose the block" in text

    def test_second_call(self) -> None:
        sch, producer, consumer, loops = shuffle()
        sch.dsm_shuffle(producer, consumer, 0, loops["slice"])
        text = refusal(sch, lambda: sch.dsm_shuffle(producer, consumer, 0, loops["slice"]))
        assert "found read buffer index 0; limit: the read of 'H_shared.dsm' among" in text
