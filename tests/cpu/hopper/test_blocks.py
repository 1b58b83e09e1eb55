"""Tiles of 256 rows, of which each warpgroup multiplies two blocks of 64, by both checkers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpu.hopper.checkers import emulated, passed
from crossfuse.errors import LoweringRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.parted_ffn import (
    ClusterTiles,
    RegisterTiles,
    schedule_clustered_ffn,
    schedule_register_ffn,
)
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func, random_inputs

ALL = "scale=first+last,bias=first+last,residual=out"
#: Two products: workload, tiles of the first.
CHAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated": ("gated_ffn:M=256,K=128,N=256,L=64,dtype=bfloat16", {"columns": 64}),
    # Boxes of two blocks lie in two stages: 64, 16 and 8 columns of each.
    "gated, 88": ("gated_ffn:M=256,K=192,N=256,L=64,dtype=float16", {"columns": 88}),
    "gated, tail": ("gated_ffn:M=200,K=136,N=256,L=72,dtype=bfloat16", {"columns": 32}),
    "gated, one row": ("gated_ffn:M=1,K=64,N=128,L=64,dtype=bfloat16", {"columns": 32}),
    "gated, odd rows": ("gated_ffn:M=131,K=64,N=128,L=64,dtype=float16", {}),
    "gated, [k, n]": ("gated_ffn:M=256,K=96,N=256,L=80,dtype=bfloat16,weights=kn", {}),
    "gated, further": (f"gated_ffn:M=200,K=64,N=256,L=64,dtype=bfloat16,{ALL}", {"columns": 64}),
    "chain": ("gemm_chain:M=256,K=128,N=128,L=72,dtype=float16,act=gelu", {"columns": 128}),
    "chain, further": (f"gemm_chain:M=256,K=64,N=128,L=64,dtype=float16,{ALL}", {}),
    # A tile of one step has no two stages for its boxes.
    "chain, one step": ("gemm_chain:M=256,K=64,N=192,L=64,dtype=bfloat16", {"columns": 96}),
    "stacked": (
        "gated_ffn:M=512,K=64,N=256,L=64,dtype=bfloat16",
        {"columns": 64, "stacked": True},
    ),
    "stacked, tail": (
        "gemm_chain:M=300,K=64,N=128,L=72,dtype=float16,weights=kn",
        {"columns": 64, "stacked": True},
    ),
    "stacked, two by two": (
        "gated_ffn:M=512,K=64,N=256,L=64,dtype=float16",
        {"columns": 32, "across": 2, "stacked": True},
    ),
}
#: One product.
PRODUCTS: dict[str, tuple[str, dict[str, Any]]] = {
    "boxes": ("M=256,N=192,K=256,dtype=bfloat16,weights=nk", {}),
    "tails": ("M=300,N=200,K=72,dtype=float16,weights=nk", {"columns": 48}),
    "further": ("M=250,N=88,K=136,dtype=bfloat16,weights=nk,scale=last,bias=last,residual=out", {}),
    "an odd width": ("M=201,N=37,K=72,dtype=float16,weights=nk,bias=last,residual=out", {}),
    "float32": ("M=256,N=40,K=64,dtype=bfloat16,weights=nk,out=float32,residual=in", {}),
    "8-bit operands": ("M=256,N=64,K=256,dtype=float8_e4m3fn,weights=nk,out=bfloat16", {}),
    "split, whole warps": ("M=256,N=64,K=256,dtype=bfloat16,weights=nk", {"split": 4}),
    "split, tail": ("M=220,N=104,K=128,dtype=float16,weights=nk", {"split": 2}),
    "split, parts of a row": ("M=1,N=128,K=256,dtype=bfloat16,weights=nk", {"split": 4}),
    "split, further": (
        "M=256,N=72,K=128,dtype=bfloat16,weights=kn,scale=last,bias=last,residual=out",
        {"split": 2},
    ),
}


def chain(name: str, staged: bool) -> Any:
    text, tiles = CHAINS[name]
    first = TensorTiles(rows=256, **tiles)
    return schedule_tiled_ffn(prim_func(parse(text)), first=first, staged=staged)


@pytest.mark.parametrize(
    "staged",
    [pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["two kernels", "one kernel"],
)
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str, staged: bool) -> None:
    passed(parse(CHAINS[name][0]), chain(name, staged))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    text, tiles = PRODUCTS[name]
    spec = parse(f"gemm:{text}")
    tiles = TensorTiles(rows=256, **tiles)
    image = passed(spec, schedule_tiled_gemm(prim_func(spec), tiles=tiles))
    assert {each.block for each in image.launches} == {(384, 1, 1)}


@pytest.mark.parametrize("stages", [0, 3])
def test_several_tiles_for_each_cluster(stages: int) -> None:
    """The next tile's left tiles are loaded where boxes of the one before have been."""
    spec = parse("gemm:M=512,N=192,K=192,dtype=bfloat16,weights=nk,residual=out")
    tiles = TensorTiles(rows=256, columns=96, cluster=1, stages=stages)
    schedule = schedule_tiled_gemm(prim_func(spec), tiles=tiles)
    image = lower(schedule, replace(device("nvidia-h100"), sms=1)).image
    assert image.launches[0].grid == (1, 1, 1)
    emulated(spec, image, random_inputs(spec))


@pytest.mark.slow
def test_several_tiles_of_a_phase() -> None:
    spec = parse("gated_ffn:M=512,K=128,N=384,L=64,dtype=bfloat16")
    first = TensorTiles(rows=256, columns=64, cluster=2, stacked=True)
    second = TensorTiles(rows=256, columns=64)
    schedule = schedule_tiled_ffn(prim_func(spec), first=first, second=second)
    image = lower(schedule, replace(device("nvidia-h100"), sms=4)).image
    assert image.launches[0].grid == (4, 1, 1)
    emulated(spec, image, random_inputs(spec))


FFN = "gated_ffn:M=256,K=64,N=256,L=64,dtype=bfloat16"
REFUSED: dict[str, tuple[Any, str]] = {
    "a gathered intermediate": (
        lambda func: schedule_clustered_ffn(func, tiles=ClusterTiles(256, 4, 1)),
        "an intermediate that a cluster gathers, in tiles of 256 rows",
    ),
    "kept in registers": (
        lambda func: schedule_register_ffn(func, tiles=RegisterTiles(256, 64, 4)),
        "an intermediate in registers, in tiles of 256 rows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_warpgroups_of_one_block_do(name: str) -> None:
    schedule, found = REFUSED[name]
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule(prim_func(parse(FFN))))
    text = str(caught.value)
    assert text.startswith("tile-shape: product of ")
    assert (
        f"found {found}; limit: 128 rows: no warpgroup has several blocks of 64 rows there. "
        "Instead: split rows by 128, or keep the intermediate in L2 (grid_stage)" in text
    )
