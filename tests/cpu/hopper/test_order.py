"""What a kernel waits for and when: how much is on its way, how a cluster meets and parts."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from cpu.hopper.rows.products import of_spec, spec
from cpu.lower.support import kernels_in
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.hopper.rows.emit import WholeRows
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func

FFN = "gated_ffn:M=64,K=256,N=1024,L=512,dtype=bfloat16"
ARRIVE = r"tvm_builtin_ptx_barrier_cluster_arrive\w+?_(relaxed|release)_aligned\(\)"
#: The last thing that a CTA does to its peers, and its stores.
LAST_PUSH, STORE = r"tvm_builtin_ptx_st_async\w+\(", r"tvm_builtin_ptx_st_global\w+\(|out_ptr\["


@cache
def scheduled(text: str) -> Any:
    func = prim_func(parse(text))
    if text.startswith("gemm:"):
        return schedule_tiled_gemm(func, tiles=TensorTiles(cluster=2, rows=64))
    return schedule_tiled_ffn(func, first=TensorTiles(columns=64))


@cache
def body(text: str) -> str:
    return kernels_in(lower(scheduled(text)).image.cuda)


def planned(text: str) -> KernelPlan:
    return plan_kernel(recover(only_function(scheduled(text)))[0], device("nvidia-h100"))


def test_some_weights_are_on_their_way_at_once() -> None:
    """72 KiB, in stages of 16; the loader then waits for the oldest of them to arrive."""
    plan = planned(FFN)
    assert (plan.right.pitch, plan.on_their_way) == (16 << 10, 5)
    assert plan.right.stages > plan.on_their_way
    assert "if (5 <= asked_for_ptr[0])" in body(FFN)


def test_rows_wait_behind_few_weights() -> None:
    """12 KiB, here less than a stage, until the rows of a tile are made; then 72."""
    schedule = of_spec(spec(40, 1216, 128), rows=64, columns=128)
    text = kernels_in(lower(schedule).image.cuda)
    (plan,) = map(plan_kernel, recover(only_function(schedule)), [device("nvidia-h100")])
    (rows,) = plan.features
    assert isinstance(rows, WholeRows)
    assert (plan.right.pitch, rows.first, plan.on_their_way) == (16 << 10, 1, 5)
    held = "asked_for_ptr[0] == 1"
    assert text.index("asked_for_ptr[0] = 0") < text.index(held) < text.index("5 <= asked_for_ptr")
    # Who has seen the flag says so, once, and asks for the tile then.
    told = text.index("told_ptr[0] = 1")
    assert text.index("crossfuse_await_flags((", text.index(held)) < told
    assert told < text.index("cp_async_bulk_tensor", told)


def test_tiles_that_others_load_too_are_asked_for_at_once() -> None:
    text = "gemm:M=512,N=512,K=512,dtype=bfloat16,weights=nk"
    plan = planned(text)
    assert plan.on_their_way == plan.right.stages
    assert "asked_for" not in body(text)


@pytest.mark.parametrize("text", [FFN, "gemm:M=128,N=64,K=128,dtype=bfloat16,out=float32"])
def test_cluster_meets_without_waiting_for_memory(text: str) -> None:
    first, *others = re.findall(ARRIVE, body(text))
    assert first == "relaxed"
    assert others == ["release", "release"]  # who loads, and who multiplies


def test_ctas_leave_before_they_store_what_they_received() -> None:
    text = body(FFN)
    *_, leaving = [each.start() for each in re.finditer(ARRIVE, text)]
    *_, pushed = [each.start() for each in re.finditer(LAST_PUSH, text)]
    *_, stored = [each.start() for each in re.finditer(STORE, text)]
    assert pushed < leaving < stored


def test_a_cluster_with_more_tiles_stays_until_the_last() -> None:
    """Its CTAs go on to share tiles."""
    text = "gemm:M=4096,N=4096,K=128,dtype=bfloat16,weights=nk"
    assert not planned(text).leaves_early
    last = body(text)[[each.start() for each in re.finditer(ARRIVE, body(text))][-1] :]
    assert not re.search(r"tvm_builtin_ptx_cp_async_bulk_tensor_s2g", last)
