"""`rank_bind`, `rank_reduce` and `rank_gather`: what they make, traces, what it computes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm.script import tirx as T

from cpu.schedule.ranks import (
    CASES,
    all_reduced,
    gather,
    gathered_sums,
    operands,
    reduce_scatter,
    reduce_scattered,
    scheduled,
)
from cpu.schedule.steps import assert_same
from crossfuse.emulate.llvm import run_sequential
from crossfuse.schedule.planned import trace_json


@T.prim_func(s_tir=True)
def scattered_parts(
    A: T.Buffer((2, 16, 64), "float32"),
    B: T.Buffer((2, 64, 32), "float32"),
    C: T.Buffer((2, 8, 32), "float32"),
):
    P = T.sblock_alloc_buffer((2, 2, 8, 32), scope="global.peer")
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for z, i, j, k in T.grid(2, 8, 32, 64):
            with T.sblock("C_rf"):
                vg, vz, vi, vj, vk = T.axis.remap("SSSSR", [g, z, i, j, k])
                with T.init():
                    P[vg, vz, vi, vj] = T.float32(0)
                P[vg, vz, vi, vj] = P[vg, vz, vi, vj] + A[vg, vz * 8 + vi, vk] * B[vg, vk, vj]
    for z in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i, j, g in T.grid(8, 32, 2):
            with T.sblock("C"):
                vg, vz, vi, vj = T.axis.remap("RSSS", [g, z, i, j])
                with T.init():
                    C[vz, vi, vj] = T.float32(0)
                C[vz, vi, vj] = C[vz, vi, vj] + P[vg, vz, vi, vj]


@T.prim_func(s_tir=True)
def made_in_slabs(
    X: T.Buffer((2, 8, 64), "float32"),
    W: T.Buffer((2, 64, 32), "float32"),
    Y: T.Buffer((2, 16, 32), "float32"),
):
    S = T.sblock_alloc_buffer((2, 8, 64), scope="global.peer")
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i, k in T.grid(8, 64):
            with T.sblock("S"):
                vg, vi, vk = T.axis.remap("SSS", [g, i, k])
                S[vg, vi, vk] = X[vg, vi, vk] * T.float32(2)
    for g in T.parallel(2, annotations={"crossfuse.rank_bound": 1}):
        for i, j, k in T.grid(16, 32, 64):
            with T.sblock("Y"):
                vg, vi, vj, vk = T.axis.remap("SSSR", [g, i, j, k])
                with T.init():
                    Y[vg, vi, vj] = T.float32(0)
                Y[vg, vi, vj] = Y[vg, vi, vj] + S[vi // 8, vi % 8, vk] * W[vg, vk, vj]


def test_reduce_scatter_makes_parts_in_slabs_and_each_rank_adds_its_slice() -> None:
    sch = Schedule(reduce_scattered)
    reduce_scatter(sch)
    assert_same(sch, scattered_parts)


def test_what_a_block_makes_is_made_in_slabs() -> None:
    sch = Schedule(gathered_sums)
    gather(sch)
    assert_same(sch, made_in_slabs)


def test_recorded_as_stock_instructions() -> None:
    sch = Schedule(all_reduced)
    block = sch.get_sblock("C")
    *_, ranks, _ = sch.get_loops(block)
    before = len(sch.trace.insts)
    sch.rank_reduce(block, ranks)
    kinds = {each.kind.name for each in sch.trace.insts[before:]}
    assert kinds == {"GetLoops", "Reorder", "RFactor", "SetScope", "Parallel", "Annotate"}


@pytest.mark.parametrize("case", CASES)
def test_trace_replays_equal(case: str) -> None:
    sch = scheduled(case)
    again = Schedule(CASES[case][0])
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)


@pytest.mark.parametrize("case", CASES)
def test_computes_what_the_function_says(case: str) -> None:
    func, _ = CASES[case]
    values = operands(func)
    report = run_sequential(scheduled(case), values)
    report.raise_if_wrong()
    expected = run_sequential(func, values).outputs
    for name, found in report.outputs.items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_number_of_ranks(ranks: int) -> None:
    func = summed_over(ranks)
    values = operands(func)
    sch = Schedule(func)
    block = sch.get_sblock("C")
    sch.rank_reduce(block, sch.get_loops(block)[-2])
    (found,) = run_sequential(sch, values).outputs.values()
    exact = np.einsum("gik,gkj->ij", *(each.astype("float64") for each in values.values()))
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)


def summed_over(ranks: int) -> Any:
    @T.prim_func(s_tir=True)
    def summed(
        A: T.Buffer((ranks, 8, 16), "float32"),
        B: T.Buffer((ranks, 16, 8), "float32"),
        C: T.Buffer((8, 8), "float32"),
    ):
        for i, j, g, k in T.grid(8, 8, ranks, 16):
            with T.sblock("C"):
                vi, vj, vg, vk = T.axis.remap("SSRR", [i, j, g, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vg, vi, vk] * B[vg, vk, vj]

    return summed
