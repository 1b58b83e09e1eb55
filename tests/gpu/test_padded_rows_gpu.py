"""Kernels on padded copies of their inputs on a GPU: equal runs, the numeric rule."""

from __future__ import annotations

from pathlib import Path

import pytest

import crossfuse
from crossfuse import workload
from gpu.test_cluster_kernels import run_repeatedly

SPECS = [
    "gemm_chain:M=128,K=65,N=131,L=65,dtype=float16,act=gelu,weights=nk,bias=first+last",
    "gemm_chain:M=512,K=1001,N=3003,L=1001,dtype=bfloat16,act=relu",
    # The first weights only lack rows: no copy of them is made.
    "gated_ffn:M=33,K=512,N=1003,L=256,dtype=bfloat16",
    "gemm:M=70,K=129,N=45,dtype=float16,bias=last",
]


@pytest.mark.parametrize("text", SPECS)
def test_rows_that_are_no_multiple_of_16_bytes(text: str, tmp_path: Path) -> None:
    compiled = crossfuse.compile(text, rule="tensor", directory=tmp_path)
    run_repeatedly(compiled, workload.parse(text))
