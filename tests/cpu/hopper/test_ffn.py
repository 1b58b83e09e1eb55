"""Chains and gated FFNs of pipelined kernels, by both checkers."""

from __future__ import annotations

from typing import Any

import pytest

import crossfuse
from cpu.hopper.checkers import emulated, mixed_inputs, passed
from crossfuse.errors import ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import parse, prim_func

CASES = {
    "gated": ("gated_ffn:M=64,K=128,N=256,L=128,dtype=bfloat16", {}),
    "gated, a few rows": ("gated_ffn:M=16,K=128,N=256,L=128,dtype=bfloat16", {"columns": 64}),
    "gated, one row": ("gated_ffn:M=1,K=64,N=256,L=64,dtype=float16", {}),
    "gated, tails": ("gated_ffn:M=100,K=136,N=384,L=72,dtype=bfloat16", {"cluster": 2}),
    "gated, [k, n]": ("gated_ffn:M=64,K=96,N=256,L=80,dtype=bfloat16,weights=kn", {}),
    "chain": ("gemm_chain:M=128,K=96,N=256,L=80,dtype=float16,act=gelu", {}),
    "chain of many steps": ("gemm_chain:M=64,K=64,N=1024,L=64,dtype=bfloat16,act=relu", {}),
    # Reductions of one step are not split.
    "one step": ("gated_ffn:M=49,K=64,N=64,L=72,dtype=bfloat16", {}),
    "odd rows": ("gated_ffn:M=49,K=64,N=256,L=72,dtype=bfloat16", {}),
    "a reduction with a tail": ("gemm_chain:M=64,K=64,N=200,L=72,dtype=float16", {}),
    # Clusters stand along the rows, and split the second reduction where whole tiles do so.
    "two rows of tiles": (
        "gated_ffn:M=256,K=128,N=256,L=64,dtype=bfloat16",
        {"columns": 64, "stacked": True},
    ),
    "two by two": (
        "gated_ffn:M=256,K=64,N=256,L=64,dtype=float16",
        {"columns": 32, "across": 2, "stacked": True},
    ),
    "rows of tiles with a tail": (
        "gemm_chain:M=300,K=64,N=128,L=72,dtype=float16,weights=kn",
        {"columns": 64, "stacked": True},
    ),
    "two by two with a tail": (
        "gemm_chain:M=200,K=64,N=128,L=136,dtype=bfloat16",
        {"columns": 32, "across": 2, "stacked": True},
    ),
}


def scheduled(text: str, tiles: dict[str, int], staged: bool = False) -> Any:
    return schedule_tiled_ffn(prim_func(parse(text)), first=TensorTiles(**tiles), staged=staged)


@pytest.mark.parametrize("staged", [False, True], ids=["two kernels", "one kernel"])
@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str, staged: bool) -> None:
    text, tiles = CASES[name]
    passed(parse(text), scheduled(text, tiles, staged))


@pytest.mark.parametrize("staged", [False, True], ids=["two kernels", "one kernel"])
def test_adversarial_inputs(staged: bool) -> None:
    spec = parse("gated_ffn:M=33,K=72,N=256,L=72,dtype=float16")
    image = lower(scheduled(str(spec), {}, staged)).image
    for inputs in mixed_inputs(spec):
        emulated(spec, image, inputs, orders=1)


def test_the_left_tile_of_gate_and_up_is_loaded_once() -> None:
    image = lower(scheduled(CASES["gated"][0], {"columns": 64, "cluster": 2})).image
    first, second = image.launches
    assert [each.buffer for each in first.tensor_maps] == ["A", "B_gate", "B_up", "hidden"]
    assert [each.name for each in image.workspaces] == ["hidden"]
    assert (first.early, second.early) == (False, True)
    assert "griddepcontrol.wait" in image.cuda
    assert "griddepcontrol.launch_dependents" in image.cuda


def test_what_is_not_split_is_not_exchanged() -> None:
    image = lower(scheduled(CASES["one step"][0], {})).image
    assert [each.cluster for each in image.launches] == [(1, 1, 1)] * 2
    assert "st.async" not in image.cuda


def test_a_single_product_is_refused() -> None:
    with pytest.raises(ScheduleRefused) as caught:
        schedule_tiled_ffn(prim_func(parse("gemm:M=64,N=64,K=64,dtype=float16")))
    assert str(caught.value).startswith(
        "rule: tiled_ffn, block 'gemm0': found a single product; limit: a chain of two products."
    )


@pytest.mark.slow
def test_compile_takes_the_rule(tmp_path: Any) -> None:
    spec = "gated_ffn:M=16,K=64,N=256,L=64,dtype=bfloat16"
    apart = crossfuse.compile(spec, placement="global", directory=tmp_path)
    launches = apart.lowered.image.launches
    assert [each.cooperative for each in launches] == [False, False]
    for placement in ("dsm", "auto"):  # so small an intermediate stays in registers
        within = crossfuse.compile(spec, placement=placement, directory=tmp_path)
        (launch,) = within.lowered.image.launches
        assert not launch.cooperative
        assert [each.status for each in crossfuse.check(within, gpu=False)] == ["passed"] * 3
    compiled = crossfuse.compile(spec, placement="l2", directory=tmp_path)
    (launch,) = compiled.lowered.image.launches
    assert launch.cooperative
    assert [each.status for each in crossfuse.check(compiled, gpu=False)] == ["passed"] * 3
    with pytest.raises(ScheduleRefused, match="compile: rule: found 'fast'; limit: 'auto'"):
        crossfuse.compile(spec, rule="fast", directory=tmp_path)
