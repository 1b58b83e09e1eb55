"""`place_shared_memory`: loads, stores, views, vectors and pointers move with their buffer."""

from __future__ import annotations

import pytest
from tvm.script import tirx as T

from cpu.lower.support import apply, assert_becomes
from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused
from crossfuse.lower.buffers import place_shared_memory
from crossfuse.lower.refusal import refusals

LOWERED = {"crossfuse.lowered": True}


def test_static_and_dynamic_buffers_become_views_of_one_allocation() -> None:
    @T.prim_func
    def before(B: T.Buffer((64,), "float32")):
        T.func_attr(LOWERED)
        t = T.launch_thread("threadIdx.x", 16)
        S = T.alloc_buffer((64,), "float32", scope="shared")
        H = T.alloc_buffer((16,), "float16", scope="shared.dyn")
        S[T.Ramp(t * 4, 1, 4)] = B[T.Ramp(t * 4, 1, 4)]
        H[t] = T.Cast("float16", S[t])
        B[t] = T.Cast("float32", H[15 - t])

    @T.prim_func
    def expected(B: T.Buffer((64,), "float32")):
        t = T.launch_thread("threadIdx.x", 16)
        arena = T.alloc_buffer((288,), "uint8", scope="shared.dyn", align=128)
        S = T.decl_buffer((64,), "float32", data=arena.data, scope="shared.dyn")
        H = T.decl_buffer((16,), "float16", data=arena.data, scope="shared.dyn")
        S[T.Ramp(t * 4, 1, 4)] = B[T.Ramp(t * 4, 1, 4)]
        H[t + 128] = T.Cast("float16", S[t])
        B[t] = T.Cast("float32", H[15 - t + 128])

    assert_becomes(place_shared_memory, before, expected)


def test_vectors_move_by_whole_vectors() -> None:
    @T.prim_func
    def before(B: T.Buffer((64,), "float32")):
        T.func_attr(LOWERED)
        t = T.launch_thread("threadIdx.x", 16)
        S = T.alloc_buffer((128,), "float32", scope="shared.dyn")
        V = T.alloc_buffer((16,), "float32x4", scope="shared.dyn")
        S[T.Ramp(t * 4, 1, 4)] = T.Broadcast(T.float32(1), 4)
        V[t] = B[T.Ramp(t * 4, 1, 4)]
        B[T.Ramp(t * 4, 1, 4)] = V[15 - t]

    @T.prim_func
    def expected(B: T.Buffer((64,), "float32")):
        t = T.launch_thread("threadIdx.x", 16)
        arena = T.alloc_buffer((768,), "uint8", scope="shared.dyn", align=128)
        S = T.decl_buffer((128,), "float32", data=arena.data, scope="shared.dyn")
        V = T.decl_buffer((16,), "float32x4", data=arena.data, scope="shared.dyn")
        S[T.Ramp(t * 4, 1, 4)] = T.Broadcast(T.float32(1), 4)
        V[t + 32] = B[T.Ramp(t * 4, 1, 4)]
        B[T.Ramp(t * 4, 1, 4)] = V[15 - t + 32]

    assert_becomes(place_shared_memory, before, expected)


def test_views_and_pointers_move_too() -> None:
    @T.prim_func
    def before(B: T.Buffer((64,), "float32")):
        T.func_attr(LOWERED)
        t = T.launch_thread("threadIdx.x", 16)
        S = T.alloc_buffer((64,), "float32", scope="shared.dyn")
        H = T.alloc_buffer((16,), "float32", scope="shared.dyn")
        W = T.decl_buffer((32,), "float16", data=H.data, scope="shared.dyn")
        S[t] = B[t]
        W[t] = T.float16(1)
        T.call_extern("int32", "look", T.address_of(H[t]))
        T.call_extern("int32", "look", H.access_ptr("r", offset=2))
        T.call_extern("int32", "look", H.data)

    @T.prim_func
    def expected(B: T.Buffer((64,), "float32")):
        t = T.launch_thread("threadIdx.x", 16)
        arena = T.alloc_buffer((320,), "uint8", scope="shared.dyn", align=128)
        S = T.decl_buffer((64,), "float32", data=arena.data, scope="shared.dyn")
        H = T.decl_buffer((16,), "float32", data=arena.data, scope="shared.dyn")
        W = T.decl_buffer((32,), "float16", data=arena.data, scope="shared.dyn")
        S[t] = B[t]
        W[t + 128] = T.float16(1)
        T.call_extern("int32", "look", T.address_of(H[t + 64]))
        T.call_extern("int32", "look", H.access_ptr("r", offset=66, extent=14))
        T.call_extern("int32", "look", T.address_of(H[64]))

    assert_becomes(place_shared_memory, before, expected)


def test_alignment_that_a_buffer_wants_is_kept() -> None:
    @T.prim_func
    def before(B: T.Buffer((16,), "float32")):
        T.func_attr(LOWERED)
        t = T.launch_thread("threadIdx.x", 16)
        S = T.alloc_buffer((64,), "float32", scope="shared.dyn")
        H = T.alloc_buffer((16,), "float32", scope="shared.dyn", align=1024)
        S[t] = B[t]
        H[t] = S[t]

    plan = apply(place_shared_memory, before).attrs["crossfuse.shared_memory"]
    assert list(plan["H"])[:2] == [1024, 64]
    arenas: list[int] = []
    ir.walk(
        apply(place_shared_memory, before).body,
        (ir.AllocBuffer, lambda node: arenas.append(int(node.buffer.data_alignment))),
    )
    assert arenas == [1024]


def test_each_launch_has_an_allocation_and_stages_of_one_name_are_told_apart() -> None:
    @T.prim_func
    def before(B: T.Buffer((16,), "float32")):
        T.func_attr(LOWERED)
        with T.launch_thread("threadIdx.x", 16) as t:
            S = T.alloc_buffer((16,), "float32", scope="shared.dyn")
            S[t] = B[t]
        with T.launch_thread("threadIdx.x", 16) as t:
            S = T.alloc_buffer((32,), "float32", scope="shared.dyn")
            S[t] = B[t]

    plan = apply(place_shared_memory, before).attrs["crossfuse.shared_memory"]
    assert {str(name): list(numbers) for name, numbers in plan.items()} == {
        "S": [0, 64, 0, 0],
        "S_1": [0, 128, 0, 0],
    }


def test_function_that_was_not_lowered_keeps_its_allocations() -> None:
    @T.prim_func
    def before(B: T.Buffer((16,), "float32")):
        t = T.launch_thread("threadIdx.x", 16)
        S = T.alloc_buffer((16,), "float32", scope="shared")
        S[t] = B[t]

    assert apply(place_shared_memory, before).same_as(before)


def test_use_that_cannot_be_moved_is_refused() -> None:
    @T.prim_func
    def before(B: T.Buffer((16,), "float32")):
        T.func_attr(LOWERED)
        t = T.launch_thread("threadIdx.x", 16)
        S = T.alloc_buffer((16,), "float32", scope="shared.dyn")
        S[t] = B[t]
        T.call_extern("int32", "look", S)

    with pytest.raises(LoweringRefused) as caught, refusals("function"):
        apply(place_shared_memory, before)
    assert str(caught.value) == (
        "shared-memory: buffer 'S': found a use that cannot be moved: T.call_extern(\"int32\", "
        '"look", S); limit: loads, stores, views and pointers of elements. Instead: pass the '
        "buffer to calls as access_ptr or address_of."
    )
