"""Partial tiles that TMA adds, on a GPU: each run is judged by the numeric rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import crossfuse
from cpu.hopper.accumulation import scheduled_by
from crossfuse import workload
from crossfuse.schedule.rules.parted_tiles import ClusterTiles, RegisterTiles
from crossfuse.workload.tolerances import judge, tolerance
from gpu.streams import replayed_on_two_streams
from gpu.test_cluster_kernels import REPEATS, run_repeatedly

#: Rows, cluster size and parts; or rows, columns and parts.
CASES: dict[str, tuple[str, ClusterTiles | RegisterTiles]] = {
    "2, parts": (
        "gemm_chain:M=100,K=64,N=768,L=96,dtype=bfloat16,act=relu",
        ClusterTiles(64, 2, 3),
    ),
    "one row": ("gated_ffn:M=1,K=64,N=1024,L=128,dtype=float16,weights=nk", ClusterTiles(64, 4, 4)),
    "G4": ("gemm_chain:M=128,K=768,N=3072,L=768,dtype=bfloat16,act=relu", ClusterTiles(64, 8, 6)),
    "8, two warpgroups": (
        "gated_ffn:M=128,K=512,N=2048,L=512,dtype=float16",
        ClusterTiles(128, 8, 8),
    ),
    "16": ("gemm_chain:M=16,K=384,N=1536,L=384,dtype=bfloat16,act=gelu", ClusterTiles(64, 16, 3)),
    "bias and residual": (
        "gemm_chain:M=36,K=64,N=384,L=80,dtype=bfloat16,bias=last,residual=out",
        ClusterTiles(64, 2, 3),
    ),
    "registers": (
        "gated_ffn:M=100,K=416,N=512,L=256,dtype=bfloat16",
        RegisterTiles(64, 64, 4, 1),
    ),
}


def compiled(
    text: str, tiles: ClusterTiles | RegisterTiles, constant: bool, directory: Path
) -> crossfuse.Compiled:
    options = {"unordered": True, "constant_weights": constant}
    schedule = scheduled_by(workload.parse(text), tiles, **options)
    return crossfuse.compile(schedule, directory=directory)


def judge_repeatedly(kernel: Any, spec: workload.WorkloadSpec) -> None:
    """As `run_repeatedly`, but sums in no order need not be equal from run to run."""
    inputs = workload.random_inputs(spec, 1)
    limits = tolerance(spec, inputs)
    for _ in range(REPEATS):
        judge(limits, kernel.run(*inputs.values()), str(spec))
    for name, case in workload.adversarial_inputs(spec):
        # Sums below 2^-126, which bfloat16 has too, are flushed to zero.
        if name != "denormal" or spec.dtype == "float16":
            assert workload.check(spec, case, kernel.run(*case.values())).worst <= 1, name


@pytest.mark.parametrize("constant", [False, True], ids=["after", "early"])
@pytest.mark.parametrize("name", CASES)
def test_sums_in_no_order(name: str, constant: bool, tmp_path: Path) -> None:
    text, tiles = CASES[name]
    judge_repeatedly(compiled(text, tiles, constant, tmp_path).kernel, workload.parse(text))


def test_two_parts_have_one_sum(tmp_path: Path) -> None:
    """Zero plus a plus b is zero plus b plus a; outputs of float16 are no flushed sums."""
    text = "gemm_chain:M=100,K=64,N=512,L=128,dtype=float16,act=relu"
    run_repeatedly(compiled(text, ClusterTiles(64, 4, 2), True, tmp_path), workload.parse(text))


def test_launches_that_overlap_find_zeros(tmp_path: Path) -> None:
    """Early launches of one stream, none waited for: an addition too early stays in the sums."""
    torch = pytest.importorskip("torch")
    text = CASES["G4"][0]
    kernel = compiled(text, CASES["G4"][1], True, tmp_path).kernel
    spec = workload.parse(text)
    inputs = workload.random_inputs(spec, 2)
    limits = tolerance(spec, inputs)
    given = [torch.from_numpy(each.view("int16")).cuda() for each in inputs.values()]
    given = [each.view(torch.bfloat16) for each in given]
    outputs = [torch.empty(spec.output, dtype=torch.bfloat16, device="cuda") for _ in range(200)]
    for output in outputs:
        kernel(*given, output)
    torch.cuda.synchronize()
    kind = next(iter(inputs.values())).dtype
    for output in (*outputs[:5], *outputs[::20], outputs[-1]):
        judge(limits, output.view(torch.int16).cpu().numpy().view(kind), text)


def test_graphs_on_two_streams(tmp_path: Path) -> None:
    """Each launch of a graph has sums of its own, zero again when the graph is replayed."""
    torch = pytest.importorskip("torch")
    kernel = compiled(*CASES["G4"], True, tmp_path).kernel
    for found, wanted in replayed_on_two_streams(kernel):
        assert torch.allclose(found, wanted, rtol=2**-7, atol=float(wanted.abs().max()) * 2**-8)


def test_check_judges_all_runs(tmp_path: Path) -> None:
    made = compiled(*CASES["2, parts"], False, tmp_path)
    assert [each.status for each in crossfuse.check(made)] == ["passed"] * 4
