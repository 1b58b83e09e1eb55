"""Rows and reductions that the CTAs of a cluster do not divide, by both checkers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cpu.hopper.checkers import emulated, mixed_inputs, passed
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.planner.kernels.shape import has_equal_shares
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.rules.pipelined import has_uneven_rows
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func

#: Chains, and the CTAs over which the second reduction is split; tiles of both phases are narrow.
CHAINS = {
    "2 rows": ("gemm_chain:M=2,K=64,N=256,L=72,dtype=float16", 4),
    "3 rows": ("gated_ffn:M=3,K=72,N=1000,L=72,dtype=bfloat16,weights=nk", 4),
    "5 rows": ("gemm_chain:M=5,K=64,N=520,L=264,dtype=bfloat16,weights=nk,act=gelu", 2),
    "7 rows": ("gated_ffn:M=7,K=64,N=256,L=1000,dtype=float16", 4),
    "33 rows": ("gated_ffn:M=33,K=64,N=1000,L=264,dtype=bfloat16", 4),
    "49 rows": ("gemm_chain:M=49,K=136,N=640,L=72,dtype=float16,act=relu", 4),
    "100 rows": ("gemm_chain:M=100,K=64,N=520,L=72,dtype=float16,weights=nk", 2),
    "127 rows": ("gated_ffn:M=127,K=64,N=256,L=72,dtype=bfloat16", 4),
    "float32 output": ("gemm_chain:M=7,K=64,N=200,L=72,dtype=bfloat16,weights=nk,out=float32", 4),
}


def scheduled(name: str, **options: Any) -> Any:
    text, split = CHAINS[name]
    spec = parse(text)
    rows = 64 if spec.M <= 64 else 128
    columns = 48 if spec.L > 512 else 16
    first, second = TensorTiles(rows, 8, split), TensorTiles(rows, columns, split=split)
    return schedule_tiled_ffn(prim_func(spec), first=first, second=second, **options)


@pytest.mark.parametrize(
    "staged",
    [pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["two kernels", "one kernel"],
)
@pytest.mark.parametrize("name", CHAINS)
def test_the_second_reduction_is_split(name: str, staged: bool) -> None:
    text, split = CHAINS[name]
    image = passed(parse(text), scheduled(name, staged=staged))
    assert {each.cluster for each in image.launches} == {(split, 1, 1)}
    assert "st.async" in image.cuda


@pytest.mark.parametrize("name", [pytest.param("7 rows", marks=pytest.mark.nightly), "49 rows"])
def test_adversarial_inputs(name: str) -> None:
    spec = parse(CHAINS[name][0])
    image = lower(scheduled(name)).image
    for inputs in mixed_inputs(spec):
        emulated(spec, image, inputs, orders=1)


@pytest.mark.parametrize(
    ("text", "tiles"),
    [
        ("gemm:M=33,N=72,K=200,dtype=bfloat16,weights=nk", {"split": 4}),
        ("gemm:M=1,N=64,K=200,dtype=float16", {"split": 2}),
        ("gemm:M=130,N=64,K=328,dtype=bfloat16,weights=nk", {"split": 2, "columns": 64}),
        ("gemm:M=50,N=48,K=192,dtype=bfloat16,weights=nk", {"split": 3}),
    ],
)
def test_products_of_any_reduction(text: str, tiles: dict[str, int]) -> None:
    passed(parse(text), schedule_tiled_gemm(prim_func(parse(text)), tiles=TensorTiles(**tiles)))


def test_slices_are_whole_rows_and_the_last_ones_end_early() -> None:
    text = str(scheduled("5 rows").mod.script())
    assert "v_i = T.axis.spatial(5, ax1_0 * 3 + ax1_1)" in text
    assert re.search(r"T\.where\(.*ax1_0 \* 3 \+ ax1_1 < 5", text)


@pytest.mark.parametrize(
    ("m", "rows", "size", "uneven"),
    [(1, 64, 4, False), (3, 64, 4, True), (64, 64, 3, False), (16, 64, 4, False)],
)
def test_rows_that_ctas_do_not_divide(m: int, rows: int, size: int, uneven: bool) -> None:
    assert has_uneven_rows(m, rows, size) == uneven


@pytest.mark.parametrize(
    ("extent", "size", "wanted"),
    [
        (256, 4, True),
        (1000, 4, True),
        (640, 4, True),
        (520, 4, False),
        (520, 2, True),
        (64, 2, False),
    ],
)
def test_every_cta_has_a_share(extent: int, size: int, wanted: bool) -> None:
    assert has_equal_shares(extent, size, 64) == wanted


def test_slices_that_end_beyond_the_tile_are_refused() -> None:
    lower(_slices_of(3))  # of 21 rows
    with pytest.raises(LoweringRefused) as caught:
        lower(_slices_of(13))
    assert "found 13 slices of 320 elements; limit: slices of the 4096" in str(caught.value)


def _slices_of(split: int) -> Any:
    text = f"gemm:M=62,N=64,K={64 * split},dtype=bfloat16,weights=nk"
    tiles = TensorTiles(rows=64, columns=64, split=split)
    return schedule_tiled_gemm(prim_func(parse(text)), tiles=tiles)


@pytest.mark.parametrize(
    "text",
    [
        "gated_ffn:M=33,K=2048,N=5000,L=2048,dtype=bfloat16,weights=nk",
        "gated_ffn:M=7,K=1024,N=1000,L=1000,dtype=float16",
    ],
)
def test_nvcc_compiles_without_spills(text: str) -> None:
    for usage in compile_cubin(
        lower(schedule_tiled_ffn(prim_func(parse(text)))).image.cuda
    ).resources:
        assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0)
        assert usage.advisories == ()
