"""Products of few rows by tensor cores of a warp: on LLVM, by the emulator, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tvm import te

from crossfuse import _tvm as ir
from crossfuse.compiler.compiled import Wanted, options_of
from crossfuse.compiler.source import read_source
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.emulate.cuda.chain import Link, chain
from crossfuse.emulate.llvm import draw, parameters, run_sequential
from crossfuse.errors import ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import starting_early
from crossfuse.schedule.rules.skinny import SkinnyTiles, schedule_skinny
from crossfuse.schedule.rules.threads import schedule_split_k
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import adversarial_inputs, check, parse, prim_func, random_inputs
from crossfuse.workload.build import emit, emit_products, form_of

CASES = [
    ("gemm:M=1,K=512,N=64,weights=nk", SkinnyTiles(8, 4, 2)),
    ("gemm:M=3,K=512,N=64,weights=nk,act=silu,bias=last,residual=in", SkinnyTiles(8, 8, 1)),
    ("gemm:M=4,K=512,N=32,weights=nk", SkinnyTiles(4, 16, 1)),
    ("gemm:M=8,K=256,N=96,weights=nk,dtype=float16,out=float32", SkinnyTiles(4, 4, 1)),
    ("gemm:M=6,K=512,N=64,weights=nk", SkinnyTiles(8, 4, 2)),
    ("gemm:M=13,K=512,N=64,weights=nk,residual=in", SkinnyTiles(4, 4, 2)),
    ("gemm:M=11,K=512,N=32,weights=nk,residual=in", SkinnyTiles(8, 8, 1)),
    ("gemm:M=16,K=512,N=64,weights=nk,dtype=float16,act=silu", SkinnyTiles(8, 4, 2)),
    ("gemm:M=32,K=192,N=32,weights=nk", SkinnyTiles(4, 2, 1)),
    ("gated_gemm:M=1,K=512,N=64", SkinnyTiles(8, 8, 1)),
    ("gated_gemm:M=3,K=512,N=64,act=gelu,bias=last,residual=in", SkinnyTiles(4, 8, 2)),
    ("gated_gemm:M=7,K=512,N=32,act=gelu,residual=in", SkinnyTiles(8, 8, 1)),
    ("gated_gemm:M=10,K=256,N=96,act=gelu_tanh,dtype=float16,out=float32", SkinnyTiles(4, 4, 2)),
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
    sch = schedule_skinny(prim_func(parse(CASES[0][0])), tiles=SkinnyTiles(8, 4, 2))
    cuda = lower(sch, "nvidia-h200").image.cuda
    assert "__launch_bounds__(128, 4)" in cuda
    body = cuda[cuda.rindex("__launch_bounds__") :]
    vectors = re.findall(r"\*\(uint4\*\)\((\w)_ptr", body)
    assert vectors == [*"BBBBBBBB", *"AA"]


def test_weights_of_gate_and_up_are_asked_for_before_either_is_used() -> None:
    sch = schedule_skinny(prim_func(parse("gated_gemm:M=1,K=512,N=64")), tiles=SkinnyTiles(4, 8, 2))
    image = lower(sch, "nvidia-h200").image
    (launch,) = image.launches
    assert launch.grid[0] == 4
    body = image.cuda[image.cuda.rindex("__launch_bounds__") :]
    vectors = re.findall(r"\*\(uint4\*\)\((A|B_gate|B_up)_ptr", body)
    # The compiler loads the rows once: both loads are of the same elements.
    assert vectors == [*["B_gate"] * 4, *["B_up"] * 4, "A", "A", "A", "A"]


# Kernels that start early.


@pytest.mark.parametrize("tiles", [SkinnyTiles(4, 4, 1), SkinnyTiles(8, 8, 1)])
def test_weights_are_on_their_way_before_it_waits(tiles: SkinnyTiles) -> None:
    """In one step, and in several, of which the first is asked for ahead."""
    spec = parse("gemm:M=3,K=512,N=32,weights=nk,residual=in")
    func = schedule_skinny(prim_func(spec), tiles=tiles).mod["main"]
    early = lower(starting_early(func, ["B"]), "nvidia-h200").image
    assert [each.early for each in early.launches] == [True]
    body = early.cuda[early.cuda.rindex("__launch_bounds__") :]
    wait = body.index("crossfuse_await_behind_loads()")
    first = [body.index(f"{each}_ptr + ") for each in ("B", "A")]
    assert first[0] < wait < first[1]
    # Else nvcc takes what it reads for constant, and ptxas may load it before the wait.
    assert "nv_bfloat16* A_ptr, nv_bfloat16* __restrict__ B_ptr" in early.cuda
    inputs = random_inputs(spec)
    report = emulate(early, inputs)
    report.raise_if_wrong()
    assert check(spec, inputs, report.outputs["out"]).worst <= 1


def test_weights_that_another_kernel_may_write_wait() -> None:
    func = schedule_skinny(prim_func(parse("gemm:M=3,K=512,N=32,weights=nk"))).mod["main"]
    cuda = lower(starting_early(func), "nvidia-h200").image.cuda
    assert "crossfuse_await_behind_loads" not in cuda
    assert "crossfuse_await_kernel_before()" in cuda


def test_rows_that_are_read_before_the_wait_are_found() -> None:
    """A chain whose second product has its left operand from the first one."""
    one, other = (parse(f"gemm:M=2,K={k},N=128,weights=nk") for k in (256, 128))
    first, second = (
        lower(starting_early(schedule_skinny(prim_func(each)).mod["main"], ["B"]), "nvidia-h200")
        for each in (one, other)
    )
    inputs = {**random_inputs(one), "B2": random_inputs(other)["B"]}

    def of_both(image: Any) -> Any:
        links = [Link(first.image, {"out": "hidden"}), Link(image, {"A": "hidden", "B": "B2"})]
        return emulate(chain(links), inputs)

    of_both(second.image).raise_if_wrong()
    wait = 'asm volatile("griddepcontrol.wait;"'
    hasty = second.image.cuda.replace(wait, f"if (false) {wait}")
    report = of_both(replace(second.image, cuda=hasty))
    assert "early-launch" in {each.kind for each in report.findings}


@pytest.mark.parametrize("which", ["large", "zero_rows", "constant_rows", "alternating"])
def test_gate_and_up_are_right_on_nasty_rows(which: str) -> None:
    spec = parse("gated_gemm:M=3,K=512,N=64,bias=last")
    inputs = dict(adversarial_inputs(spec))[which]
    sch = schedule_skinny(prim_func(spec), tiles=SkinnyTiles(8, 4, 1))
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
        schedule_skinny(mixed, tiles=SkinnyTiles(8, 4, 1))


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
    sch = schedule_skinny(func, tiles=SkinnyTiles(8, 4, 1))
    again = ir.Schedule(func)
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    ir.tvm.ir.assert_structural_equal(again.mod, sch.mod)


@pytest.mark.parametrize(
    ("text", "tiles", "said"),
    [
        ("gemm:M=33,K=512,N=64,weights=nk", SkinnyTiles(8, 4, 2), "not: at most 32 rows"),
        ("gemm:M=1,K=512,N=64,weights=kn", SkinnyTiles(8, 4, 2), "not: weights of 16 bits, st"),
        ("gemm:M=1,K=512,N=60,weights=nk", SkinnyTiles(8, 4, 2), "not: CTAs divide the col"),
        ("gemm:M=1,K=520,N=64,weights=nk", SkinnyTiles(8, 4, 2), "not: steps divide the red"),
        ("gemm:M=1,K=520,N=60,weights=nk", SkinnyTiles(), "no tiles that divide it"),
        (
            "gemm:M=17,K=512,N=64,weights=nk",
            SkinnyTiles(8, 4, 1),
            "not: 4 lanes that share a column, or 8 with 32 sums of a thread at most",
        ),
        ("gated_gemm:M=9,K=512,N=64", SkinnyTiles(8, 4, 1), "or 8 with 32 sums of a thread at m"),
        ("gemm:M=1,K=512,N=64,weights=nk", SkinnyTiles(8, 4, 4), "not: 8 loads of a thread at a "),
        ("gemm:M=1,K=512,N=64,weights=nk", SkinnyTiles(8, 2, 2), "not: 2 warps only of a reduct"),
        ("gemm:M=1,K=512,N=64,weights=nk", SkinnyTiles(16, 4, 1), "not: 4 lanes that share a col"),
        ("gemm:M=1,K=768,N=64,weights=nk", SkinnyTiles(3, 4, 1), "not: 4 lanes that share a colu"),
        ("gemm:M=1,K=4096,N=64,weights=nk", SkinnyTiles(8, 32, 1), "not: at most 16 warps"),
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
    [(1, SkinnyTiles(8, 4, 2), "bfloat16"), (11, SkinnyTiles(4, 8, 2), "float16")],
)
def test_products_of_one_operand_are_one_launch(rows: int, tiles: SkinnyTiles, dtype: str) -> None:
    every = specs(rows, 96, 64, 32, dtype=dtype)
    func = emit_products([form_of(each) for each in every])
    sch = schedule_skinny(func, tiles=tiles)
    image = lower(sch, "nvidia-h200").image
    (launch,) = image.launches
    assert launch.grid[0] == (96 + 64 + 32) // 16
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
    uneven = emit_products([form_of(each) for each in specs(1, 96, 24)])
    with pytest.raises(ScheduleRefused, match="not: CTAs divide the columns"):
        schedule_skinny(uneven, tiles=SkinnyTiles(8, 4, 1))


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
        ("made", "found products of 'A' and of 'B'; limit: products of one operand"),
        ("none", "found an output that is not an elementwise function of one product"),
    ],
)
def test_other_results_are_refused(right: str, said: str) -> None:
    with pytest.raises(ScheduleRefused, match=re.escape(said)):
        schedule_skinny(written(right))


# Rows and columns beside each other in a fragment.


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [(3, SkinnyTiles(8, 4, 1)), (3, SkinnyTiles(4, 4, 2)), (11, SkinnyTiles(4, 4, 1))],
)
def test_what_is_not_finite_stays_in_its_row(rows: int, tiles: SkinnyTiles) -> None:
    spec = parse(f"gemm:M={rows},K=512,N=32,weights=nk,out=float32")
    image = lower(schedule_skinny(prim_func(spec), tiles=tiles), "nvidia-h200").image
    inputs = random_inputs(spec)
    due = emulate(image, inputs).outputs["out"]
    broken = {**inputs, "A": inputs["A"].copy()}
    broken["A"][1, ::2], broken["A"][1, 1::2] = float("inf"), float("nan")
    got = emulate(image, broken).outputs["out"]
    others = [row for row in range(rows) if row != 1]
    assert (got[others] == due[others]).all() and np.isnan(got[1]).all()


def test_sums_of_warps_wait_for_each_other() -> None:
    spec = parse("gemm:M=3,K=512,N=32,weights=nk")
    image = lower(schedule_skinny(prim_func(spec), tiles=SkinnyTiles(4, 4, 2)), "nvidia-h200").image
    report = emulate(drop_call(image, "__syncthreads"), random_inputs(spec))
    assert "race" in {each.kind for each in report.findings}


def test_weights_of_several_products_are_asked_for_ahead() -> None:
    every = specs(3, 96, 32)
    func = schedule_skinny(emit_products([form_of(each) for each in every])).mod["main"]
    names = [str(each.name) for each in func.params if str(each.name).startswith("B")]
    image = lower(starting_early(func, names), "nvidia-h200").image
    (launch,) = image.launches
    assert launch.early and image.cuda.count("  crossfuse_await_behind_loads();") == len(every)
    known = draw(parameters(func))
    emulate(image, known).raise_if_wrong()
