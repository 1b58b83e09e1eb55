"""Refusals of chains whose intermediate stays in registers: by the rule, recovery and the plan."""

from __future__ import annotations

from typing import Any

import pytest
import tvm

from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.planner.families.parted import RegisterKernel
from crossfuse.schedule.rules.parted_ffn import RegisterTiles, schedule_register_ffn
from crossfuse.workload import parse, prim_func

CHAIN = "gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16,weights=nk"


def scheduled(text: str, *tiles: int) -> Any:
    return schedule_register_ffn(prim_func(parse(text)), tiles=RegisterTiles(*tiles, cluster=1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "k_0 in T.serial(2,",
            "k_0 in T.serial(1,",
            "tensor 'hidden_local': found 64 columns from 0 of the rows from 0; limit: all 128 "
            "columns that the CTA keeps, from 0, of the rows from 0.",
        ),
        (
            "T.reads(hidden_local[v_i, v_k], D_shared_dyn[v_j, v_k])",
            "T.reads(gemm0_local[v_i, v_k], D_shared_dyn[v_j, v_k])",
            "",
        ),
    ],
    ids=["a part of the columns", "the sums themselves"],
)
def test_program_is_refused(old: str, new: str, message: str) -> None:
    text = scheduled(CHAIN, 64, 64, 1).mod["main"].script()
    assert text.count(old) == 1, text
    changed = text.replace(old, new)
    if not message:
        load = 'T.Cast("float32", hidden_local[v_i, v_k])'
        assert changed.count(load) == 1
        changed = changed.replace(load, "gemm0_local[v_i, v_k]")
        message = "block 'gemm1': found left operand 'gemm0_local'; limit: 'hidden_local'."
    func = tvm.script.from_source(changed, check_well_formed=False)
    with pytest.raises(LoweringRefused) as caught:
        recover(func)
    assert str(caught.value).startswith(f"tile-program: {message}"), str(caught.value)


@pytest.mark.parametrize(
    ("text", "tiles", "message"),
    [
        (
            "gemm_chain:M=64,K=128,N=128,L=64,dtype=float8_e4m3fn,weights=nk",
            (64, 64, 1),
            "found 128 columns of float8_e4m3fn in registers; limit: a multiple of 16 columns, of "
            "float16 or bfloat16: sums lie in registers as operands of 16 bits do, and of no other "
            "width. Instead: keep the intermediate in L2 (grid_stage)",
        ),
        (
            "gemm_chain:M=192,K=64,N=192,L=192,dtype=bfloat16",
            (192, 192, 1),
            "found 48 registers of it beside 96 sums, in steps of 32 columns; limit: 112 registers "
            "a thread with 3 multiplying warpgroups, steps of a multiple of 16. Instead: make more "
            "parts of the intermediate, or narrower tiles of the output.",
        ),
    ],
    ids=["8-bit floats", "too many registers"],
)
def test_tile_is_refused(
    text: str, tiles: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rule refuses some of them already; schedules by hand come to the lowering.
    monkeypatch.setattr(RegisterKernel, "legal", lambda self, shape, device: True)
    schedule = scheduled(text, *tiles)
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule)
    assert str(caught.value).startswith(f"tile-registers: tensor 'hidden_local': {message}"), str(
        caught.value
    )


@pytest.mark.parametrize(
    ("text", "tiles"),
    [
        ("gemm_chain:M=64,K=64,N=200,L=64", (64, 64, 1)),  # no whole steps
        ("gemm_chain:M=64,K=64,N=512,L=64", (64, 64, 1)),  # wider than a tile
        ("gated_ffn:M=64,K=64,N=256,L=64", (64, 64, 1)),
        ("gemm_chain:M=64,K=64,N=64,L=72", (64, 32, 2)),  # a part without columns
    ],
)
def test_division_is_refused(text: str, tiles: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleRefused) as caught:
        scheduled(f"{text},dtype=bfloat16", *tiles)
    n, width = (part.split("=")[1] for part in text.split(",")[2:4])
    assert str(caught.value).startswith(
        f"register-tiles: block 'gemm1': found {n} columns of the intermediate and {width} of the "
        f"output, for {RegisterTiles(*tiles, cluster=1)}; limit: parts of a multiple of 64 columns"
    )


def test_single_product() -> None:
    with pytest.raises(ScheduleRefused) as caught:
        scheduled("gemm:M=64,K=64,N=64,dtype=bfloat16")
    assert str(caught.value).startswith(
        "rule: register_ffn, block 'gemm0': found a single product; limit: a chain of two products."
    )
