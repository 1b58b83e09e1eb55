"""Chains whose intermediate stays in registers, by both checkers, and faults planted in them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import crossfuse
from cpu.hopper.checkers import caught, emulated, mixed_inputs, passed
from cpu.hopper.instructions import RECEIVED, WAIT
from crossfuse.emulate.cuda import change_argument, drop_call
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.features.intermediate import KeptLeft
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.rules.parted_ffn import RegisterTiles, schedule_register_ffn
from crossfuse.workload import parse, prim_func

#: Workload; rows, columns of the output's tiles, parts, and CTAs of a cluster if they sum them.
CASES = {
    "one CTA": ("gemm_chain:M=64,K=64,N=64,L=64,dtype=bfloat16,act=relu", (64, 64, 1)),
    "two steps": ("gemm_chain:M=64,K=136,N=128,L=40,dtype=float16,act=gelu", (64, 40, 1)),
    "wide": ("gemm_chain:M=64,K=64,N=256,L=256,dtype=bfloat16", (64, 256, 1)),
    "gated": ("gated_ffn:M=64,K=64,N=128,L=72,dtype=bfloat16", (64, 72, 1)),
    "[k, n]": ("gated_ffn:M=64,K=64,N=128,L=72,dtype=bfloat16,weights=kn", (64, 72, 1)),
    "[n, k]": ("gemm_chain:M=64,K=72,N=192,L=64,dtype=bfloat16,weights=nk", (64, 64, 1)),
    "tiles side by side": (
        "gemm_chain:M=64,K=64,N=128,L=100,dtype=bfloat16,out=float32,weights=nk",
        (64, 48, 1),
    ),
    "two warpgroups": ("gated_ffn:M=128,K=136,N=128,L=64,dtype=bfloat16", (128, 64, 1)),
    "two rows of tiles": ("gemm_chain:M=100,K=72,N=128,L=48,dtype=float16", (64, 48, 1)),
    "one row": ("gated_ffn:M=1,K=64,N=128,L=64,dtype=bfloat16,weights=nk", (64, 64, 1)),
    "parts": ("gemm_chain:M=100,K=64,N=256,L=64,dtype=bfloat16,act=relu", (64, 64, 2)),
    "parts that are no rows": ("gated_ffn:M=16,K=64,N=192,L=96,dtype=bfloat16", (64, 48, 3)),
    "parts, two warpgroups": ("gated_ffn:M=128,K=64,N=256,L=64,dtype=float16", (128, 64, 2)),
    "parts, one row": ("gemm_chain:M=1,K=64,N=256,L=64,dtype=bfloat16,weights=nk", (64, 32, 4)),
    "cluster": ("gemm_chain:M=128,K=64,N=256,L=64,dtype=bfloat16,act=relu", (64, 64, 2, 2)),
    "cluster, [n, k]": (
        "gemm_chain:M=64,K=64,N=256,L=72,dtype=bfloat16,weights=nk",
        (64, 72, 4, 4),
    ),
    "cluster of 3, gated": ("gated_ffn:M=12,K=72,N=192,L=96,dtype=float16", (64, 48, 3, 3)),
    "cluster, two warpgroups": ("gated_ffn:M=128,K=136,N=256,L=64,dtype=bfloat16", (128, 64, 4, 4)),
    "cluster of 8, tiles side by side": (
        "gemm_chain:M=64,K=64,N=512,L=128,dtype=bfloat16",
        (64, 32, 8, 8),
    ),
    "cluster, two rows of tiles": (
        "gemm_chain:M=100,K=64,N=256,L=64,dtype=bfloat16",
        (64, 32, 4, 4),
    ),
    "cluster, one row": ("gated_ffn:M=1,K=64,N=256,L=64,dtype=bfloat16", (64, 64, 2, 2)),
    "cluster, few rows": ("gemm_chain:M=12,K=64,N=256,L=64,dtype=bfloat16", (64, 64, 4, 4)),
    "float32 output": ("gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16,out=float32", (64, 64, 2)),
}
FENCE = r"tvm_builtin_ptx_wgmma_fence\w+"
FROM_REGISTERS = r"tvm_builtin_ptx_wgmma_\w+_rs_mma\w+"


def scheduled(name: str) -> Any:
    text, tiles = CASES[name]
    return schedule_register_ffn(prim_func(parse(text)), tiles=tiles_of(*tiles))


def tiles_of(rows: int, columns: int, parts: int, cluster: int = 1) -> RegisterTiles:
    return RegisterTiles(rows, columns, parts, cluster)


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str) -> None:
    text, tiles = CASES[name]
    chosen = tiles_of(*tiles)
    image = passed(parse(text), scheduled(name))
    (launch,) = image.launches
    assert launch.cluster == (chosen.cluster, 1, 1)
    through_l2 = chosen.parts > chosen.cluster
    assert launch.cooperative == through_l2
    assert bool(image.workspaces) == through_l2


@pytest.mark.parametrize("name", ["gated", "parts"])
def test_adversarial_inputs(name: str) -> None:
    spec = parse(CASES[name][0])
    for inputs in mixed_inputs(spec):
        emulated(spec, right(name), inputs, orders=1)


@cache
def right(name: str) -> KernelImage:
    return lower(scheduled(name)).image


def test_the_intermediate_stays_in_registers() -> None:
    """Sixteen columns of it are four registers of each wgmma; 128 columns, two in a register."""
    (programs,) = recover(only_function(scheduled("two steps")))
    (kept,) = plan_kernel(programs, device("nvidia-h100")).features
    assert isinstance(kept, KeptLeft) and kept.held == 32
    assert [each.name for each in right("two steps").memory] == ["A", "B", "D", "out"]


#: What is wrong, the case, the image and what the emulator reports; None: a wrong result.
FAULTS: dict[str, tuple[str, Any, str | None]] = {
    "no fence behind the rounding": (
        "two steps",
        lambda: drop_call(right("two steps"), FENCE, 1),
        "register-race",
    ),
    "a register is written while it is read": (
        "two steps",
        lambda: change_argument(right("two steps"), WAIT, 1, "(kept_ptr[16] = 7, {})", -1),
        "register-race",
    ),
    "columns change places": (
        "two steps",
        lambda: change_argument(right("two steps"), FROM_REGISTERS, 21, "kept_ptr[2]"),
        None,
    ),
    "a step is left out": (
        "two steps",
        lambda: drop_call(right("two steps"), FROM_REGISTERS, 3),
        None,
    ),
    "nobody waits for what the cluster sends": (
        "cluster",
        lambda: drop_call(right("cluster"), RECEIVED, 0),
        "async-race",
    ),
    "nobody waits until the cluster has multiplied": (
        "cluster",
        lambda: drop_call(right("cluster"), WAIT, -1),
        "async-race",
    ),
    "nobody waits for the other parts": (
        "parts",
        lambda: drop_call(right("parts"), "crossfuse_await_parts"),
        "race",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    case, make, kind = FAULTS[name]
    caught(parse(CASES[case][0]), make(), kind)


@pytest.mark.parametrize(
    ("text", "tiles", "registers"),
    [
        ("gemm_chain:M=64,K=64,N=256,L=256", (64, 256, 1), 255),
        ("gemm_chain:M=128,K=64,N=256,L=256", (128, 256, 1), 168),
        ("gated_ffn:M=128,K=64,N=128,L=256", (128, 256, 1), 168),
        ("gemm_chain:M=128,K=64,N=192,L=192,act=gelu", (128, 192, 1), 168),
        ("gemm_chain:M=192,K=64,N=192,L=128", (192, 128, 1), 128),
        ("gemm_chain:M=128,K=64,N=512,L=256,act=gelu", (64, 64, 4), 255),
        ("gemm_chain:M=128,K=64,N=512,L=256,act=gelu", (64, 256, 8, 8), 255),
        ("gated_ffn:M=128,K=64,N=256,L=256", (128, 256, 4, 4), 168),
    ],
)
def test_nvcc_neither_spills_nor_serialises(
    text: str, tiles: tuple[int, ...], registers: int
) -> None:
    func = prim_func(parse(f"{text},dtype=bfloat16"))
    schedule = schedule_register_ffn(func, tiles=tiles_of(*tiles))
    (usage,) = compile_cubin(lower(schedule).image.cuda).resources
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0)
    assert usage.advisories == ()
    assert usage.registers <= registers


def test_compile_takes_the_placement(tmp_path: Any) -> None:
    spec = "gated_ffn:M=16,K=64,N=256,L=64,dtype=bfloat16"
    compiled = crossfuse.compile(spec, placement="registers", directory=tmp_path)
    assert "_rs_mma" in compiled.lowered.image.cuda
    assert [each.status for each in crossfuse.check(compiled, gpu=False)] == ["passed"] * 3
