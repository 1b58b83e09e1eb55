"""The shared memory plan: random programs against an oracle that runs them, and small cases."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused
from crossfuse.lower.buffers import ALIGNMENT, first_fit, plan_shared_memory
from crossfuse.lower.image import Placement, SharedMemoryPlan, check_budget
from crossfuse.lower.slabs import cluster_barrier, dsm_load

BARRIER = ("barrier",)
COUNT = 8
DTYPES = ("float32", "float16", "int8", "float32x4")

uses = st.tuples(st.just("use"), st.integers(0, COUNT - 1), st.booleans())
simple = st.one_of(uses, uses, st.just(BARRIER))


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Programs with loops and conditionals over `inner` operations."""
    body = st.lists(inner, min_size=1, max_size=5)
    compound = st.one_of(
        st.tuples(st.just("loop"), body),
        st.tuples(st.just("some"), body),
        st.tuples(st.just("if"), body, st.just([]) | body),
    )
    return st.one_of(uses, st.just(BARRIER), compound)


programs = st.lists(nested(nested(simple)), min_size=3, max_size=6)
buffers = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from(DTYPES), st.sampled_from([64, 256])),
    min_size=COUNT,
    max_size=COUNT,
)


def build(program: Any, made: list[Any]) -> Any:
    """The statement of a program on buffers."""
    statements = [_statement(each, made) for each in program]
    nothing = ir.Evaluate(ir.tirx.const(0, "int32"))
    return ir.SeqStmt([nothing, *statements, nothing])


def _statement(op: Any, made: list[Any]) -> Any:
    zero = ir.tirx.const(0, "int32")
    if op[0] == "barrier":
        return cluster_barrier()
    if op[0] == "use":
        buffer = made[op[1]]
        if op[2]:
            address = ir.tirx.address_of(ir.tirx.BufferLoad(buffer, [zero]))
            return ir.Evaluate(dsm_load(address, zero, "float32", 1))
        dtype = ir.tvm.DataType(str(buffer.ty.dtype))
        value: Any = ir.tirx.const(0, str(buffer.ty.dtype).split("x")[0])
        if dtype.lanes > 1:
            value = ir.tirx.Broadcast(value, dtype.lanes)
        return ir.BufferStore(buffer, value, [zero])
    if op[0] in ("loop", "some"):
        extent = ir.tirx.const(3, "int32") if op[0] == "loop" else ir.Var("n", "int32")
        loop_var = ir.Var("i", "int32")
        return ir.For(loop_var, zero, extent, ir.ForKind.SERIAL, build(op[1], made), None, {})
    condition = ir.Var("x", "int32") < 3
    return ir.IfThenElse(condition, build(op[1], made), build(op[2], made))


def run(program: Any, choose: random.Random) -> list[Any]:
    """One execution: the uses and barriers as they come."""
    trace: list[Any] = []
    for op in program:
        if op[0] in ("loop", "some"):
            for _ in range(3 if op[0] == "loop" else choose.choice([0, 1, 3])):
                trace += run(op[1], choose)
        elif op[0] == "if":
            trace += run(op[1 + choose.randrange(2)], choose)
        else:
            trace.append(op)
    return trace


@settings(max_examples=4 * settings().max_examples)
@given(programs, buffers, st.randoms(use_true_random=False))
def test_shared_bytes_have_a_barrier_between_their_uses(
    program: Any, sizes: Any, choose: random.Random
) -> None:
    made = [
        ir.tirx.decl_buffer((n,), dtype, f"b{i}", scope="shared.dyn", data_alignment=align)
        for i, (n, dtype, align) in enumerate(sizes)
    ]
    body = ir.SeqStmt([*map(ir.AllocBuffer, made), build(program, made)])
    plan, offsets = plan_shared_memory(body)
    bytes_of = {
        placed.name: (placed.offset, placed.offset + placed.size) for placed in plan.placements
    }
    assert plan.total == max((end for _, end in bytes_of.values()), default=0)
    assert plan.total <= sum(-(-placed.size // 256) * 256 for placed in plan.placements)
    for buffer, offset in offsets.items():
        assert offset % max(ALIGNMENT, buffer.data_alignment) == 0
    for _ in range(8):
        _check_trace(run(program, choose), made, bytes_of)


def _check_trace(trace: list[Any], made: list[Any], bytes_of: Any) -> None:
    """No use of other bytes' owner may follow without a barrier in between."""
    since: set[str] = set()
    for op in trace:
        if op == BARRIER:
            since.clear()
            continue
        name = str(made[op[1]].name)
        start, end = bytes_of[name]
        for other in since - {name}:
            first, last = bytes_of[other]
            assert end <= first or last <= start, f"{name} on {other}"
        since.add(name)


@given(
    st.integers(1, 500),
    st.sampled_from([1, 128, 1024]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 700))),
)
def test_first_fit_is_the_lowest_aligned_gap(size: int, align: int, taken: Any) -> None:
    rivals = [Placement(str(i), 128 * at, n, 0, 0) for i, (at, n) in enumerate(taken)]
    found = first_fit(size, align, rivals)
    fits = [
        offset
        for offset in range(0, found + 1, align)
        if all(offset + size <= r.offset or r.offset + r.size <= offset for r in rivals)
    ]
    assert fits == [found]


def plan_of(*program: Any, count: int = COUNT) -> dict[str, Placement]:
    made = [
        ir.tirx.decl_buffer((64,), "float32", f"b{i}", scope="shared.dyn") for i in range(count)
    ]
    body = ir.SeqStmt([*map(ir.AllocBuffer, made), build(program, made)])
    return {placed.name: placed for placed in plan_shared_memory(body)[0].placements}


def use(index: int) -> Any:
    return ("use", index, False)


def read_by_peers(index: int) -> Any:
    return ("use", index, True)


def test_phases_reuse_memory_across_a_barrier() -> None:
    placed = plan_of(use(0), BARRIER, use(1))
    assert placed["b0"].offset == placed["b1"].offset == 0


def test_phases_without_a_barrier_do_not() -> None:
    placed = plan_of(use(0), use(1))
    assert {placed["b0"].offset, placed["b1"].offset} == {0, 256}


def test_slab_is_kept_until_the_barrier_after_its_last_remote_access() -> None:
    placed = plan_of(use(0), BARRIER, read_by_peers(0), use(1), BARRIER, use(2))
    assert placed["b1"].offset != placed["b0"].offset
    assert placed["b2"].offset == 0


def test_loop_with_a_barrier_is_one_stretch() -> None:
    placed = plan_of(("loop", [use(0), BARRIER, use(1)]), BARRIER, use(2))
    assert placed["b0"].offset != placed["b1"].offset
    assert placed["b2"].offset == 0


def test_barrier_of_a_loop_that_may_not_run_separates_nothing_outside_it() -> None:
    placed = plan_of(use(0), ("some", [BARRIER]), use(1))
    assert placed["b0"].offset != placed["b1"].offset
    placed = plan_of(use(0), ("loop", [BARRIER]), use(1))
    assert placed["b0"].offset == placed["b1"].offset


def test_barrier_of_some_clusters_separates_nothing_outside_its_condition() -> None:
    placed = plan_of(use(0), ("if", [BARRIER, use(2)], []), use(1))
    assert placed["b0"].offset != placed["b1"].offset


def test_view_keeps_its_buffer_alive() -> None:
    buffer, other = (
        ir.tirx.decl_buffer((64,), "float32", name, scope="shared.dyn") for name in ("b", "o")
    )
    view = ir.tirx.decl_buffer((64,), "int32", "view", data=buffer.data, scope="shared.dyn")
    made = [buffer, other, view]
    body = ir.SeqStmt(
        [
            ir.AllocBuffer(buffer),
            ir.AllocBuffer(other),
            ir.DeclBuffer(view, data=buffer.data),
            build([use(0), BARRIER, use(1)], made),
            build([use(2)], made),
        ]
    )
    plan, _ = plan_shared_memory(body)
    assert sorted((each.name, each.offset) for each in plan.placements) == [("b", 0), ("o", 256)]


def test_pointer_with_a_name_keeps_its_buffer_alive() -> None:
    buffer, other = (
        ir.tirx.decl_buffer((64,), "float32", name, scope="shared.dyn") for name in ("b", "o")
    )
    address = ir.tirx.address_of(ir.tirx.BufferLoad(buffer, [0]))
    pointer = ir.Var("p", address.ty)
    body = ir.SeqStmt(
        [
            ir.AllocBuffer(buffer),
            ir.AllocBuffer(other),
            ir.Bind(pointer, address),
            build([BARRIER, use(1)], [buffer, other]),
            ir.Evaluate(ir.tirx.call_extern("int32", "look", pointer)),
        ]
    )
    plan, _ = plan_shared_memory(body)
    assert sorted(each.offset for each in plan.placements) == [0, 256]


def test_budget_lists_every_buffer() -> None:
    plan = SharedMemoryPlan(
        (Placement("A_shared", 0, 200000, 0, 0), Placement("P", 200064, 40000, 0, 1)), 240064
    )
    with pytest.raises(LoweringRefused) as caught:
        check_budget(plan)
    assert caught.value.refusal.found == "240064 bytes ('A_shared' 200000, 'P' 40000)"
    assert str(caught.value) == (
        "shared-memory: kernel: found 240064 bytes ('A_shared' 200000, 'P' 40000); limit: 232448 "
        "bytes of shared memory in a CTA. Instead: use smaller tiles, a larger cluster, or stage "
        "parts of a slice (a dsm_shuffle loop inside the slice loop)."
    )
    check_budget(SharedMemoryPlan(plan.placements, 232448))
