"""Reductions split over a cluster, by both checkers, and faults in their exchange."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tvm

from cpu.hopper.checkers import passed
from cpu.hopper.instructions import EXPECT, MAP, PUSH, WAIT
from cpu.hopper.planting import one_changed
from crossfuse import _tvm as ir
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func, random_inputs

CASES = {
    "whole warps, 4": ("M=64,N=128,K=512,dtype=bfloat16,weights=nk", {"split": 4, "columns": 64}),
    "whole warps, 8": ("M=128,N=64,K=1024,dtype=bfloat16,weights=nk", {"split": 8}),
    "half a tile each": ("M=128,N=72,K=256,dtype=float16,weights=kn", {"split": 2}),
    "rows of several warps": ("M=100,N=104,K=256,dtype=float16,weights=nk", {"split": 2}),
    "fewer rows than a warp": ("M=16,N=128,K=512,dtype=bfloat16,weights=nk", {"split": 4}),
    "parts of a row": ("M=1,N=128,K=512,dtype=bfloat16,weights=nk", {"split": 4, "columns": 64}),
    "odd cluster": ("M=48,N=48,K=384,dtype=bfloat16,weights=nk", {"split": 3}),
    "largest cluster": ("M=64,N=64,K=1024,dtype=bfloat16,weights=nk", {"split": 16}),
    "8-bit operands": ("M=64,N=64,K=512,dtype=float8_e4m3fn,weights=nk,out=bfloat16", {"split": 2}),
    "float32 output": ("M=64,N=40,K=256,dtype=bfloat16,weights=nk,out=float32", {"split": 2}),
}


def scheduled(text: str, tiles: dict[str, int]) -> Any:
    return schedule_tiled_gemm(prim_func(parse(f"gemm:{text}")), tiles=TensorTiles(**tiles))


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str) -> None:
    text, tiles = CASES[name]
    image = passed(parse(f"gemm:{text}"), scheduled(text, tiles))
    assert image.launches[0].cluster == (tiles["split"], 1, 1)


@cache
def right() -> KernelImage:
    text, tiles = CASES["whole warps, 4"]
    return lower(scheduled(text, tiles)).image


FAULTS = {
    "a part is not sent": (lambda: drop_call(right(), PUSH, 0), "deadlock"),
    "a part is sent elsewhere": (
        lambda: change_argument(right(), PUSH, 0, "{} + 512", 0),
        "async-race",
    ),
    "a part is sent beyond the memory": (
        lambda: change_argument(right(), PUSH, 0, "{} + 262144", 0),
        "out-of-bounds",
    ),
    "the bytes of another CTA are counted": (
        lambda: change_argument(right(), MAP, 2, "0", 1),
        "mbarrier",
    ),
    "too few bytes are waited for": (
        lambda: change_argument(right(), EXPECT, 1, "{} - 512", -1),
        "async-race",
    ),
    "a wait of too narrow a scope": (
        lambda: one_changed(right(), r"parity\.acquire\.cluster", "parity.acquire.cta"),
        "async-race",
    ),
    "nobody waits": (lambda: drop_call(right(), WAIT, -1), "async-race"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    make, kind = FAULTS[name]
    spec = parse(f"gemm:{CASES['whole warps, 4'][0]}")
    report = emulate(make(), random_inputs(spec), orders=3)
    assert kind in {each.kind for each in report.findings}, report.findings


def test_split_that_leaves_a_remainder() -> None:
    with pytest.raises(ScheduleRefused) as caught:
        scheduled("M=64,N=64,K=320,dtype=bfloat16,weights=nk", {"split": 4})
    assert str(caught.value).startswith(
        "tiles: block 'gemm0': found a reduction of 320 split over 4 CTAs, in steps of 64"
    )


def test_a_sum_of_another_element_is_refused() -> None:
    """Read as a sum it would be wrong: the statement adds to an element that it does not store."""
    schedule = schedule_tiled_gemm(
        prim_func(parse("gemm:M=64,N=64,K=256")), tiles=TensorTiles(rows=64, columns=64, split=2)
    )
    own = "gemm0_local[v_i, v_j] = gemm0_local[v_i, v_j] + "
    text = schedule.mod.script()
    assert text.count(own) == 1
    other = tvm.script.from_source(text.replace(own, own.replace("v_j] + ", "0] + ")))
    with pytest.raises(LoweringRefused, match=r"limit: C\[i, j\] \+ slab\[rank, i, j\]"):
        lower(ir.Schedule(other))
