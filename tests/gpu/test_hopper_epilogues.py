"""Scales, biases and residuals on a GPU: 100 equal runs, and kernels right after one another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import crossfuse
from crossfuse import workload
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from gpu.test_cluster_kernels import run_repeatedly

ONE = "scale=last,bias=last,residual=out"
BOTH = "scale=first+last,bias=first+last,residual=out"
PRODUCTS = {
    "several tiles": ("M=512,N=768,K=256,dtype=bfloat16,weights=nk,act=gelu", {}),
    "tails": ("M=333,N=264,K=200,dtype=bfloat16", {}),
    "pairs": ("M=333,N=262,K=200,dtype=float16,weights=nk", {}),
    "odd width": ("M=333,N=263,K=200,dtype=bfloat16,weights=nk", {}),
    "float32": ("M=333,N=264,K=200,dtype=bfloat16,weights=nk,out=float32", {}),
    "three warpgroups": (
        "M=384,N=192,K=256,dtype=bfloat16,weights=nk",
        {"rows": 192, "columns": 96},
    ),
    "e4m3": ("M=256,N=256,K=512,dtype=float8_e4m3fn,weights=nk,out=bfloat16", {}),
    "split over 4": ("M=64,N=256,K=1024,dtype=bfloat16,weights=nk", {"split": 4}),
    "split, one row": ("M=1,N=256,K=1024,dtype=bfloat16,weights=nk", {"split": 4, "columns": 64}),
}
CHAINS = (
    "gated_ffn:M=128,K=512,N=1024,L=512,dtype=bfloat16",
    "gated_ffn:M=100,K=136,N=768,L=128,dtype=float16",
    "gemm_chain:M=1,K=256,N=1024,L=256,dtype=bfloat16,act=gelu,weights=nk,out=float32",
)


@pytest.mark.parametrize("constant", [False, True], ids=["after", "early"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str, constant: bool, tmp_path: Path) -> None:
    text, tiles = PRODUCTS[name]
    spec = workload.parse(f"gemm:{text},{ONE}")
    chosen = TensorTiles(**tiles)
    schedule = schedule_tiled_gemm(
        workload.prim_func(spec), tiles=chosen, constant_weights=constant
    )
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


@pytest.mark.parametrize("placement", ["dsm", "l2", "global"])
@pytest.mark.parametrize("text", CHAINS)
def test_chain(text: str, placement: str, tmp_path: Path) -> None:
    spec = workload.parse(f"{text},{BOTH}")
    run_repeatedly(crossfuse.compile(spec, placement=placement, directory=tmp_path), spec)


@pytest.mark.parametrize("placement", [None, "dsm", "l2", "global"])
def test_the_residual_may_be_what_the_kernel_before_writes(
    placement: str | None, tmp_path: Path
) -> None:
    """Each kernel starts early and adds to what the one before it writes."""
    torch = pytest.importorskip("torch")
    text = "gemm:M=128,N=512,K=512" if placement is None else CHAINS[0]
    further = "bias=last,residual=out"
    place = placement or "auto"
    kernel = crossfuse.compile(f"{text},{further}", placement=place, directory=tmp_path).kernel
    names = [each.name for each in kernel.buffers if not each.output]
    shapes = [each.shape for each in kernel.buffers if not each.output]
    given = {
        name: torch.randn(shape, device="cuda").to(torch.bfloat16) / 16
        for name, shape in zip(names, shapes, strict=True)
    }
    start = given.pop("residual")
    assert names[-1] == "residual"

    def chain(ends: list[torch.Tensor], wait: bool) -> None:
        for turn in range(20):
            kernel(*given.values(), ends[turn % 2], ends[1 - turn % 2])
            if wait:
                torch.cuda.synchronize()

    due = [start.clone(), torch.empty_like(start)]
    chain(due, wait=True)
    ends = [start.clone(), torch.empty_like(start)]
    chain(ends, wait=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(ends, wait=False)
    for _ in range(50):
        ends[0].copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(ends[0], due[0])


@pytest.mark.parametrize("rule", ["threads", "auto"])
@pytest.mark.parametrize("act", ["relu", "min(max(x,0),6)"])
def test_bounds_keep_nan(act: str, rule: str, tmp_path: Path) -> None:
    spec = workload.parse(f"gemm_chain:M=64,K=256,N=512,L=256,dtype=bfloat16,act={act}")
    inputs = workload.random_inputs(spec, 1)
    inputs["A"][1, 3], inputs["A"][2, 5], inputs["A"][3, 7] = np.nan, np.inf, -np.inf
    found = crossfuse.compile(spec, rule=rule, directory=tmp_path).kernel.run(*inputs.values())
    workload.check(spec, inputs, found)
    assert np.isnan(found[1].astype("float32")).all()
    assert not np.isnan(found[0].astype("float32")).any()
