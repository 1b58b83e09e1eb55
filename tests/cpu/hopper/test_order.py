"""What a kernel waits for and when: how much is on its way, when a CTA leaves its cluster."""

from __future__ import annotations

from typing import Any

from cpu.hopper.rows.products import of_spec, spec
from crossfuse.hardware import device
from crossfuse.lower.extract import only_function
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.hopper.rows.emit import WholeRows
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func


def planned(schedule: Any) -> KernelPlan:
    return plan_kernel(recover(only_function(schedule))[0], device("nvidia-h100"))


def product(text: str) -> KernelPlan:
    func = prim_func(parse(f"gemm:{text},dtype=bfloat16,weights=nk"))
    return planned(schedule_tiled_gemm(func, tiles=TensorTiles(cluster=2, rows=64)))


def ffn() -> KernelPlan:
    func = prim_func(parse("gated_ffn:M=64,K=256,N=1024,L=512,dtype=bfloat16"))
    return planned(schedule_tiled_ffn(func, first=TensorTiles(columns=64)))


def test_some_weights_are_on_their_way_at_once() -> None:
    """72 KiB, in stages of 16; the loader then waits for the oldest of them to arrive."""
    plan = ffn()
    assert (plan.right.pitch, plan.on_their_way) == (16 << 10, 5)
    assert plan.right.stages > plan.on_their_way


def test_rows_wait_behind_few_weights() -> None:
    """12 KiB, here less than a stage, until the rows of a tile are made; then 72."""
    plan = planned(of_spec(spec(40, 1216, 128), rows=64, columns=128))
    (rows,) = plan.features
    assert isinstance(rows, WholeRows)
    assert (plan.right.pitch, rows.first, plan.on_their_way) == (16 << 10, 1, 5)


def test_tiles_that_others_load_too_are_asked_for_at_once() -> None:
    plan = product("M=512,N=512,K=512")
    assert plan.on_their_way == plan.right.stages


def test_ctas_leave_before_they_store_what_they_received() -> None:
    assert ffn().leaves_early


def test_a_cluster_with_more_tiles_stays_until_the_last() -> None:
    """Its CTAs go on to share tiles."""
    assert not product("M=4096,N=4096,K=128").leaves_early
