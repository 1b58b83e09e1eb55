"""Products of few rows on plain multiply-adds: on LLVM, by the emulator, and what is refused."""

from __future__ import annotations

import re

import pytest

from crossfuse import _tvm as ir
from crossfuse.compiler.choose import Wanted, options_of
from crossfuse.compiler.source import read_source
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.skinny import SkinnyTiles, schedule_skinny
from crossfuse.workload import check, parse, prim_func, random_inputs

CASES = [
    ("gemm:M=1,K=512,N=64,weights=nk", SkinnyTiles(32, 1, 8, 2)),
    ("gemm:M=3,K=512,N=64,weights=nk,act=silu,bias=last,residual=in", SkinnyTiles(8, 2, 32, 4)),
    ("gemm:M=8,K=256,N=96,weights=nk,dtype=float16,out=float32", SkinnyTiles(16, 4, 8, 1)),
]


@pytest.mark.parametrize(("text", "tiles"), CASES)
def test_kernels_are_right(text: str, tiles: SkinnyTiles) -> None:
    spec = parse(text)
    inputs = random_inputs(spec)
    sch = schedule_skinny(prim_func(spec), tiles=tiles)
    report = run_sequential(sch.mod["main"], inputs)
    report.raise_if_wrong()
    assert check(spec, inputs, report.outputs["out"]).worst <= 1
    emulated = emulate(lower(sch, "nvidia-h200").image, inputs)
    emulated.raise_if_wrong()
    assert check(spec, inputs, emulated.outputs["out"]).worst <= 1


def test_weights_are_asked_for_first_and_together() -> None:
    """The second bound lets ptxas take registers for all loads of a step, instead of few by few."""
    sch = schedule_skinny(prim_func(parse(CASES[0][0])), tiles=SkinnyTiles(32, 1, 8, 2))
    cuda = lower(sch, "nvidia-h200").image.cuda
    assert "__launch_bounds__(256, 2)" in cuda
    body = cuda[cuda.rindex("__launch_bounds__") :]
    vectors = re.findall(r"\*\(uint4\*\)\((\w)_ptr", body)
    assert vectors == ["B", "B", "A", "A"]


@pytest.mark.parametrize(
    ("wanted", "family"),
    [(Wanted(), "skinny"), (Wanted(rule="tensor"), "gemm"), (Wanted(fewer_rows=True), "gemm")],
)
def test_compile_takes_it_where_no_pipeline_is_asked_for(wanted: Wanted, family: str) -> None:
    source = read_source("gemm:M=1,K=8192,N=2048,weights=nk")
    first = options_of(source, device("nvidia-h200"), wanted)[0]
    assert first.plan is not None
    assert first.plan.family == family


def test_the_trace_is_replayed() -> None:
    func = prim_func(parse("gemm:M=2,K=512,N=64,weights=nk"))
    sch = schedule_skinny(func, tiles=SkinnyTiles(32, 1, 8, 2))
    again = ir.Schedule(func)
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    ir.tvm.ir.assert_structural_equal(again.mod, sch.mod)


@pytest.mark.parametrize(
    ("text", "tiles", "said"),
    [
        ("gemm:M=9,K=512,N=64,weights=nk", SkinnyTiles(32, 1, 8, 2), "not: at most 8 rows"),
        ("gemm:M=1,K=512,N=64,weights=kn", SkinnyTiles(32, 1, 8, 2), "not: one product of weights"),
        ("gemm:M=1,K=512,N=60,weights=nk", SkinnyTiles(32, 1, 8, 2), "not: CTAs divide the col"),
        ("gemm:M=1,K=520,N=64,weights=nk", SkinnyTiles(32, 1, 8, 2), "not: steps divide the red"),
        ("gemm:M=1,K=520,N=60,weights=nk", SkinnyTiles(), "no tiles that divide it"),
    ],
)
def test_what_it_cannot_divide_is_refused(text: str, tiles: SkinnyTiles, said: str) -> None:
    with pytest.raises(ScheduleRefused, match=said):
        schedule_skinny(prim_func(parse(text)), tiles=tiles)
