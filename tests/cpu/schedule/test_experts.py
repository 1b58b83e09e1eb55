"""Products of tokens by the weights of chosen experts: on LLVM, by the emulator, and refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm import tirx

from crossfuse import _tvm as ir
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.emulate.cuda.chain import Link, chain
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import starting_early
from crossfuse.planner.families.experts import ExpertsShape
from crossfuse.schedule.rules.experts import read_experts, schedule_experts
from crossfuse.schedule.rules.skinny import SkinnyTiles, schedule_skinny
from crossfuse.workload import parse, prim_func
from crossfuse.workload.dtypes import Operand
from crossfuse.workload.experts import ExpertProduct, ExpertsForm, emit_experts

pytestmark = pytest.mark.cpu
TARGET = "nvidia-h200"
_NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
#: Half a unit of rounding, relative, of what is stored; and sums in float32.
_ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}
_SUMMED = 2.0**-18


@dataclass(frozen=True)
class Case:
    """Extents: experts in all and of a token, and columns and depth of a product."""

    tokens: int = 2
    top: int = 4
    experts: int = 8
    columns: int = 32
    depth: int = 256
    dtype: str = "bfloat16"
    #: Whether gate and up alternate.
    alternate: bool = False
    #: Columns of places and factors.
    width: int = 0
    #: Whether weights are stored as [expert, n, k], and whether products have a bias.
    k_major: bool = True
    bias: bool = False

    @property
    def pairs(self) -> int:
        return self.tokens * self.top

    @property
    def rows(self) -> tuple[int, int]:
        return self.tokens, self.width or self.top

    def lying(self, form: ExpertsForm) -> ExpertsForm:
        """A form of weights stored as [expert, n, k], with those of the case."""
        experts, columns, depth = form.weight.shape
        bias = Operand("bias", (experts, columns), self.dtype) if self.bias else None
        shape = form.weight.shape if self.k_major else (experts, depth, columns)
        weight = Operand("B", shape, self.dtype)
        return replace(form, weight=weight, k_major=self.k_major, bias=bias)


def gated(case: Case) -> ExpertsForm:
    """Gate and up of each pair, of the rows of its token."""

    def epilogue(tensors: Mapping[str, Any], i: Any, j: Any) -> Any:
        gate, up = (tensors[f"gemm0_{each}"](i, j) for each in ("gate", "up"))
        return gate * tirx.sigmoid(gate) * up

    second = (1, 2) if case.alternate else (case.columns, 1)
    form = ExpertsForm(
        Operand("A", (case.tokens, case.depth), case.dtype),
        Operand("B", (case.experts, 2 * case.columns, case.depth), case.dtype),
        Operand("places", case.rows, "int64"),
        (
            ExpertProduct("gemm0_gate", 0, 2 if case.alternate else 1),
            ExpertProduct("gemm0_up", *second),
        ),
        case.columns,
        epilogue,
        (),
        case.dtype,
        case.pairs,
        repeats=case.top,
    )
    return case.lying(form)


def mixed(case: Case, normalised: bool = True) -> ExpertsForm:
    """The products of a token's experts, each of rows of its own, added up to a residual."""

    def epilogue(tensors: Mapping[str, Any], i: Any, j: Any) -> Any:
        return tensors["gemm0"](i, j) + tensors["residual"](i, j).astype("float32")

    form = ExpertsForm(
        Operand("A", (case.pairs, case.depth), case.dtype),
        Operand("B", (case.experts, case.columns, case.depth), case.dtype),
        Operand("places", case.rows, "int32"),
        (ExpertProduct("gemm0"),),
        case.columns,
        epilogue,
        (Operand("residual", (case.tokens, case.columns), case.dtype),),
        case.dtype,
        case.pairs,
        summed=case.top,
        factor=Operand("factor", case.rows, "float32"),
        normalised=normalised,
    )
    return case.lying(form)


def drawn(form: ExpertsForm, scale: float = 1.0, offset: float = 0.0) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    experts = form.weight.shape[0]
    made: dict[str, Any] = {}
    for each in form.operands:
        if each is form.places:  # a token may choose an expert twice; some count from the last
            made[each.name] = rng.integers(-experts, experts, each.shape).astype(each.dtype)
        elif each is form.factor:
            made[each.name] = rng.random(each.shape).astype(each.dtype)
        else:
            value = rng.standard_normal(each.shape) * scale + offset
            made[each.name] = value.astype(_NUMPY[each.dtype])
    return made


def exact(form: ExpertsForm, given: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of float64, and what rounding in float32 may do to the sums behind them."""
    per = form.pairs // form.places.shape[0]
    a, b = (given[each].astype(np.float64) for each in "AB")
    b = b if form.k_major else b.swapaxes(1, 2)
    bias = given["bias"].astype(np.float64) if form.bias else np.zeros(b.shape[:2])
    sums, sizes = [], []
    for each in form.products:
        rows = slice(each.first, each.first + form.columns * each.step, each.step)
        expert = [given["places"][pair // per, pair % per] for pair in range(form.pairs)]
        own = [(b[e][rows], a[pair // form.repeats]) for pair, e in enumerate(expert)]
        added = np.array([bias[e][rows] for e in expert])
        sums.append(np.array([weights @ row for weights, row in own]) + added)
        size = np.array([np.abs(weights) @ np.abs(row) for weights, row in own])
        sizes.append(size + np.abs(added))
    if form.summed == 1:
        gate, up = sums
        with np.errstate(over="ignore"):
            made = gate / (1 + np.exp(-gate)) * up
        return made, sizes[0] * np.abs(up) + np.abs(gate) * sizes[1]
    factor = given["factor"][:, :per].astype(np.float64)
    if form.normalised:
        factor = factor / factor.sum(-1, keepdims=True)
    shape = (-1, form.summed, form.columns)
    weighted = [(each.reshape(shape) * factor[..., None]).sum(1) for each in (*sums, *sizes)]
    return weighted[0] + given["residual"].astype(np.float64), weighted[1]


def check(form: ExpertsForm, given: Mapping[str, Any], tiles: SkinnyTiles | None = None) -> Any:
    """LLVM and the emulator are right; the kernel's image."""
    sch = schedule_experts(emit_experts(form), tiles=tiles)
    image = lower(sch, TARGET).image
    made, size = exact(form, given)
    for report in (run_sequential(sch.mod["main"], given), emulate(image, given)):
        report.raise_if_wrong()
        off = np.abs(report.outputs["out"].astype(np.float64)[:, 0] - made)
        assert (off <= _ROUNDED[form.out] * np.abs(made) + _SUMMED * size).all()
    return image


GATED = [
    Case(),
    Case(tokens=1, top=1, experts=3, dtype="float16"),
    Case(tokens=3, top=6, experts=64, depth=512, width=64),
    Case(tokens=1, top=8, experts=16, columns=48, depth=768),
    Case(tokens=2, top=2, alternate=True, columns=16),
    Case(tokens=2, top=2, alternate=True, columns=32, bias=True),
    Case(k_major=False),
    Case(tokens=1, columns=128, depth=128, k_major=False, bias=True),
    Case(tokens=1, top=8, experts=16, columns=48, depth=192, k_major=False, dtype="float16"),
    Case(tokens=3, top=4, columns=64, k_major=False, alternate=True, bias=True),
    Case(tokens=1, top=4, columns=96, depth=576, k_major=False, alternate=True, width=8),
]
MIXED = [
    Case(),
    Case(tokens=1, top=8, experts=16, depth=768, columns=64),
    Case(tokens=3, top=6, experts=64, depth=128, width=64),
    Case(tokens=5, top=2, dtype="float16"),
    Case(tokens=1, top=16, experts=20, depth=64),
    Case(tokens=3, top=6, bias=True),
    Case(columns=64, k_major=False, bias=True),
    Case(tokens=1, top=4, experts=4, columns=192, depth=192, k_major=False, bias=True),
    Case(tokens=3, top=6, experts=64, depth=128, width=64, k_major=False, dtype="float16"),
    Case(tokens=1, top=16, experts=20, depth=64, k_major=False),
]


@pytest.mark.parametrize("case", GATED)
def test_gate_and_up_of_experts(case: Case) -> None:
    form = gated(case)
    check(form, drawn(form))


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("normalised", [True, False])
def test_products_of_a_tokens_experts_are_added_up(case: Case, normalised: bool) -> None:
    form = mixed(case, normalised)
    check(form, drawn(form))


@pytest.mark.parametrize(("scale", "offset"), [(1e-2, 1e2), (1e-3, 0.0), (30.0, 0.0)])
def test_rows_of_other_sizes(scale: float, offset: float) -> None:
    columns = Case(tokens=1, columns=64, k_major=False, bias=True)
    for form in (gated(Case(tokens=1)), mixed(Case()), gated(columns), mixed(columns)):
        check(form, drawn(form, scale, offset))


@pytest.mark.parametrize("share", [1e-37, 1e-30, 1e30])
def test_factors_are_divided_before_they_multiply(share: float) -> None:
    """Sums of what tiny factors make would be lost, and those of huge ones overflow."""
    form = mixed(Case())
    given = drawn(form)
    check(form, {**given, "factor": given["factor"] * np.float32(share)})


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("kind", [gated, mixed])
def test_all_tiles_that_the_planner_lists_are_right(kind: Any, k_major: bool) -> None:
    depth = 512 if k_major else 128
    case = Case(tokens=1, depth=depth, columns=64, k_major=k_major, alternate=not k_major)
    form = kind(case)
    shape = read_experts(ir.Schedule(emit_experts(form))).shape
    every = shape.kernels()
    assert len(every) > 3
    for each in every:
        check(form, drawn(form), SkinnyTiles(**each.tiles()))


def test_tokens_of_one_tile_of_columns_follow_each_other() -> None:
    """So that tokens of the same expert read its weights at about the same time."""
    form = gated(Case())
    (launch,) = check(form, drawn(form)).launches
    assert launch.grid[0] == 8 * 2


def test_weights_of_many_experts_are_counted_by_64_bits() -> None:
    """Of 5 GB, whose last expert begins behind 2**31 elements."""
    case = Case(tokens=1, experts=600, columns=1024, depth=4096)
    image = lower(schedule_experts(emit_experts(mixed(case))), TARGET).image
    (declared,) = set(re.findall(r"(int\w*) expert_local_ptr", image.cuda))
    assert declared == "int64_t"


# Kernels that start early.


@pytest.mark.parametrize("k_major", [True, False])
def test_it_waits_before_it_reads_whose_weights_it_needs(k_major: bool) -> None:
    """The experts, and so the weights, are what a kernel before may still be choosing."""
    case = Case(tokens=1, k_major=k_major)
    first = parse("gemm:M=1,K=256,N=256,weights=nk")
    form = gated(case)
    one = lower(starting_early(schedule_skinny(prim_func(first)).mod["main"], ["B"]), TARGET)
    func = schedule_experts(emit_experts(form)).mod["main"]
    other = lower(starting_early(func, ["B"]), TARGET).image
    given = drawn(form)
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape) * 0.1 for name, shape in first.inputs.items()}
    inputs = {name: each.astype(ml_dtypes.bfloat16) for name, each in made.items()}
    inputs |= {"B2": given["B"], "places": given["places"]}

    def of_both(image: Any) -> Any:
        links = [Link(one.image, {"out": "hidden"}), Link(image, {"A": "hidden", "B": "B2"})]
        return emulate(chain(links), inputs)

    of_both(other).raise_if_wrong()
    wait = 'asm volatile("griddepcontrol.wait;"'
    hasty = replace(other, cuda=other.cuda.replace(wait, f"if (false) {wait}"))
    assert "early-launch" in {each.kind for each in of_both(hasty).findings}


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("kind", [gated, mixed])
def test_a_lost_barrier_is_found(kind: Any, k_major: bool) -> None:
    form = kind(Case(tokens=1, k_major=k_major))
    image = lower(schedule_experts(emit_experts(form)), TARGET).image
    assert emulate(drop_call(image, "__syncthreads"), drawn(form)).findings


@pytest.mark.parametrize("k_major", [True, False])
def test_the_trace_is_replayed(k_major: bool) -> None:
    func = emit_experts(mixed(Case(k_major=k_major)))
    sch = schedule_experts(func)
    again = ir.Schedule(func)
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    ir.tvm.ir.assert_structural_equal(again.mod, sch.mod)


@pytest.mark.parametrize(
    ("form", "tiles", "said"),
    [
        (gated(Case(columns=24)), SkinnyTiles(8, 4, 1), "columns that tiles of 16 do not divide"),
        (mixed(Case(depth=80)), SkinnyTiles(8, 4, 1), "of 80, which steps of 64 do not divide"),
        (mixed(Case(top=6)), SkinnyTiles(8, 4, 1), "4 warps, which 6 experts do not share evenly"),
        (mixed(Case(top=32)), SkinnyTiles(), "no tiles that divide it"),
        (mixed(Case(depth=40)), SkinnyTiles(), "2 x 40 x 32 of 4 experts added up each, no tiles"),
        (
            gated(Case(columns=48, k_major=False)),
            SkinnyTiles(4, 4, 1),
            "columns that tiles of 64 do not divide",
        ),
        (
            mixed(Case(depth=80, k_major=False)),
            SkinnyTiles(8, 8, 4),
            "of 80, which steps of 64 do not divide",
        ),
    ],
)
def test_other_extents_are_refused(form: ExpertsForm, tiles: SkinnyTiles, said: str) -> None:
    limit = "limit: weights of 16 bits, and tiles that divide columns and the reduction of each"
    with pytest.raises(ScheduleRefused, match=f"{said}.*{limit}"):
        schedule_experts(emit_experts(form), tiles=tiles)


def test_other_types_are_refused() -> None:
    form = mixed(Case())
    wide = replace(form, weight=replace(form.weight, dtype="float32"))
    with pytest.raises(ScheduleRefused, match="elements of bfloat16 and float32"):
        schedule_experts(emit_experts(wide), tiles=SkinnyTiles(8, 4, 1))


def test_other_functions_are_refused() -> None:
    said = "found a product whose weights no index chooses.*emit_experts"
    with pytest.raises(ScheduleRefused, match=said):
        schedule_experts(prim_func(parse("gemm:M=1,K=512,N=64,weights=nk")))


def test_rows_of_experts_are_shared_by_warps() -> None:
    shape = ExpertsShape(1, 64, 768, experts=8)
    assert {int(each.warps) for each in shape.kernels()} == {8, 16}
    assert shape.text == "1 x 768 x 64 of 8 experts added up each"
