"""Products of few rows on plain multiply-adds: on LLVM, by the emulator, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tvm import te

from crossfuse import _tvm as ir
from crossfuse.compiler.choose import Wanted, options_of
from crossfuse.compiler.source import read_source
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.emulate.reference import draw, parameters
from crossfuse.errors import ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.skinny import SkinnyTiles, schedule_skinny
from crossfuse.schedule.rules.split_k import schedule_split_k
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import adversarial_inputs, check, parse, prim_func, random_inputs
from crossfuse.workload.build import emit, emit_products, form_of

CASES = [
    ("gemm:M=1,K=512,N=64,weights=nk", SkinnyTiles(32, 1, 8, 2)),
    ("gemm:M=3,K=512,N=64,weights=nk,act=silu,bias=last,residual=in", SkinnyTiles(8, 2, 32, 4)),
    ("gemm:M=8,K=256,N=96,weights=nk,dtype=float16,out=float32", SkinnyTiles(16, 4, 8, 1)),
    ("gated_gemm:M=1,K=512,N=64", SkinnyTiles(32, 1, 8, 2)),
    ("gated_gemm:M=3,K=512,N=64,act=gelu,bias=last,residual=in", SkinnyTiles(8, 2, 32, 4)),
    ("gated_gemm:M=8,K=256,N=96,act=gelu_tanh,dtype=float16,out=float32", SkinnyTiles(16, 2, 8, 1)),
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


def test_weights_of_gate_and_up_are_asked_for_before_either_is_used() -> None:
    sch = schedule_skinny(prim_func(parse(CASES[3][0])), tiles=SkinnyTiles(32, 1, 8, 2))
    image = lower(sch, "nvidia-h200").image
    (launch,) = image.launches
    assert launch.grid[0] == 8
    body = image.cuda[image.cuda.rindex("__launch_bounds__") :]
    vectors = re.findall(r"\*\(uint4\*\)\((A|B_gate|B_up)_ptr", body)
    # The compiler loads the rows once: both loads are of the same elements.
    assert vectors == ["B_gate", "B_gate", "B_up", "B_up", "A", "A", "A", "A"]


@pytest.mark.parametrize("which", ["large", "zero_rows", "constant_rows", "alternating"])
def test_gate_and_up_are_right_on_nasty_rows(which: str) -> None:
    spec = parse("gated_gemm:M=3,K=512,N=64,bias=last")
    inputs = dict(adversarial_inputs(spec))[which]
    sch = schedule_skinny(prim_func(spec), tiles=SkinnyTiles(16, 2, 8, 2))
    for report in (run_sequential(sch.mod["main"], inputs), emulated(sch, inputs)):
        report.raise_if_wrong()
        assert check(spec, inputs, report.outputs["out"]).worst <= 1


def emulated(sch: Any, inputs: Any) -> Any:
    return emulate(lower(sch, "nvidia-h200").image, inputs)


def test_gate_and_up_of_other_layouts_are_refused() -> None:
    form = form_of(parse("gated_gemm:M=2,K=512,N=512"))
    gate, up = form.first
    mixed = emit(replace(form, first=(gate, replace(up, layout="kn"))))
    with pytest.raises(ScheduleRefused, match="weights of which one is stored as \\[k, n\\]"):
        schedule_skinny(mixed, tiles=SkinnyTiles(32, 1, 8, 2))


@pytest.mark.parametrize("rule", [schedule_tiled_gemm, partial(schedule_split_k, cluster=1)])
def test_rules_of_one_product_refuse_gate_and_up(rule: Any) -> None:
    said = "found an output of two products, gate and up; limit: one matrix product"
    with pytest.raises(ScheduleRefused, match=said):
        rule(prim_func(parse("gated_gemm:M=2,K=512,N=64")))


@pytest.mark.parametrize(
    ("wanted", "family"),
    [(Wanted(), "skinny"), (Wanted(rule="tensor"), "gemm"), (Wanted(fewer_rows=True), "gemm")],
)
def test_compile_takes_it_where_no_pipeline_is_asked_for(wanted: Wanted, family: str) -> None:
    source = read_source("gemm:M=1,K=8192,N=2048,weights=nk")
    first = options_of(source, device("nvidia-h200"), wanted)[0]
    assert first.plan is not None
    assert first.plan.family == family


@pytest.mark.parametrize("kind", ["gemm", "gated_gemm"])
def test_the_trace_is_replayed(kind: str) -> None:
    func = prim_func(parse(f"{kind}:M=2,K=512,N=64,weights=nk"))
    sch = schedule_skinny(func, tiles=SkinnyTiles(32, 1, 8, 2))
    again = ir.Schedule(func)
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    ir.tvm.ir.assert_structural_equal(again.mod, sch.mod)


@pytest.mark.parametrize(
    ("text", "tiles", "said"),
    [
        ("gemm:M=9,K=512,N=64,weights=nk", SkinnyTiles(32, 1, 8, 2), "not: at most 8 rows"),
        ("gemm:M=1,K=512,N=64,weights=kn", SkinnyTiles(32, 1, 8, 2), "not: weights of 16 bits, st"),
        ("gemm:M=1,K=512,N=60,weights=nk", SkinnyTiles(32, 1, 8, 2), "not: CTAs divide the col"),
        ("gemm:M=1,K=520,N=64,weights=nk", SkinnyTiles(32, 1, 8, 2), "not: steps divide the red"),
        ("gemm:M=1,K=520,N=60,weights=nk", SkinnyTiles(), "no tiles that divide it"),
    ],
)
def test_what_it_cannot_divide_is_refused(text: str, tiles: SkinnyTiles, said: str) -> None:
    with pytest.raises(ScheduleRefused, match=said):
        schedule_skinny(prim_func(parse(text)), tiles=tiles)


# Several products of one operand.


def specs(rows: int, *columns: int, dtype: str = "bfloat16") -> list[Any]:
    """Products of one operand, each with something else behind it."""
    behind = ("bias=last", "act=silu", "residual=in")
    return [
        parse(f"gemm:M={rows},K=512,N={n},weights=nk,{each},dtype={dtype}")
        for n, each in zip(columns, behind, strict=False)
    ]


@pytest.mark.parametrize(
    ("rows", "tiles", "dtype"),
    [(1, SkinnyTiles(32, 1, 8, 2), "bfloat16"), (3, SkinnyTiles(8, 2, 16, 4), "float16")],
)
def test_products_of_one_operand_are_one_launch(rows: int, tiles: SkinnyTiles, dtype: str) -> None:
    every = specs(rows, 96, 64, 32, dtype=dtype)
    func = emit_products([form_of(each) for each in every])
    sch = schedule_skinny(func, tiles=tiles)
    image = lower(sch, "nvidia-h200").image
    (launch,) = image.launches
    assert launch.grid[0] == (96 + 64 + 32) // (tiles.groups * tiles.columns)
    known = draw(parameters(func))
    for report in (emulate(image, known), run_sequential(sch.mod["main"], known)):
        report.raise_if_wrong()
        for number, spec in enumerate(every):
            own = {name: known.get(f"{name}_{number}", known["A"]) for name in spec.inputs}
            assert check(spec, own, report.outputs[f"out_{number}"]).worst <= 1


def test_tiles_are_chosen_that_divide_each_product() -> None:
    func = emit_products([form_of(each) for each in specs(1, 96, 64, 32)])
    sch = schedule_skinny(func)
    again = ir.Schedule(func)
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    ir.tvm.ir.assert_structural_equal(again.mod, sch.mod)
    assert len(lower(sch, "nvidia-h200", early=True).image.launches) == 1
    with pytest.raises(ScheduleRefused, match="not: CTAs divide the columns"):
        schedule_skinny(func, tiles=SkinnyTiles(8, 4, 16, 2))


def written(right: str) -> Any:
    """Two results of which the second multiplies something else."""
    a, b = (te.placeholder((2, 512), "bfloat16", name) for name in "AB")
    weights = te.placeholder((512, 512), "bfloat16", "W")

    def product(left: Any, name: str) -> Any:
        k = te.reduce_axis((0, 512), "k")

        def factors(i: Any, j: Any) -> Any:
            return left(i, k).astype("float32") * weights(j, k).astype("float32")

        return te.compute((2, 512), lambda i, j: te.sum(factors(i, j), axis=k), name)

    def rounded(value: Any, name: str) -> Any:
        return te.compute((2, 512), lambda i, j: value(i, j).astype("bfloat16"), name)

    first = rounded(product(a, "first"), "one")
    between = te.compute((2, 512), lambda i, j: b(i, j) + b(i, j), "between")
    lefts = {"other": b, "made": between}
    second = rounded(product(lefts[right], "second") if right in lefts else b, "two")
    return te.create_prim_func([a, b, weights, first, second])


@pytest.mark.parametrize(
    ("right", "said"),
    [
        ("other", "found products of 'A' and of 'B'; limit: products of one operand"),
        ("made", "found a product of what block 'between' makes; limit: products of an input"),
        ("none", "found an output that is not an elementwise function of one product"),
    ],
)
def test_other_results_are_refused(right: str, said: str) -> None:
    with pytest.raises(ScheduleRefused, match=re.escape(said)):
        schedule_skinny(written(right))
