"""Pipelined products by both checkers: types, layouts, clusters, tails, adversarial inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpu.hopper.checkers import emulated, mixed_inputs, passed
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func, random_inputs

CASES = {
    "one tile": ("gemm:M=64,N=64,K=64,dtype=bfloat16,weights=nk", {}),
    "float16": ("gemm:M=64,N=64,K=192,dtype=float16,weights=nk", {}),
    "stored as [k, n]": ("gemm:M=64,N=192,K=128,dtype=bfloat16,weights=kn", {"columns": 192}),
    "[k, n] by 32": ("gemm:M=64,N=160,K=128,dtype=float16,weights=kn", {"columns": 80}),
    "[k, n] by 16": ("gemm:M=64,N=48,K=128,dtype=bfloat16,weights=kn", {"columns": 16}),
    "[k, n] by 32, shared": (
        "gemm:M=128,N=192,K=128,dtype=bfloat16,weights=kn",
        {"rows": 64, "cluster": 2, "columns": 192},
    ),
    "e4m3": ("gemm:M=64,N=64,K=256,dtype=float8_e4m3fn,weights=nk,out=bfloat16", {}),
    "e5m2 to float32": ("gemm:M=64,N=40,K=256,dtype=float8_e5m2,weights=nk,out=float32", {}),
    "float32 output": ("gemm:M=64,N=64,K=64,dtype=bfloat16,weights=nk,out=float32", {}),
    "more steps than stages": ("gemm:M=64,N=64,K=640,dtype=bfloat16,weights=nk", {"stages": 3}),
    "two warpgroups": ("gemm:M=128,N=128,K=128,dtype=bfloat16,weights=nk", {"rows": 128}),
    "three warpgroups": (
        "gemm:M=192,N=96,K=128,dtype=bfloat16,weights=nk",
        {"rows": 192, "cluster": 1},
    ),
    "cluster of 2": ("gemm:M=256,N=128,K=128,dtype=bfloat16,weights=nk", {"cluster": 2}),
    "cluster of 3": (
        "gemm:M=192,N=96,K=192,dtype=bfloat16,weights=nk",
        {"rows": 64, "cluster": 3, "columns": 96},
    ),
    "cluster of 4": (
        "gemm:M=256,N=256,K=128,dtype=float16,weights=kn",
        {"rows": 64, "cluster": 4, "columns": 256},
    ),
    "tails": ("gemm:M=200,N=136,K=72,dtype=float16,weights=nk", {}),
    "tails of [k, n]": ("gemm:M=333,N=264,K=200,dtype=bfloat16,weights=kn", {}),
    "a few rows": ("gemm:M=3,N=128,K=136,dtype=bfloat16,weights=nk", {}),
    "a column of boxes of 16": ("gemm:M=64,N=16,K=64,dtype=bfloat16,weights=nk", {}),
    "boxes of 32": ("gemm:M=64,N=96,K=64,dtype=bfloat16,weights=nk", {"columns": 96}),
    "tiles beyond the last row": (
        "gemm:M=192,N=16,K=64,dtype=bfloat16,weights=nk,out=float32",
        {"rows": 64, "cluster": 2},
    ),
    "odd width": ("gemm:M=70,N=37,K=72,dtype=bfloat16,weights=nk", {}),
}


def scheduled(text: str, tiles: dict[str, int]) -> Any:
    return schedule_tiled_gemm(prim_func(parse(text)), tiles=TensorTiles(**tiles))


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str) -> None:
    text, tiles = CASES[name]
    passed(parse(text), scheduled(text, tiles))


def test_adversarial_inputs() -> None:
    text = "gemm:M=70,N=72,K=136,dtype=float16,weights=nk"
    image = lower(scheduled(text, {})).image
    for inputs in mixed_inputs(parse(text)):
        emulated(parse(text), image, inputs, orders=1)


@pytest.mark.slow
def test_several_tiles_for_each_cluster() -> None:
    spec = parse("gemm:M=512,N=192,K=128,dtype=bfloat16,weights=nk")
    small = replace(device("nvidia-h100"), sms=4)
    image = lower(scheduled(str(spec), {"columns": 64}), small).image
    assert image.launches[0].grid == (4, 1, 1)
    emulated(spec, image, random_inputs(spec))
