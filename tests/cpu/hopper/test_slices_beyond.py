"""Slices and parts that reach beyond an intermediate that stays in the SMs, by both checkers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cpu.hopper.checkers import emulated, mixed_inputs, passed
from crossfuse import _tvm as ir
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.epilogue.elements import Elements
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.image import KernelImage
from crossfuse.planner.kernels.shape import rows_in_parts
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.rules.parted_ffn import (
    ClusterTiles,
    RegisterTiles,
    schedule_clustered_ffn,
    schedule_register_ffn,
)
from crossfuse.workload import parse, prim_func, random_inputs

#: Workload; rows, cluster size and parts; ring order, bulk copies.
CLUSTERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "one part": (
        "gemm_chain:M=16,K=64,N=200,L=72,dtype=float16,act=gelu,weights=nk",
        (64, 4, 1),
    ),
    "a CTA without columns": ("gemm_chain:M=3,K=64,N=72,L=72,dtype=bfloat16", (64, 4, 1)),
    "output alone": ("gated_ffn:M=33,K=64,N=256,L=264,dtype=bfloat16", (64, 4, 1)),
    "parts": ("gemm_chain:M=16,K=64,N=200,L=72,dtype=float16,weights=nk", (64, 2, 2)),
    "parts of no rows": ("gated_ffn:M=33,K=72,N=520,L=264,dtype=bfloat16", (64, 2, 3)),
    "wide": ("gated_ffn:M=49,K=64,N=1000,L=1000,dtype=float16,weights=nk", (64, 8, 2)),
    "two warpgroups": ("gemm_chain:M=127,K=64,N=264,L=72,dtype=bfloat16,act=relu", (128, 4, 1)),
    "parts, a CTA without columns": (
        "gemm_chain:M=7,K=64,N=520,L=264,dtype=bfloat16,act=relu",
        (64, 8, 2),
    ),
    "parts that begin beyond the columns": (
        "gemm_chain:M=3,K=64,N=520,L=72,dtype=float16,weights=nk",
        (64, 2, 5),
    ),
    # Its tile has 80 or 72 columns, its slice 128.
    "one CTA": ("gated_ffn:M=5,K=40,N=80,L=40,dtype=bfloat16", (64, 1, 1)),
    "one CTA, odd eights": ("gemm_chain:M=5,K=40,N=72,L=40,dtype=float16", (64, 1, 1)),
    "chosen": ("gated_ffn:M=49,K=64,N=520,L=264,dtype=bfloat16", (0, 0, 0)),
    "one row": ("gemm_chain:M=1,K=64,N=72,L=72,dtype=bfloat16,weights=nk", (0, 0, 0)),
}
#: Workload; rows, columns of the output's tiles, parts, and CTAs of a cluster if they sum them.
REGISTERS = {
    "cluster": ("gated_ffn:M=64,K=64,N=200,L=72,dtype=bfloat16", (64, 72, 4, 4)),
    "through L2": ("gated_ffn:M=33,K=64,N=200,L=72,dtype=bfloat16", (64, 48, 4, 1)),
    "[n, k]": ("gemm_chain:M=7,K=64,N=520,L=264,dtype=float16,weights=nk,act=gelu", (64, 96, 5, 5)),
    "parts of no rows": (
        "gemm_chain:M=100,K=64,N=520,L=264,dtype=float16,act=gelu",
        (128, 96, 5, 1),
    ),
    "one row": ("gated_ffn:M=1,K=64,N=72,L=72,dtype=float16,weights=nk", (64, 24, 2, 2)),
    "33 rows": ("gated_ffn:M=33,K=64,N=256,L=72,dtype=bfloat16", (64, 72, 4, 4)),
    "7 rows": ("gemm_chain:M=7,K=64,N=192,L=96,dtype=bfloat16,weights=nk", (64, 48, 3, 3)),
    "127 rows": ("gemm_chain:M=127,K=64,N=512,L=64,dtype=float16,act=gelu", (128, 64, 8, 8)),
    "chosen": ("gemm_chain:M=100,K=64,N=1000,L=72,dtype=float16", (0, 0, 0, 0)),
}


def clustered(text: str, tiles: tuple[int, ...]) -> Any:
    return schedule_clustered_ffn(prim_func(parse(text)), tiles=ClusterTiles(*tiles))


def kept(text: str, tiles: tuple[int, ...]) -> Any:
    return schedule_register_ffn(prim_func(parse(text)), tiles=RegisterTiles(*tiles))


@pytest.mark.parametrize("name", CLUSTERS)
def test_slices_in_the_cluster(name: str) -> None:
    text, tiles = CLUSTERS[name]
    image = passed(parse(text), clustered(text, tiles))
    if tiles[1]:
        assert [each.cluster for each in image.launches] == [(tiles[1], 1, 1)]


@pytest.mark.parametrize("name", REGISTERS)
def test_parts_in_registers(name: str) -> None:
    text, tiles = REGISTERS[name]
    image = passed(parse(text), kept(text, tiles))
    if tiles[3]:
        assert [each.cluster for each in image.launches] == [(tiles[3], 1, 1)]


@pytest.mark.parametrize("name", ["one part", "parts of no rows"])
def test_adversarial_inputs_in_the_cluster(name: str) -> None:
    text, tiles = CLUSTERS[name]
    image = lower(clustered(text, tiles)).image
    for inputs in mixed_inputs(parse(text)):
        emulated(parse(text), image, inputs, orders=1)


@pytest.mark.parametrize("name", ["cluster", "through L2"])
def test_adversarial_inputs_in_registers(name: str) -> None:
    text, tiles = REGISTERS[name]
    image = lower(kept(text, tiles)).image
    for inputs in mixed_inputs(parse(text)):
        emulated(parse(text), image, inputs, orders=1)


INVERSE = "gemm_chain:M=16,K=64,N=200,L=72,dtype=bfloat16,act=relu"


def inverse() -> Any:
    """A chain with 1 / x between its products: infinite where sums are zero."""

    def divided(node: Any, _mutator: Any) -> Any:
        return ir.tirx.FloatImm("float32", 1.0) / node.a

    func = prim_func(parse(INVERSE))
    return func.with_body(ir.mutate(func.body, (ir.tirx.Max, divided)))


@cache
def right(where: str) -> KernelImage:
    return lower(scheduled_inverse(where)).image


def scheduled_inverse(where: str) -> Any:
    if where == "cluster":
        return schedule_clustered_ffn(inverse(), tiles=ClusterTiles(64, 2, 2))
    return schedule_register_ffn(inverse(), tiles=RegisterTiles(64, 72, 4, 4))


def positive() -> dict[str, Any]:
    """Sums far from zero."""
    return {name: np.abs(value) + 1 for name, value in random_inputs(parse(INVERSE)).items()}


@pytest.mark.parametrize("where", ["cluster", "registers"])
def test_an_activation_that_is_infinite_at_zero(where: str) -> None:
    inputs = positive()
    report = emulate(right(where), inputs, orders=1)
    report.raise_if_wrong()
    sequential = run_sequential(scheduled_inverse(where), inputs)
    found, wanted = (np.float32(each.outputs["out"]) for each in (report, sequential))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, rtol=2e-2)


@pytest.mark.parametrize("where", ["cluster", "registers"])
def test_without_zeros_infinities_leak(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elements, "_or_zero", lambda _self, _column, value: value)
    report = emulate(lower(scheduled_inverse(where)).image, positive(), orders=1)
    assert not np.isfinite(np.float32(report.outputs["out"])).all()


def changed(name: str, callback: tuple[type, Any]) -> Any:
    """The scheduled function of a cluster with other nodes."""
    text, tiles = CLUSTERS[name]
    func = only_function(clustered(text, tiles))
    return func.with_body(ir.mutate(func.body, callback))


def test_other_numbers_than_zero_are_refused() -> None:
    def one(node: Any, _mutator: Any) -> Any:
        return ir.tirx.FloatImm("float16", 1.0) if str(node.ty) == "float16" else node

    with pytest.raises(LoweringRefused) as caught:
        recover(changed("one part", (ir.tirx.FloatImm, one)))
    assert "found 1 where 200 <= " in str(caught.value).replace("T.float16(1.0)", "1")
    assert "limit: zeros from column 200 of the product on" in str(caught.value)


def test_zeros_elsewhere_are_refused() -> None:
    def earlier(node: Any, mutator: Any) -> Any:
        return node.b >= 190 if ir.constant(node.a) == 200 else mutator.default_mutate(node)

    with pytest.raises(LoweringRefused, match="limit: zeros from column 200 of the product on"):
        recover(changed("one part", (ir.tirx.LE, earlier)))


def test_a_part_without_columns_is_refused() -> None:
    with pytest.raises(ScheduleRefused) as caught:
        clustered("gemm_chain:M=64,K=64,N=264,L=64,dtype=bfloat16", (64, 2, 8))
    assert "parts that each have some" in str(caught.value)
    with pytest.raises(ScheduleRefused) as caught:
        kept("gemm_chain:M=64,K=64,N=200,L=64,dtype=bfloat16", (64, 64, 3, 3))
    assert "parts of a multiple of 64 columns, each with some of them" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "columns", "parts", "wanted"),
    [(128, 96, 6, 128), (33, 136, 3, 33), (7, 72, 5, 10), (1, 24, 2, 1), (1, 8, 4, 2)],
)
def test_rows_of_which_each_part_adds_as_many(
    rows: int, columns: int, parts: int, wanted: int
) -> None:
    assert rows_in_parts(rows, columns, parts) == wanted


@pytest.mark.parametrize(
    "make",
    [
        lambda: clustered("gemm_chain:M=100,K=416,N=520,L=264,dtype=bfloat16,act=gelu", (64, 8, 1)),
        lambda: clustered("gated_ffn:M=128,K=512,N=1000,L=264,dtype=bfloat16", (128, 4, 2)),
        lambda: kept("gated_ffn:M=33,K=416,N=520,L=264,dtype=bfloat16,weights=nk", (64, 96, 5, 5)),
        lambda: kept("gemm_chain:M=100,K=416,N=520,L=264,dtype=bfloat16,act=gelu", (128, 96, 5, 1)),
    ],
)
def test_nvcc_compiles_without_spills(make: Any) -> None:
    for usage in compile_cubin(lower(make()).image.cuda).resources:
        assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0)
        assert usage.advisories == ()
