"""`lower_cluster` on hand-written functions, before and after."""

from __future__ import annotations

from tvm.script import tirx as T

from cpu.lower.support import apply, assert_becomes
from cpu.macros import X, Y, Z, cluster_barrier
from crossfuse import _tvm as ir
from crossfuse.lower.lower_cluster import lower_cluster


def test_grid_axis_is_scaled_by_the_cluster_on_it() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((8, 4, 32), "float32"), B: T.Buffer((8, 4, 32), "float32")):
        for b in T.thread_binding(8, thread="blockIdx.x"):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock(""):
                    P = T.sblock_alloc_buffer((4, 32), "float32", scope="shared.dsm")
                    for c in T.parallel(4, annotations=X):
                        P[c, t] = A[b, c, t]
                    for z in T.parallel(4, annotations=X):
                        B[b, z, t] = P[(z + 1) % 4, t] + P[z, t]

    @T.prim_func(s_tir=True)
    def expected(A: T.Buffer((8, 4, 32), "float32"), B: T.Buffer((8, 4, 32), "float32")):
        in_cluster = T.int32()
        T.attr(
            T.iter_var(in_cluster, None, "ThreadIndex", "clusterCtaIdx.x"),
            "crossfuse.cluster_extent",
            4,
        )
        for x in T.thread_binding(32, thread="blockIdx.x"):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock(""):
                    P = T.sblock_alloc_buffer((32,), "float32", scope="shared.dyn", align=16)
                    P_peers = T.sblock_alloc_buffer((4, 4194304), "float32", scope="shared.dsm")
                    P[t] = A[x // 4, x % 4, t]
                    cluster_barrier()
                    B[x // 4, x % 4, t] = P_peers[(x % 4 + 1) % 4, t] + P[t]
                    cluster_barrier()

    assert_becomes(lower_cluster, before, expected)


def test_ranks_of_two_axes_count_x_fastest() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((5, 2, 3, 32), "float32"), B: T.Buffer((5, 2, 3, 32), "float32")):
        for b in T.thread_binding(5, thread="blockIdx.y"):
            for y in T.parallel(2, annotations=Y):
                with T.sblock(""):
                    P = T.sblock_alloc_buffer((3, 32), "float32", scope="shared.dsm")
                    for c in T.parallel(3, annotations=X):
                        for t in range(32):
                            P[c, t] = A[b, y, c, t]
                    for z in T.parallel(3, annotations=X):
                        for t in range(32):
                            B[b, y, z, t] = P[(z + 1) % 3, t]

    @T.prim_func(s_tir=True)
    def expected(A: T.Buffer((5, 2, 3, 32), "float32"), B: T.Buffer((5, 2, 3, 32), "float32")):
        in_y = T.int32()
        T.attr(
            T.iter_var(in_y, None, "ThreadIndex", "clusterCtaIdx.y"), "crossfuse.cluster_extent", 2
        )
        in_x = T.int32()
        T.attr(
            T.iter_var(in_x, None, "ThreadIndex", "clusterCtaIdx.x"), "crossfuse.cluster_extent", 3
        )
        for y in T.thread_binding(10, thread="blockIdx.y"):
            for x in T.thread_binding(3, thread="blockIdx.x"):
                with T.sblock(""):
                    P = T.sblock_alloc_buffer((32,), "float32", scope="shared.dyn", align=16)
                    Q = T.sblock_alloc_buffer((3, 4194304), "float32", scope="shared.dsm")
                    for t in range(32):
                        P[t] = A[y // 2, y % 2, x % 3, t]
                    cluster_barrier()
                    for t in range(32):
                        B[y // 2, y % 2, x % 3, t] = Q[y % 2 * 3 + (x % 3 + 1) % 3, t]
                    cluster_barrier()

    assert_becomes(lower_cluster, before, expected)


def test_rank_along_the_middle_of_three_axes() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((2, 3, 2), "int32"), B: T.Buffer((2, 3, 2), "int32")):
        for z in T.parallel(2, annotations=Z):
            for x in T.parallel(2, annotations=X):
                with T.sblock(""):
                    P = T.sblock_alloc_buffer((3,), "int32", scope="shared.dsm")
                    for y in T.parallel(3, annotations=Y):
                        P[(y + 1) % 3] = A[z, y, x]
                    for y in T.parallel(3, annotations=Y):
                        B[z, y, x] = P[y]

    @T.prim_func(s_tir=True)
    def expected(A: T.Buffer((2, 3, 2), "int32"), B: T.Buffer((2, 3, 2), "int32")):
        in_z = T.int32()
        T.attr(
            T.iter_var(in_z, None, "ThreadIndex", "clusterCtaIdx.z"), "crossfuse.cluster_extent", 2
        )
        in_y = T.int32()
        T.attr(
            T.iter_var(in_y, None, "ThreadIndex", "clusterCtaIdx.y"), "crossfuse.cluster_extent", 3
        )
        in_x = T.int32()
        T.attr(
            T.iter_var(in_x, None, "ThreadIndex", "clusterCtaIdx.x"), "crossfuse.cluster_extent", 2
        )
        for z in T.thread_binding(2, thread="blockIdx.z"):
            for y in T.thread_binding(3, thread="blockIdx.y"):
                for x in T.thread_binding(2, thread="blockIdx.x"):
                    with T.sblock(""):
                        P = T.sblock_alloc_buffer((1,), "int32", scope="shared.dyn", align=16)
                        Q = T.sblock_alloc_buffer((3, 4194304), "int32", scope="shared.dsm")
                        cluster_barrier()
                        Q[(z % 2 * 3 + (y % 3 + 1) % 3) * 2 + x % 2, 0] = A[z % 2, y % 3, x % 2]
                        cluster_barrier()
                        B[z % 2, y % 3, x % 2] = P[0]

    assert_becomes(lower_cluster, before, expected)


def test_slab_of_the_root_block_moves_into_its_kernel() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((4,), "int32"), B: T.Buffer((4,), "int32"), C: T.Buffer((8,), "int32")):
        P = T.sblock_alloc_buffer((4,), "int32", scope="shared.dsm")
        for b in T.thread_binding(8, thread="blockIdx.x"):
            C[b] = 1
        for c in T.parallel(4, annotations=X):
            P[c] = A[c]
        for z in T.parallel(4, annotations=X):
            B[z] = P[3 - z]

    @T.prim_func(s_tir=True)
    def expected(
        A: T.Buffer((4,), "int32"), B: T.Buffer((4,), "int32"), C: T.Buffer((8,), "int32")
    ):
        for b in T.thread_binding(8, thread="blockIdx.x"):
            C[b] = 1
        in_cluster = T.int32()
        with T.attr(
            T.iter_var(in_cluster, None, "ThreadIndex", "clusterCtaIdx.x"),
            "crossfuse.cluster_extent",
            4,
        ):
            for x in T.thread_binding(4, thread="blockIdx.x"):
                with T.sblock(""):
                    P = T.sblock_alloc_buffer((1,), "int32", scope="shared.dyn", align=16)
                    Q = T.sblock_alloc_buffer((4, 4194304), "int32", scope="shared.dsm")
                    P[0] = A[x % 4]
                    cluster_barrier()
                    B[x % 4] = Q[3 - x % 4, 0]
                    cluster_barrier()

    assert_becomes(lower_cluster, before, expected)


def test_temporal_loop_gets_a_barrier_against_the_next_iteration() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((5, 4), "int32"), B: T.Buffer((5, 4), "int32")):
        for _b in T.thread_binding(1, thread="blockIdx.x"):
            with T.sblock(""):
                P = T.sblock_alloc_buffer((4, 1), "int32", scope="shared.dsm")
                for s in range(5):
                    for c in T.parallel(4, annotations=X):
                        P[c, 0] = A[s, c]
                    for z in T.parallel(4, annotations=X):
                        B[s, z] = P[3 - z, 0]

    @T.prim_func(s_tir=True)
    def expected(A: T.Buffer((5, 4), "int32"), B: T.Buffer((5, 4), "int32")):
        in_cluster = T.int32()
        T.attr(
            T.iter_var(in_cluster, None, "ThreadIndex", "clusterCtaIdx.x"),
            "crossfuse.cluster_extent",
            4,
        )
        for x in T.thread_binding(4, thread="blockIdx.x"):
            with T.sblock(""):
                P = T.sblock_alloc_buffer((1,), "int32", scope="shared.dyn", align=16)
                Q = T.sblock_alloc_buffer((4, 4194304), "int32", scope="shared.dsm")
                for s in range(5):
                    cluster_barrier()
                    P[0] = A[s, x % 4]
                    cluster_barrier()
                    B[s, x % 4] = Q[3 - x % 4, 0]
                cluster_barrier()

    assert_becomes(lower_cluster, before, expected)


def test_exchange_of_some_clusters_keeps_its_barriers_inside_the_condition() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((8, 4), "int32"), B: T.Buffer((8, 4), "int32")):
        for b in T.thread_binding(8, thread="blockIdx.x"):
            with T.sblock(""):
                P = T.sblock_alloc_buffer((4, 1), "int32", scope="shared.dsm")
                for c in T.parallel(4, annotations=X):
                    P[c, 0] = A[b, c]
                if b < 5:
                    for z in T.parallel(4, annotations=X):
                        B[b, z] = P[3 - z, 0]
                else:
                    for z in T.parallel(4, annotations=X):
                        B[b, z] = P[z, 0]

    @T.prim_func(s_tir=True)
    def expected(A: T.Buffer((8, 4), "int32"), B: T.Buffer((8, 4), "int32")):
        in_cluster = T.int32()
        T.attr(
            T.iter_var(in_cluster, None, "ThreadIndex", "clusterCtaIdx.x"),
            "crossfuse.cluster_extent",
            4,
        )
        for x in T.thread_binding(32, thread="blockIdx.x"):
            with T.sblock(""):
                P = T.sblock_alloc_buffer((1,), "int32", scope="shared.dyn", align=16)
                Q = T.sblock_alloc_buffer((4, 4194304), "int32", scope="shared.dsm")
                P[0] = A[x // 4, x % 4]
                if x // 4 < 5:
                    cluster_barrier()
                    B[x // 4, x % 4] = Q[3 - x % 4, 0]
                    cluster_barrier()
                else:
                    B[x // 4, x % 4] = P[0]

    assert_becomes(lower_cluster, before, expected)


def test_loop_variables_of_64_bits_get_a_rank_of_64_bits() -> None:
    @T.prim_func(s_tir=True)
    def before(B: T.Buffer((T.int64(4),), "int32")):
        for c in T.parallel(T.int64(4), annotations=X):
            with T.sblock(""):
                B[c] = 1

    @T.prim_func(s_tir=True)
    def expected(B: T.Buffer((T.int64(4),), "int32")):
        in_cluster = T.int32()
        T.attr(
            T.iter_var(in_cluster, None, "ThreadIndex", "clusterCtaIdx.x"),
            "crossfuse.cluster_extent",
            4,
        )
        for x in T.thread_binding(4, thread="blockIdx.x"):
            with T.sblock(""):
                B[T.Cast("int64", x % 4)] = 1

    assert_becomes(lower_cluster, before, expected)


def test_names_that_are_taken_are_not_taken_twice() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((4,), "int32"), B: T.Buffer((4,), "int32")):
        with T.sblock(""):
            P = T.sblock_alloc_buffer((4,), "int32", scope="shared.dsm")
            P_peers = T.sblock_alloc_buffer((4,), "int32", scope="shared.dsm")
            for c in T.parallel(4, annotations=X):
                P[c] = A[c]
                P_peers[c] = A[c]
            for z in T.parallel(4, annotations=X):
                B[z] = P[3 - z] + P_peers[3 - z]

    names: list[str] = []
    ir.walk(
        apply(lower_cluster, before).body,
        (ir.SBlock, lambda block: names.extend(str(each.name) for each in block.alloc_buffers)),
    )
    assert sorted(names) == ["P", "P_peers", "P_peers_1", "P_peers_1_peers"]


def test_function_without_marks_is_the_same_object() -> None:
    @T.prim_func(s_tir=True)
    def before(A: T.Buffer((4,), "int32"), B: T.Buffer((4,), "int32")):
        for c in T.parallel(4):
            B[c] = A[c]

    assert apply(lower_cluster, before).same_as(before)
