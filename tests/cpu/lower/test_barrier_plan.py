"""The barrier plan: random programs against an oracle that runs them; each barrier is needed."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crossfuse import _tvm as ir
from crossfuse.lower.barrier_plan import BarrierPlan, plan_barriers
from crossfuse.lower.kernel import read_kernel
from crossfuse.markers import CLUSTER_AXIS

RANKS = 4
SLABS = 3

#: A nest touches one slab (own or of the next rank), by a load or a store.
nests = st.tuples(st.just("nest"), st.integers(0, SLABS - 1), st.booleans(), st.booleans())


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Programs with loops and conditionals over `inner` operations."""
    body = st.lists(inner, min_size=1, max_size=4)
    return st.one_of(
        nests,
        nests,
        st.tuples(st.just("loop"), body),
        st.tuples(st.just("some"), body),
        st.tuples(st.just("if"), body, st.just([]) | body),
    )


programs = st.lists(nested(nested(nests)), min_size=1, max_size=6)


class Program:
    """A random program as TIR, each operation with the loop variable that stands for it."""

    def __init__(self, program: Any) -> None:
        self.slabs = [
            ir.tirx.decl_buffer((RANKS, 8), "int32", f"P{i}", scope="shared.dsm")
            for i in range(SLABS)
        ]
        self.sink = ir.tirx.decl_buffer((RANKS,), "int32", "sink")
        # Own accesses tell which axis a slab lies along; they conflict with no own access.
        seen = [("nest", i, False, False) for i in range(SLABS)]
        self.ops = [self._op(each) for each in (*seen, *program)]
        self.body = self._sequence([op["statement"] for op in self.ops])

    def _sequence(self, statements: list[Any]) -> Any:
        nothing = ir.Evaluate(ir.tirx.const(0, "int32"))
        return ir.SeqStmt([nothing, *statements, nothing])

    def _op(self, op: Any) -> dict[str, Any]:
        if op[0] == "nest":
            return self._nest(*op[1:])
        inside = [self._op(each) for each in op[1]]
        body = self._sequence([each["statement"] for each in inside])
        if op[0] == "if":
            other = [self._op(each) for each in op[2]]
            orelse = self._sequence([each["statement"] for each in other])
            made = ir.IfThenElse(ir.Var("b", "int32") < 3, body, orelse)
            return {"kind": "if", "statement": made, "inside": inside, "other": other}
        extent = ir.tirx.const(2, "int32") if op[0] == "loop" else ir.Var("n", "int32")
        loop = ir.For(
            ir.Var("s", "int32"), ir.tirx.const(0), extent, ir.ForKind.SERIAL, body, None, {}
        )
        return {"kind": op[0], "statement": loop, "var": loop.loop_var, "inside": inside}

    def _nest(self, slab: int, remote: bool, write: bool) -> dict[str, Any]:
        rank = ir.Var("c", "int32")
        at = [ir.tirx.floormod(rank + 1, RANKS) if remote else rank, ir.tirx.const(0)]
        if write:
            body = ir.BufferStore(self.slabs[slab], ir.tirx.const(1, "int32"), at)
        else:
            body = ir.BufferStore(self.sink, ir.tirx.BufferLoad(self.slabs[slab], at), [rank])
        loop = ir.For(
            rank,
            ir.tirx.const(0),
            ir.tirx.const(RANKS, "int32"),
            ir.ForKind.PARALLEL,
            body,
            None,
            {CLUSTER_AXIS: "x"},
        )
        touch = (slab, remote, write)
        return {"kind": "nest", "statement": loop, "var": loop.loop_var, "touch": touch}


def trace(ops: list[Any], plan: BarrierPlan, choose: random.Random) -> list[Any]:
    """One execution with the plan's barriers: touches, and None for a barrier."""
    found: list[Any] = []
    for op in ops:
        if op["kind"] == "if":
            found += trace(op["inside" if choose.random() < 0.5 else "other"], plan, choose)
            continue
        found += [None] if op["var"] in plan.before else []
        if op["kind"] == "nest":
            found.append(op["touch"])
        else:
            for _ in range(2 if op["kind"] == "loop" else choose.choice([0, 1, 2])):
                found += trace(op["inside"], plan, choose)
        found += [None] if op["var"] in plan.after else []
    return found


def is_sound(events: list[Any]) -> bool:
    """No conflicting accesses without a barrier between, none to a CTA that may not be there."""
    since: list[Any] = []
    started = False
    for event in events:
        if event is None:
            since, started = [], True
            continue
        slab, remote, write = event
        if remote and not started:
            return False
        for other, other_remote, other_write in since:
            if other == slab and (remote or other_remote) and (write or other_write):
                return False
        since.append(event)
    return not any(remote for _, remote, _ in since)


def all_sound(program: Program, plan: BarrierPlan, seed: int, tries: int) -> bool:
    choose = random.Random(seed)
    return all(is_sound(trace(program.ops, plan, choose)) for _ in range(tries))


@given(programs, st.integers(0, 1000))
def test_every_execution_is_ordered(source: Any, seed: int) -> None:
    program = Program(source)
    assert all_sound(program, plan_barriers(read_kernel(program.body)), seed, 40)


@given(programs, st.integers(0, 1000))
def test_every_barrier_is_needed(source: Any, seed: int) -> None:
    program = Program(source)
    plan = plan_barriers(read_kernel(program.body))
    for where in (plan.before, plan.after):
        for variable in list(where):
            reason = where.pop(variable)
            assert not all_sound(program, plan, seed, 2000), (
                f"the barrier for {reason} is not needed"
            )
            where[variable] = reason


def test_kernel_without_remote_accesses_has_no_barrier() -> None:
    program = Program([("nest", 0, False, True), ("loop", [("nest", 0, False, False)])])
    assert plan_barriers(read_kernel(program.body)) == BarrierPlan()
