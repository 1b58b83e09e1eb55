"""`lower_cluster` on hand-written functions, before and after."""

from __future__ import annotations

from tvm.script import tirx as T

from cpu.lower.support import X, Y, Z, assert_becomes
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
                    T.tvm_storage_sync("shared")
                    T.tvm_storage_sync("shared.dyn")
                    T.cuda.func_call("crossfuse_cluster_sync", source_code="")
                    B[x // 4, x % 4, t] = P_peers[(x % 4 + 1) % 4, t] + P[t]
                    T.tvm_storage_sync("shared")
                    T.tvm_storage_sync("shared.dyn")
                    T.cuda.func_call("crossfuse_cluster_sync", source_code="")

    assert_becomes(lower_cluster, before, expected)
