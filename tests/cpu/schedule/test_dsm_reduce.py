"""`dsm_reduce`: the functions it makes, compared whole."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from cpu.macros import X
from cpu.schedule.kernels import chain, matmul, row_sums, scaled_matmul, transposed
from cpu.schedule.steps import assert_same, cluster_columns, split_reduction


@T.macro
def partial_products(A, B, P, i_0):
    """Each CTA's share of the reduction, the reduction outside the tile."""
    for k_0 in T.parallel(4, annotations=X):
        for k_1, i_1, j in T.grid(8, 4, 8):
            with T.sblock("C_rf"):
                rank = T.axis.spatial(4, k_0)
                vi = T.axis.spatial(8, i_0 * 4 + i_1)
                vj, vk = T.axis.remap("SR", [j, k_1])
                with T.init():
                    P[rank, vi, vj] = T.float32(0)
                P[rank, vi, vj] = P[rank, vi, vj] + A[vi, rank * 8 + vk] * B[rank * 8 + vk, vj]


@T.macro
def partial_product_of_each_element(A, B, P, i_0, columns):
    """Each CTA's share of the reduction, as TVM moves it to another block's tile."""
    for k_0 in T.parallel(4, annotations=X):
        for i_1, j, k_1 in T.grid(4, columns, 8):
            with T.sblock("C_rf"):
                rank = T.axis.spatial(4, k_0)
                vi = T.axis.spatial(8, i_0 * 4 + i_1)
                vj, vk = T.axis.remap("SR", [j, k_1])
                with T.init():
                    P[rank, vi, vj] = T.float32(0)
                P[rank, vi, vj] = P[rank, vi, vj] + A[vi, rank * 8 + vk] * B[rank * 8 + vk, vj]


@T.macro
def whole_tile(P, C, i_0, columns):
    """All shares combined by every CTA."""
    for r, i_1, j in T.grid(4, 4, columns):
        with T.sblock("C"):
            rank = T.axis.reduce(4, r)
            vi = T.axis.spatial(8, i_0 * 4 + i_1)
            vj = T.axis.spatial(columns, j)
            T.sblock_attr({"crossfuse.dsm_reduce": "all-exchange"})
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + P[rank, vi, vj]


@T.prim_func(s_tir=True)
def scattered(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    C: T.Buffer((8, 8), "float32"),
):
    P = T.sblock_alloc_buffer((4, 8, 8), scope="shared.dsm")
    for i_0 in range(2):
        partial_products(A, B, P, i_0)
        for z in T.parallel(4, annotations=X):
            for e, r in T.grid(8, 4):
                with T.sblock("C"):
                    rank = T.axis.reduce(4, r)
                    vi = T.axis.spatial(8, i_0 * 4 + (z * 8 + e) // 8)
                    vj = T.axis.spatial(8, (z * 8 + e) % 8)
                    T.sblock_attr({"crossfuse.dsm_reduce": "scatter"})
                    with T.init():
                        C[vi, vj] = T.float32(0)
                    C[vi, vj] = C[vi, vj] + P[rank, vi, vj]


@T.prim_func(s_tir=True)
def scattered_rows(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    C: T.Buffer((8, 8), "float32"),
):
    P = T.sblock_alloc_buffer((3, 8, 8), scope="shared.dsm")
    for i_0 in range(1):
        for k_0 in T.parallel(3, annotations=X):
            for k_1, i_1, j in T.grid(11, 8, 8):
                with T.sblock("C_rf"):
                    rank = T.axis.spatial(3, k_0)
                    vi = T.axis.spatial(8, i_0 * 8 + i_1)
                    vj, vk = T.axis.remap("SR", [j, k_1])
                    T.where(k_0 * 11 + k_1 < 32)
                    with T.init():
                        P[rank, vi, vj] = T.float32(0)
                    P[rank, vi, vj] = (
                        P[rank, vi, vj] + A[vi, rank * 11 + vk] * B[rank * 11 + vk, vj]
                    )
        for z in T.parallel(3, annotations=X):
            for e, j, r in T.grid(3, 8, 3):
                with T.sblock("C"):
                    rank = T.axis.reduce(3, r)
                    vi = T.axis.spatial(8, z * 3 + e)
                    vj = T.axis.spatial(8, j)
                    T.where(z * 3 + e < 8)
                    T.sblock_attr({"crossfuse.dsm_reduce": "scatter"})
                    with T.init():
                        C[vi, vj] = T.float32(0)
                    C[vi, vj] = C[vi, vj] + P[rank, vi, vj]


@T.prim_func(s_tir=True)
def exchanged_output(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    C: T.Buffer((8, 8), "float32"),
):
    P = T.sblock_alloc_buffer((4, 8, 8), scope="shared.dsm")
    S = T.sblock_alloc_buffer((8, 8), scope="shared")
    for i_0 in range(2):
        partial_products(A, B, P, i_0)
        for z in T.parallel(4, annotations=X):
            whole_tile(P, S, i_0, 8)
            for e in range(8):
                with T.sblock("C_shared"):
                    vi = T.axis.spatial(8, i_0 * 4 + z)
                    vj = T.axis.spatial(8, e)
                    T.reads(S[vi // 4 * 4 : vi // 4 * 4 + 4, vj // 8 * 8 : vj // 8 * 8 + 8])
                    T.writes(C[vi, vj])
                    T.sblock_attr({"explicit_read_region": [0]})
                    C[vi, vj] = S[vi, vj]


@T.prim_func(s_tir=True)
def exchanged_for_slices(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    D: T.Buffer((8, 8), "float32"),
):
    C = T.sblock_alloc_buffer((8, 8), scope="shared")
    P = T.sblock_alloc_buffer((4, 8, 8), scope="shared.dsm")
    for i_0 in range(2):
        partial_product_of_each_element(A, B, P, i_0, 8)
        for i_1 in T.parallel(4, annotations=X):
            whole_tile(P, C, i_0, 8)
            for j in range(8):
                with T.sblock("D"):
                    vi = T.axis.spatial(8, i_0 * 4 + i_1)
                    vj = T.axis.spatial(8, j)
                    T.reads(C[vi // 4 * 4 : vi // 4 * 4 + 4, vj // 8 * 8 : vj // 8 * 8 + 8])
                    T.writes(D[vi, vj])
                    T.sblock_attr({"explicit_read_region": [0]})
                    D[vi, vj] = C[vi, vj] * T.float32(2)


@T.prim_func(s_tir=True)
def exchanged_for_chain(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 16), "float32"),
    D: T.Buffer((16, 8), "float32"),
    E: T.Buffer((8, 8), "float32"),
):
    C = T.sblock_alloc_buffer((8, 16), scope="shared")
    P = T.sblock_alloc_buffer((4, 8, 16), scope="shared.dsm")
    for i_0 in range(2):
        partial_product_of_each_element(A, B, P, i_0, 16)
        for j_0 in T.parallel(4, annotations=X):
            whole_tile(P, C, i_0, 16)
            for k_0, k_1, i_1, j_1, k_2 in T.grid(4, 2, 4, 2, 2):
                with T.sblock("E"):
                    vi = T.axis.spatial(8, i_0 * 4 + i_1)
                    vj = T.axis.spatial(8, j_0 * 2 + j_1)
                    vk = T.axis.reduce(16, k_0 * 4 + k_1 * 2 + k_2)
                    with T.init():
                        E[vi, vj] = T.float32(0)
                    E[vi, vj] = E[vi, vj] + C[vi, vk] * D[vk, vj]


def reduced(func: Any, rows: int = 4, **options: Any) -> Any:
    sch = Schedule(func)
    block = sch.get_sblock("C")
    sch.dsm_reduce(block, split_reduction(sch, block, rows, 4), **options)
    return sch


def test_scatter_leaves_each_cta_a_slice() -> None:
    assert_same(reduced(matmul), scattered)


def test_slices_of_whole_rows_that_the_ranks_do_not_divide() -> None:
    sch = Schedule(matmul)
    block = sch.get_sblock("C")
    sch.dsm_reduce(block, split_reduction(sch, block, 8, 3), whole_rows=True)
    assert_same(sch, scattered_rows)


def test_all_exchange_of_an_output_stores_a_slice_from_each_cta() -> None:
    assert_same(reduced(matmul, scatter=False), exchanged_output)


def test_all_exchange_for_a_consumer_that_slices_the_tile() -> None:
    sch = Schedule(scaled_matmul)
    consumer = sch.get_sblock("D")
    rows, _ = sch.get_loops(consumer)
    _, rank = sch.split(rows, [None, 4])
    sch.cluster_bind(rank)
    block = sch.get_sblock("C")
    sch.dsm_reduce(block, split_reduction(sch, block, 4, 4), scatter=False)
    assert_same(sch, exchanged_for_slices)


def test_all_exchange_for_a_consumer_that_needs_the_whole_tile() -> None:
    sch = Schedule(chain)
    cluster_columns(sch, sch.get_sblock("E"), 4, 4)
    block = sch.get_sblock("C")
    sch.dsm_reduce(block, split_reduction(sch, block, 4, 4), scatter=False)
    assert_same(sch, exchanged_for_chain)


def test_the_partial_block_comes_back() -> None:
    sch = Schedule(matmul)
    block = sch.get_sblock("C")
    partial = sch.dsm_reduce(block, split_reduction(sch, block, 4, 4))
    assert sch.get(partial).name_hint == "C_rf"
    assert sch.get(partial).writes[0].source.scope() == "shared.dsm"


def test_whole_tile_of_a_consumer_that_reduces_its_slice() -> None:
    sch = Schedule(row_sums)
    consumer = sch.get_sblock("D")
    rows, _ = sch.get_loops(consumer)
    _, rank, _ = sch.split(rows, [None, 2, 2])
    sch.cluster_bind(rank)
    block = sch.get_sblock("C")
    sch.dsm_reduce(block, split_reduction(sch, block, 4, 2), scatter=False)
    _, _, _, row, column = sch.get_loops(block)
    assert [int(sch.get(each).extent) for each in (row, column)] == [4, 8]


def test_tile_extents_follow_the_buffer_not_the_loops() -> None:
    """Dimensions of 4, 8 and 2 elements, walked over by loops in another order."""
    sch = Schedule(transposed)
    consumer = sch.get_sblock("D")
    sch.cluster_bind(sch.get_loops(consumer)[0])
    block = sch.get_sblock("C")
    b, i, j, k = sch.get_loops(block)
    rank, rest = sch.split(k, [4, None])
    sch.reorder(rank, rest, b, i, j)
    sch.dsm_reduce(block, rank, scatter=False)
    region = sch.get(consumer).reads[0].region
    assert [int(each.extent) for each in region] == [4, 8, 2]
    (slabs,) = sch.cluster_layout().buffers
    assert slabs.shape == (4, 8, 2)


@pytest.mark.parametrize(
    ("tile", "ranks", "slices"),
    [((8, 8), 8, (1, 8)), ((2, 8), 8, (2, 1)), ((4, 4), 8, (1, 2)), ((2, 8), 16, (1, 1))],
)
def test_output_slices_are_boxes(
    tile: tuple[int, int], ranks: int, slices: tuple[int, int]
) -> None:
    sch = Schedule(matmul)
    block = sch.get_sblock("C")
    i, j, k = sch.get_loops(block)
    (i0, i1), (j0, j1) = sch.split(i, [None, tile[0]]), sch.split(j, [None, tile[1]])
    rank, rest = sch.split(k, [ranks, None])
    sch.reorder(i0, j0, rank, rest, i1, j1)
    sch.dsm_reduce(block, rank, scatter=False)
    store = sch.get_sblock("C_shared")
    *_, slice_loop, element = sch.get_loops(store)
    assert int(sch.get(slice_loop).extent) == ranks
    assert int(sch.get(element).extent) == slices[0] * slices[1]


def test_ranks_on_another_axis_inside_a_cluster_bound_tile_loop() -> None:
    sch = Schedule(matmul)
    block = sch.get_sblock("C")
    rank = split_reduction(sch, block, 4, 4)
    sch.cluster_bind(sch.get_loops(block)[0], "x")
    sch.dsm_reduce(block, rank, axis="y")
    layout = sch.cluster_layout()
    assert layout.axes == (("x", 2), ("y", 4))
    assert [each.axis for each in layout.buffers] == ["y"]
