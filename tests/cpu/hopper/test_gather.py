"""Chains whose intermediate stays in the cluster, by both checkers, and faults planted in them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cpu.hopper.checkers import caught, emulated, mixed_inputs, passed
from cpu.hopper.instructions import ARRIVE, EXPECT, FENCE, LEAVE, MEET, PUSH, RAISE, RECEIVED, WAIT
from cpu.hopper.planting import one_changed
from crossfuse.emulate.cuda import change_argument, drop_call
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.parted_ffn import ClusterTiles, schedule_clustered_ffn
from crossfuse.workload import parse, prim_func

#: Workload; rows, cluster size and parts.
CASES = {
    "one CTA": ("gemm_chain:M=64,K=64,N=64,L=64,dtype=bfloat16,act=relu", (64, 1, 1)),
    "2": ("gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16,act=gelu", (64, 2, 1)),
    "3, gated": ("gated_ffn:M=64,K=64,N=192,L=72,dtype=float16", (64, 3, 1)),
    "4, narrow slices": ("gemm_chain:M=64,K=64,N=64,L=64,dtype=bfloat16,weights=nk", (64, 4, 1)),
    "8, wide slices": ("gemm_chain:M=64,K=64,N=1024,L=64,dtype=bfloat16", (64, 8, 1)),
    "16": ("gemm_chain:M=64,K=32,N=512,L=256,dtype=bfloat16,act=relu", (64, 16, 1)),
    "two warpgroups": ("gated_ffn:M=128,K=136,N=192,L=64,dtype=bfloat16", (128, 4, 1)),
    "two rows of tiles": ("gemm_chain:M=100,K=72,N=128,L=48,dtype=float16", (64, 2, 1)),
    "one row": ("gated_ffn:M=1,K=64,N=128,L=64,dtype=bfloat16,weights=nk", (64, 2, 1)),
    "parts": ("gemm_chain:M=100,K=64,N=256,L=64,dtype=bfloat16,act=relu", (64, 2, 2)),
    "parts that are no rows": ("gated_ffn:M=16,K=64,N=384,L=96,dtype=bfloat16", (64, 2, 3)),
    "parts, two warpgroups": ("gated_ffn:M=128,K=64,N=512,L=64,dtype=float16", (128, 4, 2)),
    "parts, one row": ("gemm_chain:M=1,K=64,N=512,L=64,dtype=bfloat16,weights=nk", (64, 2, 4)),
    "parts, one CTA": ("gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16", (64, 1, 2)),
    "float32 output": ("gemm_chain:M=64,K=64,N=256,L=64,dtype=bfloat16,out=float32", (64, 2, 2)),
}
MATRIX = r"tvm_builtin_ptx_stmatrix\w+"
LOAD = r"tvm_builtin_ptx_ld_vec_global\w+"
PARTS = "crossfuse_await_parts"


def scheduled(name: str) -> Any:
    text, tiles = CASES[name]
    return schedule_clustered_ffn(prim_func(parse(text)), tiles=ClusterTiles(*tiles))


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str) -> None:
    text, (_, cluster, parts) = CASES[name]
    image = passed(parse(text), scheduled(name))
    (launch,) = image.launches
    assert launch.cluster == (cluster, 1, 1)
    assert launch.cooperative == (parts > 1)
    assert bool(image.workspaces) == (parts > 1)


@pytest.mark.parametrize("name", ["2", "parts"])
def test_adversarial_inputs(name: str) -> None:
    spec = parse(CASES[name][0])
    for inputs in mixed_inputs(spec):
        emulated(spec, right(name), inputs, orders=1)


@cache
def right(name: str) -> KernelImage:
    return lower(scheduled(name)).image


#: What is wrong, the case, the image and what the emulator reports; None: a wrong result.
FAULTS: dict[str, tuple[str, Any, str | None]] = {
    "a piece is not sent": ("2", lambda: drop_call(right("2"), PUSH, 0), "deadlock"),
    "no proxy fence behind what peers have stored": (
        "2",
        lambda: one_changed(
            right("2"), rf"({RECEIVED}\([^\n]*\n\s*){FENCE}\(\);", r"\1", body=True
        ),
        "async-race",
    ),
    "a wait of too narrow a scope": (
        "2",
        lambda: one_changed(right("2"), r"parity\.acquire\.cluster", "parity.acquire.cta"),
        "async-race",
    ),
    "lanes load what others may not have stored yet": (
        "2",
        lambda: drop_call(right("2"), "tvm_builtin_cuda_warp_sync"),
        "race",
    ),
    "a piece is sent elsewhere": (
        "2",
        lambda: change_argument(right("2"), PUSH, 0, "{} + 512", 0),
        "async-race",
    ),
    "too few bytes are waited for": (
        "2",
        lambda: change_argument(right("2"), EXPECT, 1, "{} - 16", -1),
        "async-race",
    ),
    "nobody waits for the slices": ("2", lambda: drop_call(right("2"), RECEIVED, 0), "async-race"),
    "the own slice is not stored": ("2", lambda: drop_call(right("2"), MATRIX, 0), None),
    "the own slice is not fenced": (
        "one CTA",  # with peers, another fence follows the wait for their slices
        lambda: drop_call(right("one CTA"), FENCE, 0),
        "async-race",
    ),
    "warps do not meet behind the own slice": (
        "2",
        lambda: drop_call(right("2"), MEET, 0),
        "async-race",
    ),
    "a CTA leaves while peers send": (
        "2",
        lambda: drop_call(drop_call(right("2"), ARRIVE, -1), LEAVE, -1),
        "early-exit",
    ),
    "nobody waits for the other parts": ("parts", lambda: drop_call(right("parts"), PARTS), "race"),
    "a part is stored without its flag": (
        "parts",
        lambda: drop_call(right("parts"), RAISE),
        "deadlock",
    ),
    "warpgroups do not wait for the parts": (
        "parts",
        lambda: drop_call(right("parts"), WAIT, -1),
        "race",
    ),
    "a part is left out": ("parts", lambda: drop_call(right("parts"), LOAD, 1), None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    case, make, kind = FAULTS[name]
    caught(parse(CASES[case][0]), make(), kind)
