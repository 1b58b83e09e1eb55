"""Kernels of the Hopper pipeline on a GPU: 100 equal runs, the numeric rule."""

from __future__ import annotations

from pathlib import Path

import pytest

import crossfuse
from crossfuse import _tvm as ir
from crossfuse import workload
from crossfuse.blocks.chain import read_product
from crossfuse.schedule.rules.parted_ffn import (
    ClusterTiles,
    RegisterTiles,
    schedule_clustered_ffn,
    schedule_register_ffn,
)
from crossfuse.schedule.rules.pipelined import bind_split
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from gpu.streams import replayed_on_two_streams
from gpu.test_cluster_kernels import run_repeatedly

GEMMS = {
    "tiles": ("M=512,N=512,K=512,dtype=bfloat16,weights=nk", {}),
    "float16, [k, n]": ("M=512,N=512,K=512,dtype=float16", {}),
    "tails": ("M=333,N=264,K=200,dtype=bfloat16", {}),
    "float32 output beyond the rows": (
        "M=192,N=16,K=64,dtype=bfloat16,out=float32,weights=nk",
        {"rows": 64, "cluster": 2},
    ),
    "three warpgroups": (
        "M=384,N=192,K=256,dtype=bfloat16,weights=nk",
        {"rows": 192, "columns": 96},
    ),
    "boxes of 64 and 8": ("M=333,N=200,K=256,dtype=bfloat16,weights=nk", {"columns": 72}),
    "boxes of 64, 16 and 8": ("M=4096,N=448,K=256,dtype=bfloat16,weights=nk", {"columns": 88}),
    "boxes of 16 and 8": ("M=100,N=48,K=256,dtype=float16,weights=nk", {"columns": 24}),
    "cluster of 4": ("M=1024,N=256,K=512,dtype=bfloat16,weights=nk", {"cluster": 4}),
    "e4m3": ("M=256,N=256,K=512,dtype=float8_e4m3fn,weights=nk,out=bfloat16", {}),
    "e5m2": ("M=256,N=256,K=512,dtype=float8_e5m2,weights=nk,out=bfloat16", {}),
    "split over 2": ("M=128,N=256,K=1024,dtype=bfloat16,weights=nk", {"split": 2}),
    "split over 4": ("M=64,N=256,K=1024,dtype=bfloat16,weights=nk", {"split": 4}),
    "split over 8": ("M=128,N=256,K=1024,dtype=float16,weights=nk", {"split": 8, "columns": 64}),
    "split over 16": ("M=64,N=256,K=2048,dtype=bfloat16,weights=nk", {"split": 16, "columns": 64}),
    "split, a few rows": ("M=16,N=256,K=1024,dtype=bfloat16,weights=nk", {"split": 4}),
    "split, 33 rows": ("M=33,N=256,K=1000,dtype=bfloat16,weights=nk", {"split": 4}),
    "split, one row": ("M=1,N=256,K=1024,dtype=bfloat16,weights=nk", {"split": 4, "columns": 64}),
}
#: Workload; rows, columns of the output's tiles, parts, and CTAs of a cluster that sums them.
REGISTERS = {
    "one part": ("gemm_chain:M=128,K=512,N=128,L=64,dtype=bfloat16,act=relu", (64, 64, 1, 1)),
    "wide": ("gemm_chain:M=256,K=512,N=256,L=256,dtype=float16", (128, 256, 1, 1)),
    "through L2": ("gated_ffn:M=100,K=416,N=512,L=256,dtype=bfloat16", (64, 64, 4, 1)),
    "cluster": ("gemm_chain:M=128,K=416,N=512,L=256,dtype=bfloat16,act=gelu", (64, 64, 8, 8)),
    "gated, two warpgroups": ("gated_ffn:M=128,K=512,N=512,L=256,dtype=bfloat16", (128, 128, 8, 8)),
    "one row": ("gated_ffn:M=1,K=512,N=512,L=256,dtype=bfloat16,weights=nk", (64, 64, 4, 4)),
    "33 rows": ("gated_ffn:M=33,K=512,N=512,L=256,dtype=bfloat16", (64, 64, 4, 4)),
    "parts beyond": (
        "gemm_chain:M=7,K=416,N=520,L=264,dtype=float16,weights=nk,act=gelu",
        (64, 96, 5, 5),
    ),
    "parts beyond, through L2": (
        "gemm_chain:M=100,K=416,N=520,L=264,dtype=bfloat16,act=gelu",
        (128, 96, 5, 1),
    ),
}
#: Rows, cluster size and parts.
CLUSTERS = {
    "1": ("gemm_chain:M=64,K=64,N=64,L=64,dtype=bfloat16,act=relu", (64, 1, 1)),
    "2": ("gemm_chain:M=128,K=256,N=256,L=128,dtype=bfloat16,act=gelu", (64, 2, 1)),
    "3": ("gated_ffn:M=64,K=128,N=192,L=72,dtype=float16", (64, 3, 1)),
    "4, two warpgroups": ("gated_ffn:M=128,K=136,N=384,L=256,dtype=bfloat16", (128, 4, 1)),
    "8": ("gemm_chain:M=100,K=416,N=512,L=256,dtype=bfloat16,act=relu", (64, 8, 1)),
    "16": ("gemm_chain:M=128,K=32,N=512,L=256,dtype=bfloat16", (64, 16, 1)),
    "one row": ("gated_ffn:M=1,K=64,N=512,L=128,dtype=bfloat16,weights=nk", (64, 8, 1)),
    "4, beyond": ("gated_ffn:M=33,K=416,N=1000,L=264,dtype=bfloat16,weights=nk", (64, 4, 3)),
    "4, two warpgroups, beyond": (
        "gemm_chain:M=127,K=136,N=264,L=72,dtype=float16,act=gelu",
        (128, 4, 1),
    ),
    "8, beyond": ("gemm_chain:M=100,K=416,N=520,L=264,dtype=bfloat16,act=gelu", (64, 8, 1)),
    "8, parts, beyond": ("gated_ffn:M=7,K=416,N=1032,L=264,dtype=float16", (64, 8, 2)),
    "2, parts": ("gemm_chain:M=100,K=64,N=768,L=96,dtype=bfloat16,act=relu", (64, 2, 3)),
    "8, parts": ("gemm_chain:M=128,K=768,N=3072,L=768,dtype=bfloat16,act=relu", (64, 8, 6)),
    "8, parts, two warpgroups": ("gated_ffn:M=128,K=512,N=2048,L=512,dtype=float16", (128, 8, 8)),
    "16, parts": ("gemm_chain:M=16,K=384,N=1536,L=384,dtype=bfloat16,act=gelu", (64, 16, 3)),
}
#: Tiles of the first phase.
FFNS = (
    "gated_ffn:M=128,K=512,N=1024,L=512,dtype=bfloat16",
    "gated_ffn:M=16,K=512,N=1024,L=512,dtype=float16",
    "gated_ffn:M=100,K=136,N=768,L=72,dtype=bfloat16",
    "gated_ffn:M=1,K=256,N=1024,L=256,dtype=bfloat16",
    "gated_ffn:M=49,K=128,N=520,L=264,dtype=bfloat16",
    "gemm_chain:M=128,K=768,N=3072,L=768,dtype=bfloat16,act=gelu",
    "gemm_chain:M=64,K=256,N=1024,L=256,dtype=float16,act=relu,weights=kn",
    "gated_ffn:M=256,K=512,N=2048,L=512,dtype=bfloat16",
    "gemm_chain:M=500,K=256,N=1024,L=264,dtype=float16,act=relu,weights=kn",
    "gated_ffn:M=3,K=256,N=1000,L=264,dtype=bfloat16",
    "gated_ffn:M=33,K=512,N=1032,L=1000,dtype=float16,weights=nk",
    "gemm_chain:M=7,K=256,N=1024,L=512,dtype=bfloat16,act=gelu",
    "gemm_chain:M=127,K=136,N=640,L=72,dtype=bfloat16,act=relu",
)
#: Two blocks of rows for each warpgroup.
TALL = (
    "gated_ffn:M=256,K=512,N=2048,L=512,dtype=bfloat16",
    "gated_ffn:M=200,K=256,N=1024,L=264,dtype=float16",
    "gemm_chain:M=256,K=256,N=1024,L=256,dtype=float16,act=relu,weights=kn",
    "gated_ffn:M=500,K=512,N=2048,L=512,dtype=bfloat16",
)
#: The suite, and images whose rows end within a tile, with windows of other extents.
CONVOLUTIONS = (
    *workload.ids("conv_chain"),
    "conv_chain:batch=2,H=5,W=7,IC=64,OC1=128,OC2=64,k1=3",
    "conv_chain:batch=3,H=9,W=1,IC=128,OC1=64,OC2=64,k1=5,dtype=float16,weights=kn",
    "conv_chain:batch=1,H=20,W=10,IC=256,OC1=256,OC2=128,k1=7",
)


@pytest.mark.parametrize("placement", ["dsm", "l2", "global"])
@pytest.mark.parametrize("text", CONVOLUTIONS)
def test_convolutions(text: str, placement: str, tmp_path: Path) -> None:
    spec = workload.resolve(text)
    run_repeatedly(crossfuse.compile(spec, placement=placement, directory=tmp_path), spec)


@pytest.mark.parametrize("name", GEMMS)
def test_product(name: str, tmp_path: Path) -> None:
    text, tiles = GEMMS[name]
    spec = workload.parse(f"gemm:{text}")
    schedule = schedule_tiled_gemm(workload.prim_func(spec), tiles=TensorTiles(**tiles))
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


def test_a_reduction_split_over_a_cluster_of_one(tmp_path: Path) -> None:
    """The CTA sends its sums to itself."""
    spec = workload.parse("gemm:M=64,N=256,K=512,dtype=bfloat16,weights=nk")
    schedule = ir.Schedule(workload.prim_func(spec))
    chain = read_product(schedule, "split over 1")
    tiles = TensorTiles(split=1).complete(schedule, chain)
    bind_split(schedule, chain.first[0], chain.epilogue, tiles)
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


@pytest.mark.parametrize("text", FFNS)
def test_two_kernels(text: str, tmp_path: Path) -> None:
    spec = workload.parse(text)
    tiles = TensorTiles(stacked=spec.M > 128)
    schedule = schedule_tiled_ffn(workload.prim_func(spec), first=tiles, staged=False)
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


@pytest.mark.parametrize("constant", [False, True], ids=["after", "early"])
@pytest.mark.parametrize("across", [1, 2])
@pytest.mark.parametrize("text", FFNS)
def test_one_persistent_kernel(text: str, across: int, constant: bool, tmp_path: Path) -> None:
    spec = workload.parse(text)
    tiles = TensorTiles(cluster=2 if across > 1 else 0, across=across, stacked=spec.M > 128)
    func = workload.prim_func(spec)
    schedule = schedule_tiled_ffn(func, first=tiles, constant_weights=constant)
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


@pytest.mark.parametrize("further", ["", ",scale=first+last,bias=first+last,residual=out"])
@pytest.mark.parametrize("text", TALL)
def test_tiles_of_256_rows(text: str, further: str, tmp_path: Path) -> None:
    spec = workload.parse(text + further)
    tiles = TensorTiles(rows=256, stacked=spec.M > 256)
    schedule = schedule_tiled_ffn(
        workload.prim_func(spec), first=tiles, second=TensorTiles(rows=256), constant_weights=True
    )
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


@pytest.mark.parametrize("columns", [24, 72, 88])
@pytest.mark.parametrize("text", FFNS[:3])
def test_staged_boxes(text: str, columns: int, tmp_path: Path) -> None:
    """Several widths, each with a map of its own; the last tile reaches beyond the tensor."""
    spec = workload.parse(text)
    schedule = schedule_tiled_ffn(workload.prim_func(spec), first=TensorTiles(columns=columns))
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


@pytest.mark.parametrize("constant", [False, True], ids=["after", "early"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_intermediate_in_the_cluster(name: str, constant: bool, tmp_path: Path) -> None:
    text, tiles = CLUSTERS[name]
    spec = workload.parse(text)
    schedule = schedule_clustered_ffn(
        workload.prim_func(spec), tiles=ClusterTiles(*tiles), constant_weights=constant
    )
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


@pytest.mark.parametrize("constant", [False, True], ids=["after", "early"])
@pytest.mark.parametrize("name", REGISTERS)
def test_intermediate_in_registers(name: str, constant: bool, tmp_path: Path) -> None:
    text, tiles = REGISTERS[name]
    spec = workload.parse(text)
    schedule = schedule_register_ffn(
        workload.prim_func(spec), tiles=RegisterTiles(*tiles), constant_weights=constant
    )
    run_repeatedly(crossfuse.compile(schedule, directory=tmp_path), spec)


@pytest.mark.parametrize("placement", ["l2", "dsm"])
def test_a_thousand_launches_are_equal(placement: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kernel = crossfuse.compile("S8", placement=placement, directory=tmp_path).kernel
    shapes = [each.shape for each in kernel.buffers if not each.output]
    given = [torch.randn(each, device="cuda").to(torch.bfloat16) / 16 for each in shapes]
    first = kernel.run(*given)
    output = torch.empty_like(first)
    for _ in range(1000):
        output.fill_(float("nan"))
        kernel(*given, output)
        assert torch.equal(output, first)


@pytest.mark.parametrize(
    ("placement", "constant"),
    [("global", False), ("l2", False), ("l2", True), ("dsm", True), ("registers", True)],
    ids=["two kernels", "persistent", "persistent, early", "cluster, early", "registers, early"],
)
def test_graphs_on_two_streams(placement: str, constant: bool, tmp_path: Path) -> None:
    """Each graph has a workspace and flags of its own; a third stream keeps the GPU busy."""
    torch = pytest.importorskip("torch")
    options = {"placement": placement, "constant_weights": constant}
    compiled = crossfuse.compile(FFNS[0], directory=tmp_path, **options)
    assert all(torch.equal(*each) for each in replayed_on_two_streams(compiled.kernel))
