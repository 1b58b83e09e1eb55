"""Chains of functions as people and importers write them."""

from __future__ import annotations

from typing import Any

import pytest
import tvm

from cpu.study import kernels
from crossfuse.errors import PlanRefused
from crossfuse.planner.chain.build import (
    Further,
    Layer,
    Operand,
    Reduced,
    assemble,
    chain_of,
    matrix_chain,
)
from crossfuse.planner.chain.spec import Chain
from crossfuse.workload import parse, prim_func
from crossfuse.workload.expression import CYCLES
from study.dataflow.movement import Machine, movement
from study.dataflow.schedules import kept, read_schedule
from study.dataflow.tiling import Tiling
from study.extract.chain import chain_from

SOFTMAX = (Reduced("most", "max", ("column",)), Reduced("total", "sum", ("column",)))
OWN, SHARED = Operand(2, batched=True), Operand(2)


def attention(batch: int, rows: int) -> Chain:
    mask = Further(("row", "column"), 4, rows // 8)
    layers = [
        Layer(10, (OWN,), 2, (mask,), SOFTMAX, CYCLES["exp"] + CYCLES["divide"]),
        Layer(6, (OWN,), 2),
    ]
    return assemble(rows, 4, SHARED, layers, batch=batch)


FUNCTIONS: dict[str, tuple[Any, Chain]] = {
    "attention": (kernels.attention(), attention(3, 8)),
    # Heads that share keys and values are rows of one matrix.
    "attention of groups": (kernels.attention(heads=6), attention(3, 16)),
    "attention with a late denominator": (
        kernels.late_denominator(),
        assemble(
            8,
            4,
            SHARED,
            [
                Layer(
                    10,
                    (SHARED,),
                    2,
                    (),
                    (Reduced("total", "sum", ("column",)),),
                    CYCLES["exp"],
                ),
                Layer(6, (SHARED,), 2, functions=CYCLES["divide"]),
            ],
        ),
    ),
    "a norm before the product": (
        kernels.normalised(),
        assemble(
            8,
            4,
            SHARED,
            [Layer(6, (SHARED,), 2, (Further(("summed",), 2),))],
            reduced=[Reduced("mean", "sum", ("summed",))],
        ),
    ),
    "weights with scales": (
        kernels.dequantised(),
        assemble(
            8,
            16,
            SHARED,
            [Layer(6, (Operand(1),), 2, (Further(("column", "summed"), 4, 8),))],
        ),
    ),
    "weights on the left": (kernels.from_the_right(), matrix_chain(8, [4, 10, 6])),
    "gate and up in one parameter": (
        kernels.joined_weights(),
        matrix_chain(8, [4, 10, 6], gated=True, functions=[CYCLES["sigmoid"]]),
    ),
    "groups of rows": (
        kernels.grouped(),
        matrix_chain(4, [4, 6], batch=3, batched_weights=True),
    ),
    **{
        f"convolutions of {name}": (
            kernels.convolutions(first),
            chain_of(parse("conv_chain:batch=2,H=5,W=7,IC=4,OC1=6,OC2=8,k1=3,dtype=float16")),
        )
        for name, first in (("NHWC", False), ("NCHW", True))
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_functions_compute(name: str) -> None:
    func, chain = FUNCTIONS[name]
    assert chain_from(func) == chain


def test_attention_is_read_but_not_analysed() -> None:
    chain = chain_from(kernels.attention())
    schedule, blocks = read_schedule("b m | n l k", chain), dict.fromkeys(chain.extents, 4)
    with pytest.raises(PlanRefused) as caught:
        movement(chain, schedule, Tiling(blocks, {}), kept(chain, schedule), Machine(2**20))
    assert "reduction 'most': found the max of C over n" in str(caught.value)


def test_split_and_reordered_loops_run_the_same_blocks() -> None:
    text = "gated_ffn:M=12,K=20,N=28,L=10,bias=first"
    schedule = tvm.s_tir.Schedule(prim_func(parse(text)))
    for name in ("gemm0_gate", "gemm1"):
        *_, row, column, summed = schedule.get_loops(schedule.get_sblock(name))
        outer, inner = schedule.split(column, [None, 4])  # 28 = 7 * 4; 10 leaves a tail
        schedule.reorder(outer, summed, row, inner)
    (func,) = schedule.mod.functions.values()
    assert chain_from(func) == chain_of(parse(text))
