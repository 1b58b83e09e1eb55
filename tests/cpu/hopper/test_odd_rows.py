"""Kernels whose slices and parts are no whole rows, with further inputs, in the emulator.

Threads that sum parts read the residual, the scales and the bias at places that come of remainders
of sums: TVM's `FlattenBuffer` alone makes wrong ones of some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cpu.hopper.checkers import emulated
from cpu.lower.flat_indices import wrong_indices
from crossfuse import _tvm as ir
from crossfuse.errors import CheckFailed
from crossfuse.lower import pipeline
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

FURTHER = "scale=last,bias=last,residual=out"
BOTH = "scale=first+last,bias=first+last,residual=out"
#: A kernel that TVM alone makes wrong: a part has 1016 elements, which are 31 rows and 24 of a row.
WRONG = "gemm_chain:M=127,K=64,N=256,L=128,dtype=bfloat16,residual=out"


def product(**tiles: Any) -> Callable[[Any], Any]:
    return lambda f: schedule_tiled_gemm(f, tiles=TensorTiles(**tiles))


def ffn(staged: bool, split: int, rows: int = 64, **options: Any) -> Callable[[Any], Any]:
    first = TensorTiles(rows=rows, columns=32, cluster=split, stacked=False)
    second = TensorTiles(rows=rows, columns=32, cluster=1, split=split)
    return lambda f: schedule_tiled_ffn(f, first=first, second=second, staged=staged, **options)


def clustered(*tiles: int, **options: Any) -> Callable[[Any], Any]:
    return lambda f: schedule_clustered_ffn(f, tiles=ClusterTiles(*tiles), **options)


def kept(*tiles: int) -> Callable[[Any], Any]:
    return lambda f: schedule_register_ffn(f, tiles=RegisterTiles(*tiles))


def chain(rows: int, columns: int = 64, further: str = BOTH, width: int = 256) -> str:
    return (
        f"gemm_chain:M={rows},K=64,N={width},L={columns},dtype=bfloat16,act=relu,weights=nk,"
        f"{further}"
    )


def gated(rows: int, columns: int = 64, further: str = FURTHER, width: int = 256) -> str:
    return f"gated_ffn:M={rows},K=64,N={width},L={columns},dtype=bfloat16,{further}"


def gemm(rows: int, columns: int = 64, dtype: str = "bfloat16") -> str:
    return f"gemm:M={rows},K=256,N={columns},dtype={dtype},weights=nk,{FURTHER}"


CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "cluster, 4 parts of 127 rows": (WRONG, clustered(128, 4, 4)),
    "cluster, 125 rows": (gated(125), clustered(128, 2, 2)),
    "cluster, 4 parts of 123 rows": (chain(123, 72), clustered(64, 2, 4)),
    "cluster, 7 rows": (gated(7, 72), clustered(64, 2, 2)),
    "registers, 127 rows": (chain(127), kept(128, 32, 4)),
    "registers, 33 rows": (gated(33, width=192), kept(64, 32, 3)),
    "registers, one row": (gated(1), kept(64, 32, 4)),
    "registers, cluster, 125 rows": (chain(125), kept(128, 64, 4, 4)),
    "registers, cluster of 3, 12 rows": (chain(12, width=192), kept(64, 32, 3, 3)),
    "registers, cluster, 7 rows": (gated(7), kept(64, 32, 4, 4)),
    "split, 125 rows": (gemm(125, 72, "float16"), product(split=2)),
    "split, 33 rows": (gemm(33, 40), product(split=4)),
    "split, one row": (gemm(1), product(split=4, columns=64)),
    "L2, 65 rows": (chain(65, width=128), ffn(True, 2, 128)),
    "L2, 7 rows": (chain(7, width=128), ffn(True, 2)),
    "two kernels, 127 rows": (chain(127, width=128), ffn(False, 2, 128)),
    "two kernels, one row": (chain(1, width=128), ffn(False, 2)),
}


def scheduled(name: str) -> Any:
    text, rule = CASES[name]
    return rule(prim_func(parse(text)))


def without_ours(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Leave TVM's `FlattenBuffer` alone; functions that it gets come into the list."""
    seen: list[Any] = []

    def note(func: Any) -> Any:
        seen.append(func)
        return func

    passes = [ir.prim_func_pass("Note", note), ir.tirx.transform.FlattenBuffer()]
    monkeypatch.setattr(pipeline, "flatten_buffers", lambda: passes)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_clean_and_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse(CASES[name][0])
    emulated(spec, lower(scheduled(name)).image, random_inputs(spec), orders=1)
    seen = without_ours(monkeypatch)
    lower(scheduled(name))
    assert seen
    assert not [wrong for each in seen for wrong in wrong_indices(each)]


def test_wrong_indices_of_tvm_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the emulator, and by the comparison of indices; here without `flatten_buffers`."""
    seen, name = without_ours(monkeypatch), "cluster, 4 parts of 127 rows"
    image = lower(scheduled(name)).image
    wrong = [found for each in seen for found in wrong_indices(each, ours=False)]
    assert {each.split("[")[0] for each in wrong} == {"residual", "out"}
    with pytest.raises(CheckFailed):
        emulated(parse(WRONG), image, random_inputs(parse(WRONG)), orders=1)
