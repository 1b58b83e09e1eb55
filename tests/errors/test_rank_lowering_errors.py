"""Functions over ranks that no GPU can run its part of."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from cpu.schedule.ranks import bind_nest, gather, gathered
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower


def refusal(func: Any, **options: Any) -> str:
    with pytest.raises(LoweringRefused) as caught:
        lower(func, **options)
    return str(caught.value)


def on_two(func: Any, *blocks: str) -> Any:
    """A function whose nests of some blocks are bound to two GPUs, and all nests to threads."""
    sch = Schedule(func)
    for name in blocks:
        sch.rank_bind(sch.get_loops(sch.get_sblock(name))[0])
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        bind_nest(sch, block)
    return sch


@T.prim_func(s_tir=True)
def shifted(A: T.Buffer((2, 32), "float32"), C: T.Buffer((2, 32), "float32")):
    """Each rank reads its own slice and that of the other."""
    for g, i in T.grid(2, 32):
        with T.sblock("C"):
            vg, vi = T.axis.remap("SS", [g, i])
            C[vg, vi] = A[vg, vi] + A[1 - vg, vi]


@T.prim_func(s_tir=True)
def flat(A: T.Buffer((64,), "float32"), C: T.Buffer((2, 32), "float32")):
    """Slices of the operand follow each other in one dimension."""
    for g, i in T.grid(2, 32):
        with T.sblock("C"):
            vg, vi = T.axis.remap("SS", [g, i])
            C[vg, vi] = A[vg * 32 + vi]


@T.prim_func(s_tir=True)
def copied(A: T.Buffer((2, 32), "float32"), C: T.Buffer((2, 32), "float32")):
    """A result of each rank that another nest stores for all of them."""
    for g, i in T.grid(2, 32):
        with T.sblock("C"):
            vg, vi = T.axis.remap("SS", [g, i])
            C[vg, vi] = A[vg, vi]
    for i in range(32):
        with T.sblock("zero"):
            vi = T.axis.spatial(32, i)
            C[0, vi] = T.float32(0)


@T.prim_func(s_tir=True)
def one_for_all(A: T.Buffer((2, 32), "float32"), C: T.Buffer((32,), "float32")):
    """One rank stores what all have a copy of."""
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("C"):
                vg, vi = T.axis.remap("SS", [g, i])
                T.where(g == 0)
                C[vi] = A[vg, vi]


@T.prim_func(s_tir=True)
def pushed(A: T.Buffer((2, 32), "float32"), C: T.Buffer((2, 32), "float32")):
    """Each rank stores to the slab of the other."""
    P = T.sblock_alloc_buffer((2, 32), scope="global.peer")
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("P"):
                vg, vi = T.axis.remap("SS", [g, i])
                P[1 - vg, vi] = A[vg, vi]
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("C"):
                vg, vi = T.axis.remap("SS", [g, i])
                C[vg, vi] = P[vg, vi]


@T.prim_func(s_tir=True)
def in_one_nest(A: T.Buffer((2, 32), "float32"), C: T.Buffer((2, 32), "float32")):
    """A nest that fills the own slab and reads that of the other rank."""
    P = T.sblock_alloc_buffer((2, 32), scope="global.peer")
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("P"):
                vg, vi = T.axis.remap("SS", [g, i])
                P[vg, vi] = A[vg, vi]
        for i in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("C"):
                vg, vi = T.axis.remap("SS", [g, i])
                C[vg, vi] = P[1 - vg, vi]


@T.prim_func(s_tir=True)
def without_ranks(A: T.Buffer((2, 32), "float32"), C: T.Buffer((2, 32), "float32")):
    P = T.sblock_alloc_buffer((2, 32), scope="global.peer")
    for g, i in T.grid(2, 32):
        with T.sblock("P"):
            vg, vi = T.axis.remap("SS", [g, i])
            P[vg, vi] = A[vg, vi]
    for g, i in T.grid(2, 32):
        with T.sblock("C"):
            vg, vi = T.axis.remap("SS", [g, i])
            C[vg, vi] = P[1 - vg, vi]


@T.prim_func(s_tir=True)
def three_slabs(A: T.Buffer((2, 32), "float32"), C: T.Buffer((2, 32), "float32")):
    P = T.sblock_alloc_buffer((3, 32), scope="global.peer")
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("P"):
                vg, vi = T.axis.remap("SS", [g, i])
                P[vg, vi] = A[vg, vi]
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i in T.thread_binding(32, "threadIdx.x"):
            with T.sblock("C"):
                vg, vi = T.axis.remap("SS", [g, i])
                C[vg, vi] = P[1 - vg, vi]


@T.prim_func(s_tir=True)
def nested(A: T.Buffer((2, 32), "float32"), C: T.Buffer((2, 32), "float32")):
    for i in T.thread_binding(32, "threadIdx.x"):
        for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
            with T.sblock("C"):
                vg, vi = T.axis.remap("SS", [g, i])
                C[vg, vi] = A[vg, vi]


def test_own_buffer_at_another_rank() -> None:
    assert refusal(on_two(shifted, "C")) == (
        "ranks: buffer 'A': found another rank's slice, beside the own one: C[vg, vi] = A[vg, vi] "
        "+ A[1 - vg, vi]; limit: the slice of the own rank alone, in loops over 2 GPUs; only "
        "buffers in scope global.peer are read at other ranks. Instead: call rank_gather for the "
        "block that reads it."
    )


def test_rank_within_an_index() -> None:
    assert refusal(on_two(flat, "C")) == (
        "ranks: buffer 'A': found the rank in an index that it does not make alone: C[vg, vi] = "
        "A[vg * 32 + vi]; limit: the rank as the first index of what is no peers' buffer. Instead: "
        "give the buffer the rank as its first dimension."
    )


def test_slice_outside_of_the_loops() -> None:
    text = refusal(on_two(copied, "C"))
    assert "buffer 'C': found another rank's slice, beside the own one: C[0, vi] = " in text


def test_copy_of_all_that_one_stores() -> None:
    assert refusal(one_for_all) == (
        "ranks: buffer 'C': found a store by one rank to what all have a copy of: C[vi] = A[vg, "
        "vi]; limit: in a loop over the GPUs, stores to slices of the own rank. Instead: give the "
        "buffer the rank as its first dimension, or take the block out of the loop over the GPUs: "
        "then all of them make it."
    )


def test_store_to_the_slab_of_another() -> None:
    assert refusal(pushed) == (
        "ranks: buffer 'P': found a store to another rank's slab: P[1 - vg, vi] = A[vg, vi]; "
        "limit: slabs that their own GPU fills, in a loop over the GPUs, and all may read. "
        "Instead: let each GPU fill its slab, and the others read from there."
    )


def test_slabs_filled_and_read_in_one_nest() -> None:
    assert refusal(in_one_nest) == (
        "ranks: buffer 'P': found a read of other ranks' slabs in the nest that fills them: C[vg, "
        "vi] = P[1 - vg, vi]; limit: a nest that fills slabs, then one that reads them: ranks wait "
        "for each other between two kernels. Instead: leave the reading block in a nest of its own."
    )


def test_slabs_without_loops_over_gpus() -> None:
    assert refusal(on_two(without_ranks)) == (
        "ranks: function: found buffers in scope global.peer and no loop over the GPUs; limit: "
        "slabs that a loop over the GPUs fills. Instead: call rank_bind for the loop that fills "
        "them."
    )


def test_number_of_slabs() -> None:
    assert "buffer 'P': found shape (3, 32); limit: 2 slabs" in refusal(three_slabs)


def test_loop_over_gpus_inside_of_another() -> None:
    assert refusal(nested) == (
        "ranks: loop 'g': found loop 'i' around it; limit: the outermost loop of its nest, which "
        "is a kernel in each GPU. Instead: move blocks into loops inside of that over the GPUs."
    )


def test_loops_with_stages() -> None:
    sch = Schedule(gathered)
    gather(sch)
    sch.annotate(sch.get_loops(sch.get_sblock("Y"))[-1], "crossfuse.stages", 2)
    assert "ranks: function: found loops with stages, of the Hopper pipeline;" in refusal(sch)
