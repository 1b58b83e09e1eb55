"""What rules count with is what plans count with: extents, types, and bytes besides operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm.script import tirx as T

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_chain, read_last_product
from crossfuse.errors import ScheduleRefused
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.kernels.shape import shape_of, shape_of_blocks
from crossfuse.workload import parse, prim_func

FURTHER = "scale=first+last,bias=first+last"


@pytest.mark.parametrize(
    "text",
    [
        "gemm:M=64,N=96,K=64,dtype=bfloat16",
        "gemm:M=64,N=96,K=64,dtype=bfloat16,scale=last,bias=last,residual=out",
        "gemm:M=64,N=40,K=128,dtype=e4m3,weights=nk,out=float32,residual=in,bias=last",
        "gemm_chain:M=33,K=72,N=256,L=80,dtype=bfloat16,out=float32,act=gelu,residual=out",
        f"gated_ffn:M=100,K=72,N=256,L=80,dtype=float16,weights=kn,{FURTHER},residual=in",
        "conv_chain:batch=1,H=8,W=8,IC=64,OC1=64,OC2=64,k1=3,k2=1,dtype=bfloat16",
    ],
)
def test_functions_have_the_shapes_of_their_specs(text: str) -> None:
    spec = parse(text)
    func, stored = prim_func(spec), spec.weights == "nk"
    found = shape_of_blocks(read_chain(ir.Schedule(func)))
    assert found == shape_of(chain_of(spec), k_major=stored)
    assert bool(found.further) == ("residual" in text)


@T.prim_func(s_tir=True)
def without_output(a: T.Buffer((16,), "float32")):
    kept = T.sblock_alloc_buffer((16,))
    for i in range(16):
        with T.sblock("keep"):
            vi = T.axis.spatial(16, i)
            kept[vi] = a[vi]


@pytest.mark.parametrize("read", [read_chain, read_last_product])
def test_a_function_without_output_is_refused(read: Callable[[Any], Any]) -> None:
    with pytest.raises(ScheduleRefused, match="block 'root': found 0 outputs"):
        read(ir.Schedule(without_output))
