"""Sums that a pipelined product must not make: at another place, of another part, twice."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T

from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func
from errors import tile_programs as t


@T.macro
def mirrored(P, Q, C, k):
    for i, j, d in T.grid(64, 64, 64):
        with T.sblock("product"):
            vi, vj = T.axis.remap("SS", [i, j])
            vm = T.axis.spatial(64, 63 - i)
            vk = T.axis.reduce(128, k * 64 + d)
            with T.init():
                C[vm, vj] = T.float32(0)
            C[vm, vj] += T.Cast("float32", P[vi, vk]) * T.Cast("float32", Q[vj, vk])


@T.macro
def cleared_elsewhere(P, Q, C, k):
    for i, j, d in T.grid(64, 64, 64):
        with T.sblock("product"):
            vi, vj = T.axis.remap("SS", [i, j])
            vk = T.axis.reduce(128, k * 64 + d)
            with T.init():
                C[vj, vi] = T.float32(0)
            C[vi, vj] += T.Cast("float32", P[vi, vk]) * T.Cast("float32", Q[vj, vk])


@T.macro
def same_part(P, Q, C, k):
    for i, j, d in T.grid(64, 64, 64):
        with T.sblock("product"):
            vi, vj = T.axis.remap("SS", [i, j])
            vk = T.axis.reduce(128, d + k * 0)
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] += T.Cast("float32", P[vi, vk]) * T.Cast("float32", Q[vj, vk])


@T.macro
def same_left(A, S, k):
    for i, d in T.grid(64, 64):
        with T.sblock("load_left"):
            vi, vk = T.axis.spatial(64, i), T.axis.spatial(128, d + k * 0)
            S[vi, vk] = A[vi, vk]


@T.macro
def same_right(B, S, k):
    for j, d in T.grid(64, 64):
        with T.sblock("load_right"):
            vj, vk = T.axis.spatial(64, j), T.axis.spatial(128, d + k * 0)
            S[vj, vk] = B[vj, vk]


@T.macro
def from_one(C, E):
    for i, j in T.grid((1, 64), 64):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast("float16", C[vi, vj])


CASES: dict[str, tuple[Any, str]] = {
    "rows in another order": (
        lambda: t.program(product=mirrored),
        "block 'product', buffer 'C': found index 63 - i; ",
    ),
    "zero at another place": (
        lambda: t.program(product=cleared_elsewhere),
        "block 'product': found sums at [i, j]; ",
    ),
    "the same part in each step": (
        lambda: t.program(same_left, same_right, same_part),
        "block 'product': found elements 0 of A and 0 of B in step 'k'; ",
    ),
    "sums in global memory": (
        lambda: t.program(sums=("float32", "global")),
        "block 'product': found sums of float32 in scope global; ",
    ),
    "sums in shared memory": (
        lambda: t.program(sums=("float32", "shared.dyn")),
        "block 'product': found sums of float32 in scope shared.dyn; ",
    ),
    "a loop that starts elsewhere": (
        lambda: t.program(last=from_one),
        "loop 'i': found a loop that starts at 1; ",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sums(case: str) -> None:
    made, text = CASES[case]
    with pytest.raises(LoweringRefused) as caught:
        lower(made())
    assert str(caught.value).startswith(f"tile-program: {text}")


def test_slices_that_are_no_pairs() -> None:
    spec = parse("gemm:M=1,N=66,K=1024,dtype=bfloat16,weights=nk,out=float32")
    schedule = schedule_tiled_gemm(prim_func(spec), tiles=TensorTiles(split=2, columns=72))
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule)
    assert str(caught.value).startswith(
        "tile-exchange: axis cluster.x: found slices of 33 elements of rows of 66; "
        "limit: even numbers"
    )


def test_slices_that_are_no_boxes() -> None:
    spec = parse("gemm:M=64,N=48,K=768,dtype=bfloat16,weights=nk")
    schedule = schedule_tiled_gemm(prim_func(spec), tiles=TensorTiles(split=12, columns=48))
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule)
    assert str(caught.value).startswith(
        "tile-program: axis cluster.x: found slices of 256 elements of rows of 48; "
    )
