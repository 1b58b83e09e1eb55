"""NaN and infinities through activations with bounds, by both checkers; the instruction."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from cpu.hopper.checkers import emulated
from cpu.lower.support import kernels_in
from crossfuse.emulate.llvm import run_sequential
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.parted_ffn import RegisterTiles, schedule_register_ffn
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.threads import schedule_ffn, schedule_split_k
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import check, parse, prim_func, random_inputs

RELU6 = "min(max(x,0),6)"
#: Workload, and how it is scheduled.
CASES = {
    "one product, boxes": (
        "gemm:M=64,N=64,K=64,dtype=bfloat16,weights=nk,act=relu",
        partial(schedule_tiled_gemm, tiles=TensorTiles()),
    ),
    "odd width": (
        f"gemm:M=67,N=37,K=72,dtype=float16,weights=nk,act={RELU6}",
        partial(schedule_tiled_gemm, tiles=TensorTiles()),
    ),
    "split": (
        "gemm:M=64,N=64,K=256,dtype=bfloat16,weights=nk,act=relu,residual=out",
        partial(schedule_tiled_gemm, tiles=TensorTiles(split=2)),
    ),
    "8-bit floats": (
        "gemm:M=64,N=40,K=128,dtype=e4m3,weights=nk,out=float32,act=relu",
        partial(schedule_tiled_gemm, tiles=TensorTiles()),
    ),
    "registers": (
        "gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16,act=relu",
        partial(schedule_register_ffn, tiles=RegisterTiles(64, 64, 1)),
    ),
    "one kernel": (
        "gemm_chain:M=64,K=64,N=128,L=64,dtype=float16,act=squared_relu",
        partial(schedule_tiled_ffn, staged=True),
    ),
    "gated": (
        f"gated_ffn:M=64,K=64,N=128,L=64,dtype=bfloat16,act={RELU6}",
        partial(schedule_tiled_ffn, staged=False),
    ),
    "threads, one product": (
        "gemm:M=16,K=64,N=32,dtype=float16,act=relu",
        partial(schedule_split_k, cluster=2),
    ),
    "threads, two products": (
        f"gemm_chain:M=16,K=64,N=64,L=32,dtype=bfloat16,act={RELU6}",
        partial(schedule_ffn, cluster=2),
    ),
}


def inputs_with_nan(spec: Any) -> dict[str, np.ndarray]:
    """Rows with a NaN, an infinity of each sign, and both; all else is finite."""
    inputs = random_inputs(spec)
    left = inputs["A"]
    if "e4m3" not in str(left.dtype):
        left[2, 5], left[3, 7] = np.inf, -np.inf
        left[4, 1], left[4, 2] = np.inf, -np.inf
    left[1, 3] = np.nan
    return inputs


@pytest.mark.parametrize("name", CASES)
def test_chains(name: str) -> None:
    """The value class of every element is that of float64, or of separate kernels."""
    text, schedule = CASES[name]
    spec = parse(text)
    inputs, scheduled = inputs_with_nan(spec), schedule(prim_func(spec))
    emulated(spec, lower(scheduled).image, inputs)
    sequential = run_sequential(scheduled, inputs)
    sequential.raise_if_wrong()
    check(spec, inputs, sequential.outputs["out"])
    assert np.isnan(sequential.outputs["out"][1].astype("float32")).all()
    assert not np.isnan(sequential.outputs["out"][0].astype("float32")).any()


def test_an_activation_has_one_instruction_for_each_element() -> None:
    """The maximum is an operand of the conversion, with which ptxas joins it."""
    spec = parse("gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16,act=relu")
    sch = schedule_register_ffn(prim_func(spec), tiles=RegisterTiles(64, 64, 1))
    text = lower(sch).image.cuda
    body = kernels_in(text)
    assert not re.search(r"\bmax\(", body)
    zero = r"0x0p\+0f/\*[^/]*\*/"
    one = rf"crossfuse_maximum\(accumulators_ptr\[\d+\], {zero}\)"
    assert re.search(rf"cvt_bf16x2_f32_rn_bf16x2_f32\(\w+\[\d+\], {one}, {one}\);", body)
    assert 'asm("max.NaN.f32 %0, %1, %2;"' in text
