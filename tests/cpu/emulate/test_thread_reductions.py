"""Which loops over threads the sequential run takes for reductions, whose order is the lowering's.

All others run backwards, too, so that threads which overwrite each other are found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossfuse.emulate import llvm
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import CheckFailed

pytest.importorskip("tvm")


def summed(tag: str, fault: str = "") -> Any:
    """A function that sums rows of 32 over a loop bound to `tag`; or a fault in its place."""
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)
    def sums(A: T.Buffer((4, 32), "float32"), out: T.Buffer((4,), "float32")) -> None:
        for i in range(4):
            for k in T.thread_binding(32, thread=tag):
                with T.sblock("sum"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    with T.init():
                        out[vi] = T.float32(0)
                    out[vi] = out[vi] + A[vi, vk]

    @T.prim_func(s_tir=True)
    def last(A: T.Buffer((4, 32), "float32"), out: T.Buffer((4,), "float32")) -> None:
        for i in range(4):
            for k in T.thread_binding(32, thread=tag):
                with T.sblock("last"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    with T.init():
                        out[vi] = T.float32(0)
                    out[vi] = A[vi, vk]

    @T.prim_func(s_tir=True)
    def shared(A: T.Buffer((4, 32), "float32"), out: T.Buffer((4,), "float32")) -> None:
        for k in T.thread_binding(32, thread=tag):
            with T.sblock("shared"):
                vi = T.axis.spatial(4, k // 8)
                vk = T.axis.reduce(32, k)
                with T.init():
                    out[vi] = T.float32(0)
                out[vi] = out[vi] + A[vi, vk]

    return {"": sums, "last": last, "shared": shared}[fault]


def test_sums_over_threads_have_the_order_of_the_lowering() -> None:
    A = np.random.default_rng(0).standard_normal((4, 32), np.float32)
    report = run_sequential(summed("threadIdx.x"), {"A": A})
    report.raise_if_wrong()
    assert np.allclose(report.outputs["out"], A.sum(1), atol=1e-5)


@pytest.mark.parametrize(
    ("tag", "fault"), [("blockIdx.x", ""), ("threadIdx.x", "last"), ("threadIdx.x", "shared")]
)
def test_planted_faults_are_found(tag: str, fault: str) -> None:
    """Sums of CTAs, updates that keep the last thread's value, and threads that share elements."""
    A = np.random.default_rng(0).standard_normal((4, 32), np.float32)
    with pytest.raises(CheckFailed, match="other results when parallel loops run backwards"):
        run_sequential(summed(tag, fault), {"A": A}).raise_if_wrong()


@pytest.mark.parametrize(("tag", "runs"), [("", 1), ("blockIdx.x", 2)])
def test_what_has_one_order_runs_once(tag: str, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards it is the same function, whose second run would prove nothing."""
    from tvm.s_tir import Schedule

    from crossfuse.workload import parse, prim_func, random_inputs

    spec = parse("gemm:M=4,K=8,N=4")
    schedule = Schedule(prim_func(spec))
    if tag:
        (block, *_) = schedule.get_child_blocks(schedule.get_sblock("root"))
        schedule.bind(schedule.get_loops(block)[0], tag)
    run, serials = llvm.run_serial, []
    monkeypatch.setattr(llvm, "run_serial", lambda *each: serials.append(each) or run(*each))
    run_sequential(schedule, random_inputs(spec)).raise_if_wrong()
    assert len(serials) == runs
