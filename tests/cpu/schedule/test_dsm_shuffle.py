"""`dsm_shuffle`: the functions it makes, compared whole."""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T

from cpu.macros import X
from cpu.schedule.kernels import mlp
from cpu.schedule.steps import assert_same, cluster_columns


@T.macro
def slices_of_each_cta(A, H, i_0):
    """What the producer does: each CTA fills its slab."""
    for c in T.parallel(4, annotations=X):
        for i_1, f in T.grid(4, 4):
            with T.sblock("H"):
                vi = T.axis.spatial(8, i_0 * 4 + i_1)
                vf = T.axis.spatial(16, c * 4 + f)
                H[vf // 4, vi, vf % 4] = T.max(A[vi, vf], T.float32(0))


@T.prim_func(s_tir=True)
def ring(
    A: T.Buffer((8, 16), "float32"),
    W: T.Buffer((8, 16), "float32"),
    Y: T.Buffer((8, 8), "float32"),
):
    H = T.sblock_alloc_buffer((4, 8, 4), scope="shared.dsm")
    S = T.sblock_alloc_buffer((4, 8, 4), scope="shared.dyn")
    for i_0 in range(2):
        slices_of_each_cta(A, H, i_0)
        for z in T.parallel(4, annotations=X):
            for r in range(4):
                for one, i_1, f in T.grid(1, 4, 4):
                    with T.sblock("H_stage"):
                        v0 = T.axis.spatial(4, r + one)
                        v1 = T.axis.spatial(8, i_0 * 4 + i_1)
                        v2 = T.axis.spatial(4, f)
                        T.sblock_attr({"crossfuse.dsm_shuffle": "ring"})
                        S[v0, v1, v2] = H[v0, v1, v2]
                for k_1, i_1, j_1, k_2 in T.grid(2, 4, 2, 2):
                    with T.sblock("Y"):
                        vi = T.axis.spatial(8, i_0 * 4 + i_1)
                        vj = T.axis.spatial(8, z * 2 + j_1)
                        vk = T.axis.reduce(16, r * 4 + k_1 * 2 + k_2)
                        with T.init():
                            Y[vi, vj] = T.float32(0)
                        Y[vi, vj] = Y[vi, vj] + S[vk // 4, vi, vk % 4] * W[vj, vk]


@T.prim_func(s_tir=True)
def all_gather(
    A: T.Buffer((8, 16), "float32"),
    W: T.Buffer((8, 16), "float32"),
    Y: T.Buffer((8, 8), "float32"),
):
    H = T.sblock_alloc_buffer((4, 8, 4), scope="shared.dsm")
    S = T.sblock_alloc_buffer((4, 8, 4), scope="shared.dyn")
    for i_0 in range(2):
        slices_of_each_cta(A, H, i_0)
        for z in T.parallel(4, annotations=X):
            for r, i_1, f in T.grid(4, 4, 4):
                with T.sblock("H_stage"):
                    v0 = T.axis.spatial(4, r)
                    v1 = T.axis.spatial(8, i_0 * 4 + i_1)
                    v2 = T.axis.spatial(4, f)
                    T.sblock_attr({"crossfuse.dsm_shuffle": "all-gather"})
                    S[v0, v1, v2] = H[v0, v1, v2]
            for r, k_1, i_1, j_1, k_2 in T.grid(4, 2, 4, 2, 2):
                with T.sblock("Y"):
                    vi = T.axis.spatial(8, i_0 * 4 + i_1)
                    vj = T.axis.spatial(8, z * 2 + j_1)
                    vk = T.axis.reduce(16, r * 4 + k_1 * 2 + k_2)
                    with T.init():
                        Y[vi, vj] = T.float32(0)
                    Y[vi, vj] = Y[vi, vj] + S[vk // 4, vi, vk % 4] * W[vj, vk]


@T.prim_func(s_tir=True)
def ring_of_parts(
    A: T.Buffer((8, 16), "float32"),
    W: T.Buffer((8, 16), "float32"),
    Y: T.Buffer((8, 8), "float32"),
):
    H = T.sblock_alloc_buffer((4, 8, 4), scope="shared.dsm")
    S = T.sblock_alloc_buffer((4, 8, 4), scope="shared.dyn")
    for i_0 in range(2):
        slices_of_each_cta(A, H, i_0)
        for z in T.parallel(4, annotations=X):
            for r, k_1 in T.grid(4, 2):
                for one, i_1, f in T.grid(1, 4, 2):
                    with T.sblock("H_stage"):
                        v0 = T.axis.spatial(4, r + one)
                        v1 = T.axis.spatial(8, i_0 * 4 + i_1)
                        v2 = T.axis.spatial(4, k_1 * 2 + f)
                        T.sblock_attr({"crossfuse.dsm_shuffle": "ring"})
                        S[v0, v1, v2] = H[v0, v1, v2]
                for i_1, j_1, k_2 in T.grid(4, 2, 2):
                    with T.sblock("Y"):
                        vi = T.axis.spatial(8, i_0 * 4 + i_1)
                        vj = T.axis.spatial(8, z * 2 + j_1)
                        vk = T.axis.reduce(16, r * 4 + k_1 * 2 + k_2)
                        with T.init():
                            Y[vi, vj] = T.float32(0)
                        Y[vi, vj] = Y[vi, vj] + S[vk // 4, vi, vk % 4] * W[vj, vk]


def shuffled(at: str, **options: Any) -> Any:
    sch = Schedule(mlp)
    consumer = sch.get_sblock("Y")
    loops = cluster_columns(sch, consumer, 4, 4)
    sch.dsm_shuffle(sch.get_sblock("H"), consumer, 0, loops[at], **options)
    return sch


def test_ring_stages_a_slice_at_a_time() -> None:
    assert_same(shuffled("slice"), ring)


def test_all_gather_stages_all_slices_at_once() -> None:
    assert_same(shuffled("rank", ring=False), all_gather)


def test_parts_of_slices_are_staged_inside_the_slice_loop() -> None:
    assert_same(shuffled("part"), ring_of_parts)


def test_the_staging_block_comes_back() -> None:
    sch = Schedule(mlp)
    consumer = sch.get_sblock("Y")
    loops = cluster_columns(sch, consumer, 4, 4)
    stage = sch.dsm_shuffle(sch.get_sblock("H"), consumer, 0, loops["slice"])
    assert dict(sch.get(stage).annotations) == {"crossfuse.dsm_shuffle": "ring"}
    assert sch.get(stage).writes[0].source.scope() == "shared.dyn"


def test_producer_stays_inside_the_loops_of_other_axes() -> None:
    """With rows over y and columns over x, each row of CTAs makes the slices of its rows."""
    sch = Schedule(mlp)
    consumer = sch.get_sblock("Y")
    loops = cluster_columns(sch, consumer, 4, 4)
    sch.cluster_bind(loops["tile"], "y")
    sch.dsm_shuffle(sch.get_sblock("H"), consumer, 0, loops["slice"])
    producer = sch.get_sblock("H")
    rows, rank, *_ = (sch.get(each) for each in sch.get_loops(producer))
    assert rows.same_as(sch.get(loops["tile"]))
    assert str(rank.annotations["crossfuse.cluster_axis"]) == "x"
    (slabs,) = sch.cluster_layout().buffers
    assert (slabs.axis, slabs.count, slabs.shape) == ("x", 4, (4, 4))
