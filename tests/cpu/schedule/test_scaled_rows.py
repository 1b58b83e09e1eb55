"""Few rows that a sum scales, as a norm does, in the product that reads them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cpu.schedule.scaled import drawn, normed, with_norm
from crossfuse import _tvm as ir
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.emulate.cuda.chain import Link, chain
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import starting_early
from crossfuse.schedule.rules.skinny import SkinnyTiles, schedule_skinny
from crossfuse.schedule.rules.threads import schedule_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload.build import emit, emit_products

pytestmark = pytest.mark.cpu

TARGET = "nvidia-h200"


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def due(inputs: dict[str, Any], *, wide: bool) -> np.ndarray:
    """What a product, or gate and up, is; in float64 or of a norm that was stored."""
    rows = normed(inputs["A"], inputs["gain"], wide=wide)
    made = [rows @ inputs[each].astype(float).T for each in inputs if each.startswith("B")]
    result = made[0] if len(made) == 1 else silu(made[0]) * made[1]
    return result + inputs["residual"].astype(float) if "residual" in inputs else result


def judge(made: np.ndarray, inputs: dict[str, Any]) -> None:
    """At most twice the error of separate kernels, which round their result too."""
    exact = due(inputs, wide=True)
    apart = due(inputs, wide=False).astype(made.dtype).astype(float)
    assert np.isfinite(exact).all()
    allowed = 2 * np.abs(apart - exact).max() + 2.0**-9 * np.abs(exact).max()
    assert np.abs(made.astype(float) - exact).max() <= allowed


CASES = [
    ("gemm:M=1,K=512,N=32,weights=nk", SkinnyTiles(8, 8, 1)),
    ("gemm:M=3,K=512,N=32,weights=nk,residual=in", SkinnyTiles(8, 4, 1)),
    ("gemm:M=5,K=192,N=32,weights=nk", SkinnyTiles(4, 2, 1)),  # elements two by two
    ("gemm:M=1,K=64,N=16,weights=nk", SkinnyTiles(4, 2, 1)),  # one by one
    ("gemm:M=9,K=1024,N=16,weights=nk", SkinnyTiles(4, 4, 1)),  # eight at a time
    ("gemm:M=14,K=512,N=16,weights=nk", SkinnyTiles(8, 4, 2)),
    ("gemm:M=32,K=512,N=16,weights=nk", SkinnyTiles(4, 8, 2)),
    ("gated_gemm:M=2,K=512,N=32,act=silu,residual=in", SkinnyTiles(8, 4, 1)),
    ("gated_gemm:M=11,K=256,N=16,act=silu", SkinnyTiles(4, 4, 1)),
]


@pytest.mark.parametrize(("text", "tiles"), CASES)
def test_kernels_are_right(text: str, tiles: SkinnyTiles) -> None:
    func = emit(with_norm(text))
    inputs = drawn(func)
    sch = schedule_skinny(func, tiles=tiles)
    for report in (
        run_sequential(sch.mod["main"], inputs),
        emulate(lower(sch, TARGET).image, inputs),
    ):
        report.raise_if_wrong()
        judge(report.outputs["out"], inputs)


@pytest.mark.parametrize(
    ("rows", "depth", "by"), [(9, 512, True), (1, 512, False), (9, 128, False)]
)
def test_squares_of_eight_elements_are_added_by_tensor_cores(
    rows: int, depth: int, by: bool
) -> None:
    """A lane of several warps that share a row has fewer; these are added one by one."""
    func = emit(with_norm(f"gemm:M={rows},K={depth},N=32,weights=nk"))
    cuda = lower(schedule_skinny(func, tiles=SkinnyTiles(4, 4, 1)), TARGET).image.cuda
    assert ("crossfuse_add_squares" in cuda) == by


def nasty(kind: str, rows: np.ndarray) -> np.ndarray:
    """Rows that lose digits or leave a range easily."""
    wide = rows.astype(np.float32)
    columns = np.arange(wide.shape[1])
    made = {
        "far": 1e4 + 1e-2 * wide,
        "constant": np.full_like(wide, -3.3),
        "outlier": np.where(columns == 7, 1e4, wide),
        "large": 1e15 * wide,
        "small": 1e-15 * wide,
        "alternating": np.where(columns % 2, -1.5, 1.5) + 1e-2 * wide,
        "zero": np.zeros_like(wide),
    }[kind]
    return made.astype(rows.dtype)


@pytest.mark.parametrize(
    "kind", ["far", "constant", "outlier", "large", "small", "alternating", "zero"]
)
def test_nasty_rows(kind: str) -> None:
    func = emit(with_norm("gemm:M=3,K=512,N=32,weights=nk"))
    inputs = drawn(func)
    inputs["A"] = nasty(kind, inputs["A"])
    report = emulate(lower(schedule_skinny(func, tiles=SkinnyTiles(8, 4, 1)), TARGET).image, inputs)
    report.raise_if_wrong()
    judge(report.outputs["out"], inputs)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_rows_that_are_not_finite_are_no_numbers(value: float) -> None:
    """As those of a norm of its own: an infinite element times a scale of zero."""
    func = emit(with_norm("gemm:M=3,K=512,N=16,weights=nk"))
    inputs = drawn(func)
    inputs["A"][1, 5] = value
    report = emulate(lower(schedule_skinny(func, tiles=SkinnyTiles(8, 4, 1)), TARGET).image, inputs)
    report.raise_if_wrong()
    made = report.outputs["out"].astype(float)
    assert np.isnan(made[1]).all() and np.isfinite(made[[0, 2]]).all()


def test_several_products_are_one_launch() -> None:
    func = emit_products([with_norm(f"gemm:M=2,K=512,N={n},weights=nk") for n in (32, 16)])
    inputs = drawn(func)
    image = lower(schedule_skinny(func, tiles=SkinnyTiles(8, 4, 1)), TARGET).image
    (launch,) = image.launches
    assert launch.grid[0] == 3
    report = emulate(image, inputs)
    report.raise_if_wrong()
    for place in (0, 1):
        own = {each: inputs[f"{each}_{place}"] for each in ("gain", "B")} | {"A": inputs["A"]}
        judge(report.outputs[f"out_{place}"], own)


# Kernels that start early, and faults.


def early(text: str) -> Any:
    sch = schedule_skinny(emit(with_norm(text)), tiles=SkinnyTiles(4, 4, 1))
    return lower(starting_early(sch.mod["main"], ["B", "gain"]), TARGET).image


def test_rows_and_sums_are_read_behind_the_wait() -> None:
    """A chain whose second product has its rows from the first one."""
    images = [early(f"gemm:M=2,K={k},N=128,weights=nk") for k in (256, 128)]
    second = drawn(emit(with_norm("gemm:M=2,K=128,N=128,weights=nk")), 1)
    inputs = drawn(emit(with_norm("gemm:M=2,K=256,N=128,weights=nk")))
    given = {**inputs, "B2": second["B"], "gain2": second["gain"]}

    def of_both(image: Any) -> Any:
        renamed = {"A": "hidden", "B": "B2", "gain": "gain2"}
        return emulate(chain([Link(images[0], {"out": "hidden"}), Link(image, renamed)]), given)

    report = of_both(images[1])
    report.raise_if_wrong()
    assert report.at_once > 1
    alone = emulate(images[0], inputs).outputs["out"]
    judge(report.outputs["out"], {**second, "A": alone})
    wait = 'asm volatile("griddepcontrol.wait;"'
    hasty = images[1].cuda.replace(wait, f"if (false) {wait}")
    found = of_both(replace(images[1], cuda=hasty)).findings
    assert "early-launch" in {each.kind for each in found}


def test_a_missing_barrier_is_a_fault() -> None:
    """Sums of rows pass through shared memory, as those of products do."""
    func = emit(with_norm("gemm:M=2,K=512,N=16,weights=nk"))
    image = lower(schedule_skinny(func, tiles=SkinnyTiles(8, 4, 1)), TARGET).image
    found = emulate(drop_call(image, "__syncthreads"), drawn(func)).findings
    assert "race" in {each.kind for each in found}


def test_the_trace_is_replayed() -> None:
    func = emit(with_norm("gated_gemm:M=2,K=512,N=32,act=silu"))
    sch = schedule_skinny(func, tiles=SkinnyTiles(8, 4, 1))
    again = ir.Schedule(func)
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    ir.tvm.ir.assert_structural_equal(again.mod, sch.mod)


@pytest.mark.parametrize("rule", [schedule_tiled_gemm, partial(schedule_ffn, cluster=1)])
def test_rules_of_stored_rows_refuse_them(rule: Any) -> None:
    said = "block 'rows': found an operand that is made of the input's rows"
    with pytest.raises(ScheduleRefused, match=said):
        rule(emit(with_norm("gemm:M=64,K=64,N=64,weights=nk")))


def test_rows_of_other_places_are_refused() -> None:
    """Kernels load vectors of elements that lie side by side."""
    form = with_norm("gemm:M=2,K=512,N=32,weights=nk")
    assert form.scaled is not None

    def backwards(tensors: Any, i: Any, k: Any) -> Any:
        return tensors["A"](i, 511 - k).astype("float32")

    func = emit(replace(form, scaled=replace(form.scaled, element=backwards)))
    with pytest.raises(ScheduleRefused, match="an intermediate that is not made of products"):
        schedule_skinny(func)
