"""Loops pipelined by TVM around and inside exchanges lower to right kernels."""

from __future__ import annotations

from typing import Any

from cpu.lower.kernels import split_k
from cpu.lower.support import barriers, checked
from crossfuse.schedule.rules.threads import Tiles, schedule_ffn
from crossfuse.workload import parse, prim_func


def pipelined(sch: Any, block: str, loop: str, stages: list[int]) -> Any:
    """Annotate a loop around a block with a software pipeline."""
    loops = sch.get_loops(sch.get_sblock(block))
    found = next(each for each in loops if str(sch.get(each).loop_var.name) == loop)
    sch.annotate(found, "software_pipeline_stage", stages)
    sch.annotate(found, "software_pipeline_order", list(range(len(stages))))
    return sch


def test_software_pipeline_inside_a_nest_versions_its_stages() -> None:
    plain, piped = (
        split_k(k=512),
        pipelined(split_k(k=512), "gemm0_rf_update", "k_1_0", [0, 0, 1]),
    )
    sizes = []
    for sch in (plain, piped):
        plan = checked(sch).shared_memory.placements
        sizes.append({each.name: each.size for each in plan})
    assert sizes[1]["A_shared.dyn"] == 2 * sizes[0]["A_shared.dyn"]


def test_software_pipeline_over_remote_reads_inside_a_nest() -> None:
    spec = parse("gemm_chain:M=8,K=32,N=128,L=32,dtype=float16")
    sch = schedule_ffn(prim_func(spec), cluster=2, ring=False, tiles=Tiles(depth=16))
    lowered = checked(pipelined(sch, "gemm1_update", "k_1_0", [0, 0, 1]))
    assert barriers(lowered.image) == 2
