"""Every kernel family on a GPU: all cluster sizes, 100 equal runs, the numeric rule."""

from __future__ import annotations

from pathlib import Path

import pytest

import crossfuse
from crossfuse import workload
from crossfuse.schedule.rules.threads import schedule_ffn, schedule_split_k

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
REPEATS = 100


def divisible(cluster: int) -> int:
    """A width that the cluster size divides."""
    return 840 if cluster in (3, 5, 6, 7) else 512


def run_repeatedly(compiled: crossfuse.Compiled, spec: workload.WorkloadSpec) -> None:
    inputs = workload.random_inputs(spec, 1)
    first = compiled.kernel.run(*inputs.values())
    workload.check(spec, inputs, first)
    for _ in range(REPEATS - 1):
        assert compiled.kernel.run(*inputs.values()).tobytes() == first.tobytes()
    for name, case in dict(workload.adversarial_inputs(spec)).items():
        assert workload.check(spec, case, compiled.kernel.run(*case.values())).worst <= 1, name


@pytest.mark.parametrize("cluster", SIZES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("kind", ["gated_ffn", "gemm_chain"])
def test_chain(kind: str, ring: bool, dtype: str, cluster: int, tmp_path: Path) -> None:
    wide = divisible(cluster)
    spec = workload.parse(f"{kind}:M=33,K=96,N={wide},L={wide},dtype={dtype},act=silu")
    schedule = schedule_ffn(workload.prim_func(spec), cluster=cluster, ring=ring)
    compiled = crossfuse.compile(schedule, directory=tmp_path)
    run_repeatedly(compiled, spec)


@pytest.mark.parametrize("cluster", SIZES)
@pytest.mark.parametrize("combine", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("scatter", [True, False])
def test_split_k(scatter: bool, combine: str, cluster: int, tmp_path: Path) -> None:
    spec = workload.parse(f"gemm:M=64,K=840,N=64,dtype=float32,combine={combine}")
    if 840 % cluster:
        spec = workload.parse(f"gemm:M=64,K=1024,N=64,dtype=float32,combine={combine}")
    schedule = schedule_split_k(workload.prim_func(spec), cluster=cluster, scatter=scatter)
    compiled = crossfuse.compile(schedule, directory=tmp_path)
    run_repeatedly(compiled, spec)


def test_torch_module_on_its_stream(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = workload.gated_ffn_module(256, 512, "bfloat16")
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    compiled = crossfuse.compile(module, example_inputs=(x,), directory=tmp_path)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        got = compiled(x.cuda())
        due = module.cuda()(x.cuda())
    stream.synchronize()
    assert torch.allclose(got, due, rtol=0.02, atol=0.02)


def test_check_includes_the_gpu(tmp_path: Path) -> None:
    compiled = crossfuse.compile("gemm:M=16,K=64,N=32,dtype=float16", directory=tmp_path)
    assert [each.status for each in crossfuse.check(compiled)] == ["passed"] * 4
