"""Products of one operand side by side in a kernel of the Hopper pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cpu.hopper.instructions import MEET
from cpu.hopper.test_block_faults import HAND_BACK, READ
from crossfuse import _tvm as ir
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.emulate.cuda.chain import Link, chain
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import starting_early
from crossfuse.markers import SIDE_BY_SIDE
from crossfuse.planner.families.tiled import together_kernels
from crossfuse.planner.kernels.shape import Shape
from crossfuse.schedule.rules.phases import ChainTiles, PhaseTiles, schedule_phases
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.schedule.rules.together import schedule_together, tiles_of
from crossfuse.workload import parse, prim_func
from crossfuse.workload.build import emit_products, form_of

pytestmark = pytest.mark.cpu
TARGET = "nvidia-h200"


def products(rows: int, depth: int, columns: tuple[int, ...], more: str = "") -> Any:
    text = f"gemm:M={rows},K={depth},N={{}},weights=nk{more}"
    return emit_products([form_of(parse(text.format(each))) for each in columns])


def drawn(func: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    every = [each for each in func.params if not str(each.name).startswith("out")]
    return {
        str(each.name): rng.standard_normal([*map(int, each.ty.shape)]).astype(ml_dtypes.bfloat16)
        for each in every
    }


def check(func: Any, tiles: ChainTiles | None = None, early: bool = False) -> Any:
    """LLVM and the emulator are right; the kernel's image."""
    sch = schedule_together(func, tiles=tiles, target=TARGET)
    given = drawn(func)
    main = sch.mod["main"]
    if early:
        main = starting_early(main, [each for each in given if each.startswith("B")])
    image = lower(main, TARGET).image
    for report in (run_sequential(sch.mod["main"], given), emulate(image, given)):
        report.raise_if_wrong()
        for number in range(len(report.outputs)):
            a, b = (given[each].astype(np.float64) for each in ("A", f"B_{number}"))
            made, size = a @ b.T, np.abs(a) @ np.abs(b).T
            if (bias := given.get(f"bias0_{number}")) is not None:
                made += bias.astype(np.float64)
            off = np.abs(report.outputs[f"out_{number}"].astype(np.float64) - made)
            assert (off <= 2.0**-8 * np.abs(made) + 2.0**-18 * size).all()
    return image


@pytest.mark.parametrize(
    ("func", "tiles"),
    [
        (products(100, 256, (128, 64, 72)), ChainTiles(64, 1, (PhaseTiles(64),))),
        (products(100, 128, (128, 64, 72)), ChainTiles(128, 2, (PhaseTiles(64, "rows"),))),
        (products(300, 128, (136, 64)), ChainTiles(64, 2, (PhaseTiles(32, "rows"),))),
        (products(64, 256, (128, 64)), ChainTiles(64, 2, (PhaseTiles(32), PhaseTiles(16)))),
        (products(70, 128, (64, 64, 64, 64), ",bias=last"), None),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_each_has_its_result(func: Any, tiles: ChainTiles | None, early: bool) -> None:
    check(func, tiles, early)


def test_tiles_of_all_are_dealt_out_as_if_they_were_of_one() -> None:
    """Ten tiles have ten CTAs; of more than the GPU holds some make tiles of several products."""
    few = check(products(100, 128, (128, 64, 72)), ChainTiles(64, 1, (PhaseTiles(64),)))
    assert few.launches[0].grid[0] == 2 * (2 + 1 + 2)
    many = products(2500, 64, (128, 72))
    image = check(many, ChainTiles(64, 2, (PhaseTiles(64, "rows"),)))
    assert image.launches[0].grid[0] == device(TARGET).sms


@pytest.mark.parametrize(("name", "index"), [(MEET, -1), (HAND_BACK, 0), (READ, -1)])
def test_lost_synchronisation_is_found(name: str, index: int) -> None:
    """Of CTAs that make tiles of two products, whose stages and boxes are used again."""
    func = products(2500, 512, (128, 72))
    tiles = ChainTiles(64, 1, (PhaseTiles(64),))
    image = lower(schedule_together(func, tiles=tiles), TARGET).image
    assert emulate(drop_call(image, name, index), drawn(func)).findings


def test_it_waits_for_the_kernel_that_makes_its_rows() -> None:
    """Also CTAs that have no tile of the first product."""
    first = parse("gemm:M=64,K=128,N=128,weights=nk")
    one = lower(starting_early(schedule_tiled_gemm(prim_func(first)).mod["main"], ["B"]), TARGET)
    func = products(64, 128, (64, 192))
    tiles = ChainTiles(64, 1, (PhaseTiles(64),))
    main = schedule_together(func, tiles=tiles).mod["main"]
    other = lower(starting_early(main, ["B_0", "B_1"]), TARGET).image
    given = drawn(func)
    rng = np.random.default_rng(1)
    made = {name: rng.standard_normal(shape) * 0.1 for name, shape in first.inputs.items()}
    inputs = {name: each.astype(ml_dtypes.bfloat16) for name, each in made.items()}
    inputs |= {name: each for name, each in given.items() if name != "A"}

    def of_both(image: Any) -> Any:
        return emulate(
            chain([Link(one.image, {"out": "hidden"}), Link(image, {"A": "hidden"})]), inputs
        )

    of_both(other).raise_if_wrong()
    wait = 'asm volatile("griddepcontrol.wait;"'
    hasty = replace(other, cuda=other.cuda.replace(wait, f"if (false) {wait}"))
    assert "early-launch" in {each.kind for each in of_both(hasty).findings}


def test_nests_that_pass_something_on_are_refused() -> None:
    func = prim_func(parse("gemm_chain:M=128,K=256,N=512,L=256,weights=nk"))
    tiles = ChainTiles(64, 2, (PhaseTiles(64), PhaseTiles(64, "rows")))
    sch = schedule_phases(func, tiles=tiles)
    sch.annotate(sch.get_sblock("root"), SIDE_BY_SIDE, 1)
    with pytest.raises(LoweringRefused, match="nests side by side that need nothing of each"):
        lower(sch, TARGET)


def test_the_trace_is_replayed() -> None:
    func = products(100, 256, (128, 64))
    sch = schedule_together(func)
    again = ir.Schedule(func)
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    ir.tvm.ir.assert_structural_equal(again.mod, sch.mod)


@pytest.mark.parametrize(
    ("func", "tiles"),
    [
        (products(64, 256, (128,)), ChainTiles(64, 1, (PhaseTiles(64),))),
        (products(64, 256, (128, 64)), ChainTiles(64, 2, (PhaseTiles(64, "reduction"),))),
        (products(64, 256, (64, 64, 64)), ChainTiles(64, 1, (PhaseTiles(64),) * 2)),
    ],
)
def test_other_tiles_are_refused(func: Any, tiles: ChainTiles) -> None:
    said = "limit: two products or more of an input's rows, with a phase for all or for each"
    with pytest.raises(ScheduleRefused, match=said):
        schedule_together(func, tiles=tiles)


def test_the_planner_counts_whole_tiles_of_each() -> None:
    shapes = [Shape(512, each, 2048, 0) for each in (2048, 512, 512)]
    kernels = together_kernels(shapes, device(TARGET))
    for kernel, of in kernels:
        assert of.n == sum(-(-each.n // kernel.columns) for each in shapes) * kernel.columns
    assert tiles_of(kernels[0][0].tiles()).phases[0].columns == kernels[0][0].columns
