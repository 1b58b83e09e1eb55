"""`grid_stage`: the mark that it leaves, and its trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm.script import tirx as T

from cpu.schedule.kernels import scaled_matmul
from cpu.schedule.steps import assert_same
from crossfuse.emulate.llvm import run_sequential
from crossfuse.markers import staged_blocks
from crossfuse.schedule.planned import trace_json
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import check, parse, prim_func, random_inputs

FFN = "gated_ffn:M=16,K=64,N=256,L=64,dtype=bfloat16"


@T.prim_func(s_tir=True)
def staged(
    A: T.Buffer((8, 32), "float32"),
    B: T.Buffer((32, 8), "float32"),
    D: T.Buffer((8, 8), "float32"),
):
    C = T.sblock_alloc_buffer((8, 8))
    for i, j, k in T.grid(8, 8, 32):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            T.sblock_attr({"crossfuse.grid_stage": 1})
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j in T.grid(8, 8):
        with T.sblock("D"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = C[vi, vj] * T.float32(2)


def marked() -> Any:
    sch = Schedule(scaled_matmul)
    assert sch.grid_stage(sch.get_sblock("C")) is None
    return sch


def test_the_block_is_annotated_and_nothing_else_changes() -> None:
    assert_same(marked(), staged)


def test_recorded_as_one_stock_instruction() -> None:
    sch = Schedule(scaled_matmul)
    block = sch.get_sblock("C")
    before = len(sch.trace.insts)
    sch.grid_stage(block)
    assert [each.kind.name for each in sch.trace.insts[before:]] == ["Annotate"]


@pytest.mark.parametrize("simplified", [False, True])
def test_replays_equal(simplified: bool) -> None:
    sch = marked()
    trace = sch.trace.simplified(remove_postproc=False) if simplified else sch.trace
    again = Schedule(scaled_matmul)
    trace.apply_to_schedule(again, remove_postproc=False)
    assert_same(again, sch)


def test_json_text_replays_equal() -> None:
    sch = marked()
    again = Schedule(scaled_matmul)
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)
    assert trace_json(again.trace) == trace_json(sch.trace)


def test_python_text_replays_equal() -> None:
    sch = marked()
    again = Schedule(scaled_matmul)
    scope: dict[str, Any] = {}
    exec(str(sch.trace).replace("s_tir.Schedule", "object"), scope)
    scope["apply_trace"](again)
    assert_same(again, sch)


def test_the_rule_marks_the_intermediate_alone() -> None:
    func = prim_func(parse(FFN))
    sch = schedule_tiled_ffn(func)
    assert [str(each.name_hint) for each in staged_blocks(sch.mod["main"])] == ["hidden"]
    assert not staged_blocks(schedule_tiled_ffn(func, staged=False).mod["main"])
    again = Schedule(func)
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)


def test_the_function_is_the_same_sequential_program() -> None:
    spec = parse(FFN)
    inputs = random_inputs(spec)
    report = run_sequential(schedule_tiled_ffn(prim_func(spec)), inputs)
    report.raise_if_wrong()
    check(spec, inputs, report.outputs["out"])
