"""The small passes of the lowering on hand-written functions, before and after."""

from __future__ import annotations

import pytest
from tvm.script import tirx as T

from cpu.lower.support import apply, assert_becomes
from cpu.macros import X
from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, PlanRefused, refuse
from crossfuse.lower.lower_cluster import launch_clusters, rotate_rings
from crossfuse.lower.pipeline import drop_markers
from crossfuse.lower.refusal import refusals
from crossfuse.lower.slabs import lower_dsm_access

LOWERED = {"crossfuse.lowered": True}


def test_markers_beside_a_cluster_barrier_are_dropped_and_others_kept() -> None:
    @T.prim_func
    def before(A: T.Buffer((4,), "int32")):
        T.tvm_storage_sync("shared")
        A[0] = 1
        T.tvm_storage_sync("shared")
        T.tvm_storage_sync("shared.dyn")
        T.cuda.func_call("crossfuse_cluster_sync", source_code="")
        T.tvm_storage_sync("shared.dyn")
        A[1] = 1
        T.tvm_storage_sync("warp")
        T.cuda.func_call("crossfuse_cluster_sync", source_code="")
        A[2] = 1
        T.tvm_storage_sync("shared")
        A[3] = 1

    @T.prim_func
    def expected(A: T.Buffer((4,), "int32")):
        T.tvm_storage_sync("shared")
        A[0] = 1
        T.cuda.func_call("crossfuse_cluster_sync", source_code="")
        A[1] = 1
        T.tvm_storage_sync("warp")
        T.cuda.func_call("crossfuse_cluster_sync", source_code="")
        A[2] = 1
        T.tvm_storage_sync("shared")
        A[3] = 1

    assert_becomes(drop_markers, before, expected)


def test_markers_of_nested_sequences_are_dropped_too() -> None:
    @T.prim_func
    def before(A: T.Buffer((4,), "int32")):
        for i in range(4):
            A[i] = 1
            T.tvm_storage_sync("shared")
            T.cuda.func_call("crossfuse_cluster_sync", source_code="")

    @T.prim_func
    def expected(A: T.Buffer((4,), "int32")):
        for i in range(4):
            A[i] = 1
            T.cuda.func_call("crossfuse_cluster_sync", source_code="")

    assert_becomes(drop_markers, before, expected)


def test_cluster_extents_become_extents_of_the_launch() -> None:
    @T.prim_func
    def before(A: T.Buffer((4,), "int32")):
        c = T.int32()
        T.attr(T.iter_var(c, None, "ThreadIndex", "clusterCtaIdx.x"), "crossfuse.cluster_extent", 4)
        A[0] = 1

    @T.prim_func
    def expected(A: T.Buffer((4,), "int32")):
        c = T.int32()
        T.attr(T.iter_var(c, None, "ThreadIndex", "clusterCtaIdx.x"), "thread_extent", 4)
        A[0] = 1

    assert_becomes(launch_clusters, before, expected)


def test_stand_in_becomes_calls_by_rank_and_own_address() -> None:
    @T.prim_func
    def before(B: T.Buffer((32,), "float32")):
        T.func_attr(LOWERED)
        x = T.launch_thread("blockIdx.x", 4)
        t = T.launch_thread("threadIdx.x", 32)
        P = T.alloc_buffer((32,), "float32", scope="shared.dyn")
        P_peers = T.alloc_buffer((16777216,), "float32", scope="shared.dsm")
        P[t] = T.float32(1)
        B[t] = P_peers[(x + 1) % 4 * 4194304 + t]
        P_peers[(x + 2) % 4 * 4194304 + t] = B[t]

    @T.prim_func
    def expected(B: T.Buffer((32,), "float32")):
        x = T.launch_thread("blockIdx.x", 4)
        t = T.launch_thread("threadIdx.x", 32)
        P = T.alloc_buffer((32,), "float32", scope="shared.dyn")
        P[t] = T.float32(1)
        B[t] = T.reinterpret(
            "float32",
            T.cuda.func_call(
                "crossfuse_dsm_load_b32",
                T.address_of(P[t]),
                (x + 1) % 4,
                source_code="",
                return_type="uint32",
            ),
        )
        T.cuda.func_call(
            "crossfuse_dsm_store_b32",
            T.address_of(P[t]),
            (x + 2) % 4,
            T.reinterpret("uint32", B[t]),
            source_code="",
        )

    assert_becomes(lower_dsm_access, before, expected)


def test_vector_of_a_stand_in_is_one_access() -> None:
    @T.prim_func
    def before(B: T.Buffer((256,), "float16")):
        T.func_attr(LOWERED)
        t = T.launch_thread("threadIdx.x", 32)
        P = T.alloc_buffer((256,), "float16", scope="shared.dyn")
        P_peers = T.alloc_buffer((16777216,), "float16", scope="shared.dsm")
        P[t] = T.float16(1)
        for r in range(4):
            B[T.Ramp(t * 8, 1, 8)] = P_peers[T.Ramp(r * 4194304 + t * 8, 1, 8)]

    @T.prim_func
    def expected(B: T.Buffer((256,), "float16")):
        t = T.launch_thread("threadIdx.x", 32)
        P = T.alloc_buffer((256,), "float16", scope="shared.dyn")
        P[t] = T.float16(1)
        for r in range(4):
            B[T.Ramp(t * 8, 1, 8)] = T.reinterpret(
                "float16x8",
                T.cuda.func_call(
                    "crossfuse_dsm_load_b128",
                    T.address_of(P[t * 8]),
                    r,
                    source_code="",
                    return_type="uint32x4",
                ),
            )

    assert_becomes(lower_dsm_access, before, expected)


def test_function_that_was_not_lowered_keeps_what_looks_like_a_stand_in() -> None:
    @T.prim_func
    def before(B: T.Buffer((32,), "float32")):
        t = T.launch_thread("threadIdx.x", 32)
        P_peers = T.alloc_buffer((32,), "float32", scope="shared.dsm")
        P_peers[t] = T.float32(1)
        B[t] = P_peers[t]

    assert apply(lower_dsm_access, before).same_as(before)


def test_ring_starts_at_the_own_slice() -> None:
    @T.prim_func(s_tir=True)
    def before(Y: T.Buffer((4,), "int32"), D: T.Buffer((4, 4), "int32")):
        with T.sblock("tile"):
            H = T.sblock_alloc_buffer((4,), "int32", scope="shared.dsm")
            for c in T.parallel(4, annotations=X):
                H[c] = c
            for z in T.parallel(4, annotations=X):
                for r in range(4):
                    with T.sblock("step"):
                        S = T.sblock_alloc_buffer((1,), "int32", scope="shared.dyn")
                        with T.sblock("stage"):
                            T.sblock_attr({"crossfuse.dsm_shuffle": "ring"})
                            S[0] = H[r]
                        Y[z] = Y[z] + S[0] * D[r, z]

    @T.prim_func(s_tir=True)
    def expected(Y: T.Buffer((4,), "int32"), D: T.Buffer((4, 4), "int32")):
        with T.sblock("tile"):
            H = T.sblock_alloc_buffer((4,), "int32", scope="shared.dsm")
            for c in T.parallel(4, annotations=X):
                H[c] = c
            for z in T.parallel(4, annotations=X):
                for r in range(4):
                    with T.sblock("step"):
                        S = T.sblock_alloc_buffer((1,), "int32", scope="shared.dyn")
                        with T.sblock("stage"):
                            T.sblock_attr({"crossfuse.dsm_shuffle": "ring"})
                            S[0] = H[(r + z) % 4]
                        Y[z] = Y[z] + S[0] * D[(r + z) % 4, z]

    assert_becomes(_rotation, before, expected)


def _rotation() -> object:
    from crossfuse import _tvm as ir

    return ir.prim_func_pass("Rotate", lambda func: ir.with_body(func, rotate_rings(func.body)))


def test_all_gather_keeps_the_order_of_ranks() -> None:
    @T.prim_func(s_tir=True)
    def before(Y: T.Buffer((4,), "int32")):
        with T.sblock("tile"):
            H = T.sblock_alloc_buffer((4,), "int32", scope="shared.dsm")
            for c in T.parallel(4, annotations=X):
                H[c] = c
            for z in T.parallel(4, annotations=X):
                for r in range(4):
                    with T.sblock("stage"):
                        T.sblock_attr({"crossfuse.dsm_shuffle": "all-gather"})
                        Y[z] = Y[z] + H[r]

    assert rotate_rings(before.body).same_as(before.body)


def test_refusal_inside_a_pass_is_raised_as_itself() -> None:
    @T.prim_func
    def before(B: T.Buffer((256,), "float16")):
        T.func_attr(LOWERED)
        t = T.launch_thread("threadIdx.x", 32)
        P = T.alloc_buffer((256,), "float16", scope="shared.dyn")
        P_peers = T.alloc_buffer((16777216,), "float16", scope="shared.dsm")
        P[t] = T.float16(1)
        B[T.Ramp(0, 1, 2)] = P_peers[T.Ramp(t, 1, 2)]

    with (
        pytest.raises(LoweringRefused, match=r"from t, which may be misaligned"),
        refusals("function 'main'"),
    ):
        apply(lower_dsm_access, before)
    with pytest.raises(RuntimeError, match=r"from t, which may be misaligned"):
        apply(lower_dsm_access, before)


def test_refusals_of_other_families_are_raised_as_themselves() -> None:
    def visit(_: object) -> None:
        raise refuse(PlanRefused, "plan", "a block", found="x", limit="y", instead="z")

    body = ir.tirx.Evaluate(ir.tirx.const(0, "int32"))
    with pytest.raises(PlanRefused, match="plan: a block: found x"), refusals("function 'main'"):
        ir.walk(body, (ir.tirx.Evaluate, visit))


def test_other_failure_of_tvm_becomes_a_refusal() -> None:
    with pytest.raises(LoweringRefused) as caught, refusals("function 'main'"):
        raise RuntimeError("TVM says\n  InternalError: Check failed: (x) is false: so it goes.")
    assert str(caught.value) == (
        "lower: function 'main': found a failure of TVM: InternalError: Check failed: (x) is "
        "false: so it goes; limit: a function that TVM's passes and code generator take. "
        "Instead: change the schedule as the message says."
    )
    assert isinstance(caught.value.__cause__, RuntimeError)
