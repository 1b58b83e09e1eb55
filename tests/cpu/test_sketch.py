"""The sketch of a schedule that reports show."""

from __future__ import annotations

from crossfuse.compiler.report import sketch
from crossfuse.schedule.rules.threads import schedule_split_k
from crossfuse.workload import parse, prim_func


def test_names_bindings_and_buffers() -> None:
    lines = sketch(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=32")), cluster=4)).split("\n")
    assert lines[0] == "for i_0 < 1: blockIdx.y"
    assert lines[2] == "    for k_0 < 4: CTAs of the cluster, axis x"
    assert "A_shared.dyn <- A" in {line.strip() for line in lines}
    assert lines[-1].strip() == "out <- gemm0_local"


def test_serial_loops_share_a_line_and_unit_loops_are_left_out() -> None:
    text = sketch(prim_func(parse("gemm:M=1,K=64,N=32")))
    assert text.split("\n") == [
        "for j < 32, k < 64",
        "  gemm0 <- A, B",
        "for j < 32",
        "  out <- gemm0",
    ]
