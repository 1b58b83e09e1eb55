"""Generated schedules that went wrong once, with what must become of them now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpu.fuzz.chain import ChainPlan
from cpu.fuzz.gemm import GemmPlan
from cpu.fuzz.layouts import Staging, Threads
from cpu.fuzz.misuse import Call, MisusePlan, WildPlan
from cpu.fuzz.oracle import judge

ONE = Threads(y=1, x=1, flat=True, strided=False)
NOTHING = Staging(operands=(), scope="shared", depth=1, vector=1, spread=True)
CHAIN = ChainPlan(
    text="gemm_chain:M=4,K=4,N=4,L=4,dtype=float16,weights=kn,act=relu",
    cluster=1,
    axis="x",
    exchange="shuffle",
    rows=0,
    grid="blockIdx.x",
    ring=False,
    at="slice",
    accumulate="local",
    second=ONE,
    first=replace(ONE, flat=False),
    stage_second=NOTHING,
    stage_first=NOTHING,
    vector=1,
    first_at="thread",
    decompose="early",
)
PLANS = {
    # A vector of eight indices, each computed: the generated text did not compile.
    "indices of a stage of short rows": (
        replace(CHAIN, stage_first=Staging((0,), "shared", 2, 8, True)),
        "vectors",
    ),
    "a stage of a column": (
        replace(
            CHAIN,
            text="gemm_chain:M=1,K=2,N=8,L=4,dtype=float16,weights=nk,act=relu",
            stage_first=Staging((1,), "shared", 1, 8, True),
        ),
        "vectors",
    ),
    # An annotation made by hand with an axis that no cluster has: a KeyError.
    "a cluster axis that does not exist": (
        WildPlan(
            "gemm:M=6,K=5,N=9,dtype=float16,weights=nk,combine=max",
            False,
            (Call("forge", block=0, loop=0, choice=1),),
        ),
        "cluster-binding",
    ),
    # Threads with threadIdx.y = 1 read what others stored at the same index: no __syncthreads.
    "a stage of fewer elements than threads": (
        MisusePlan(
            replace(
                CHAIN,
                text="gemm_chain:M=2,K=16,N=16,L=32,dtype=float16,weights=kn,act=relu",
                cluster=16,
                exchange="gather",
                second=Threads(2, 2, False, False),
                first=Threads(2, 2, False, False),
                stage_second=Staging((0,), "shared", 1, 1, True),
            ),
            (Call("bind", block=0, loop=0, choice=0),),
        ),
        "",
    ),
    # A refusal that quoted the source text of a helper.
    "a refusal of an access to a slab": (
        replace(
            CHAIN,
            text="gemm_chain:M=8,K=1,N=12,L=4,dtype=float16,weights=kn,act=relu",
            cluster=4,
            at="all",
            second=replace(ONE, flat=False),
            vector=8,
        ),
        "vectors",
    ),
    # TVM draws a virtual thread around the whole kernel: sums were taken several times.
    "an initialisation in virtual threads": (
        MisusePlan(replace(CHAIN, first_at="cta"), (Call("bind", block=0, loop=9, choice=5),)),
        "virtual-threads",
    ),
    # Both loops became the one threadIdx.x: only the diagonal was computed.
    "two loops bound to the same threads": (
        WildPlan(
            "gemm:M=4,K=8,N=8,dtype=float32",
            True,
            (Call("bind", block=0, loop=0, choice=0), Call("bind", block=0, loop=1, choice=0)),
        ),
        "thread-binding",
    ),
    # LLVM vectorised the sequential run into reads past the operands.
    "a bfloat16 product of few columns": (
        GemmPlan(
            text="gemm:M=5,K=12,N=8,dtype=bfloat16,weights=kn,combine=sum",
            direct=False,
            cluster=4,
            axis="x",
            scatter=False,
            slices="j",
            tile=(5, 4),
            outside=(("i", "blockIdx.z"), ("j", "blockIdx.y")),
            rank_part="outer",
            inner="ijk",
            threads=ONE,
            accumulate="local",
            staging=NOTHING,
            combine_scope="",
            epilogue_at="thread",
            decompose="pc",
        ),
        "",
    ),
    "a chain as it should be": (CHAIN, ""),
}


@pytest.mark.parametrize("name", PLANS)
def test_verdict(name: str) -> None:
    plan, rule = PLANS[name]
    assert isinstance(plan, (GemmPlan, ChainPlan, MisusePlan, WildPlan))
    assert judge(plan.spec, plan.build).rule == rule
