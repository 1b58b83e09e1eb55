"""`cluster_bind`: what it makes of a function, and what the trace says."""

from __future__ import annotations

import pytest
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from cpu.schedule.kernels import matmul
from cpu.schedule.steps import assert_same


@T.prim_func(s_tir=True)
def bound(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    C: T.Buffer((8, 8), "float32"),
):
    for i in T.parallel(8, annotations={"crossfuse.cluster_axis": "x"}):
        for j_0 in T.parallel(2, annotations={"crossfuse.cluster_axis": "y"}):
            for j_1, k in T.grid(4, 32):
                with T.sblock("C"):
                    vi = T.axis.spatial(8, i)
                    vj = T.axis.spatial(8, j_0 * 4 + j_1)
                    vk = T.axis.reduce(32, k)
                    with T.init():
                        C[vi, vj] = T.float32(0)
                    C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


def test_loops_are_parallel_and_carry_their_axis() -> None:
    sch = Schedule(matmul)
    i, j, _ = sch.get_loops(sch.get_sblock("C"))
    columns, _ = sch.split(j, [2, None])
    assert sch.cluster_bind(i) is None
    sch.cluster_bind(columns, "y")
    assert_same(sch, bound)


def test_recorded_as_two_stock_instructions() -> None:
    sch = Schedule(matmul)
    i, _, _ = sch.get_loops(sch.get_sblock("C"))
    before = len(sch.trace.insts)
    sch.cluster_bind(i, axis="z")
    added = sch.trace.insts[before:]
    assert [each.kind.name for each in added] == ["Parallel", "Annotate"]


@pytest.mark.parametrize("extent", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_every_cluster_size(extent: int) -> None:
    sch = Schedule(matmul)
    i, _, _ = sch.get_loops(sch.get_sblock("C"))
    ranks, _ = sch.split(i, [extent, None])
    sch.cluster_bind(ranks)
    assert sch.cluster_layout().axes == (("x", extent),)
