"""Traces of the primitives: replayed, as JSON, and with other decisions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from cpu.schedule.sampled import CASES, FUNCTIONS, SIZES, sampled
from cpu.schedule.steps import assert_same
from crossfuse.emulate.llvm import run_sequential
from crossfuse.schedule.planned import trace_json


def replayed(case: str, trace: Any) -> Any:
    sch = Schedule(FUNCTIONS[case])
    trace.apply_to_schedule(sch, remove_postproc=False)
    return sch


@pytest.mark.parametrize("case", CASES)
def test_replays_equal(case: str) -> None:
    sch = sampled(case)
    assert_same(replayed(case, sch.trace), sch)


@pytest.mark.parametrize("case", CASES)
def test_json_text_replays_equal(case: str) -> None:
    sch = sampled(case)
    again = Schedule(FUNCTIONS[case])
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)
    assert trace_json(again.trace) == trace_json(sch.trace)


@pytest.mark.parametrize("case", CASES)
def test_simplified_trace_replays_equal(case: str) -> None:
    """A tuner drops instructions whose results nothing uses."""
    sch = sampled(case)
    assert_same(replayed(case, sch.trace.simplified(remove_postproc=False)), sch)


@pytest.mark.parametrize("case", CASES)
def test_python_text_replays_equal(case: str) -> None:
    sch = sampled(case)
    again = Schedule(FUNCTIONS[case])
    scope: dict[str, Any] = {}
    exec(str(sch.trace).replace("s_tir.Schedule", "object"), scope)
    scope["apply_trace"](again)
    assert_same(again, sch)


def inputs(case: str) -> dict[str, np.ndarray]:
    *operands, _ = FUNCTIONS[case].params
    generator = np.random.default_rng(0)
    return {
        str(each.name): generator.uniform(-1, 1, [int(n) for n in each.ty.shape]).astype("float32")
        for each in operands
    }


def output(sch: Any, values: dict[str, np.ndarray]) -> np.ndarray:
    report = run_sequential(sch, values)
    report.raise_if_wrong()
    (result,) = report.outputs.values()
    return result


def sampling(trace: Any) -> tuple[Any, Any]:
    cluster = next(each for each in trace.insts if each.kind.name == "SampleCategorical")
    tile = next(each for each in trace.insts if each.kind.name == "SamplePerfectTile")
    return cluster, tile


@pytest.mark.parametrize("case", CASES)
def test_mutated_cluster_size_and_tile_carry_through(case: str) -> None:
    sch = sampled(case)
    cluster, tile = sampling(sch.trace)
    values = inputs(case)
    expected = output(FUNCTIONS[case], values)
    for decision, rows in ((1, 8), (3, 4)):
        trace = sch.trace.with_decision(cluster, decision, True)
        trace = trace.with_decision(tile, [8 // rows, rows], True)
        mutant = replayed(case, trace)
        mutant.verify_cluster()
        layout = mutant.cluster_layout()
        size = SIZES[decision]
        assert layout.axes == (("x", size),)
        assert {each.extent for each in layout.loops} == {size}
        (slabs,) = layout.buffers
        assert slabs.count == size
        assert slabs.shape == slab_shape(case, size, rows)
        np.testing.assert_allclose(output(mutant, values), expected, rtol=1e-5, atol=1e-6)


def slab_shape(case: str, size: int, rows: int) -> tuple[int, ...]:
    if case in ("ring", "all-gather"):
        return rows, 16 // size
    return rows, 16 if case == "exchange chain" else 8


@pytest.mark.parametrize("case", ["ring", "all-gather"])
def test_mutated_slice_loop_has_a_slice_a_cta(case: str) -> None:
    sch = sampled(case)
    cluster, _ = sampling(sch.trace)
    mutant = replayed(case, sch.trace.with_decision(cluster, 3, True))
    loops = [mutant.get(each) for each in mutant.get_loops(mutant.get_sblock("Y"))]
    assert [int(each.extent) for each in loops[1:3]] == [8, 8]
