"""Kernels that are compiled before jobs are timed."""

from __future__ import annotations

import pytest

from crossfuse.bench import plan as run
from crossfuse.bench.job import Job, Planned
from crossfuse.bench.plan import plan, setting
from crossfuse.bench.variants import kernels
from crossfuse.workload import WorkloadSpec, parse
from crossfuse.workload.cascades import parse as parse_cascade

GATED = "gated_ffn:M=16,K=64,N=128,L=64,dtype=bfloat16"


def planned(*variants: str) -> tuple[Planned, ...]:
    return tuple(plan([GATED], "", setting(",".join(variants), "cold,hot", "graph", 1, 1)))


def test_each_kernel_is_named_once() -> None:
    found = run.distinct(each.job for each in planned("ours", "ours-l2", "unfused", "eager"))
    assert [(spec.kind, spec.act, placement) for spec, placement in found] == [
        ("gated_ffn", "silu", None),
        ("gated_ffn", "silu", "l2"),
        ("gemm", "silu", None),
        ("gemm", "identity", None),
        ("gemm", "identity", None),
    ]
    up, down = (spec for spec, _ in found[-2:])
    assert (up.K, up.N) == (64, 128)
    assert (down.K, down.N) == (128, 64)


def test_a_cascade_has_places_of_its_states() -> None:
    how = setting("ours,ours-two-kernels,ours-dsm,ours-l2,eager", "cold", "graph", 1, 1)
    jobs = [each.job for each in plan(["R3:batch=1"], "", how)]
    assert [each.variant for each in jobs][:2] == ["ours", "ours-global"]
    assert [placement for _, placement in run.distinct(jobs)] == [None, "global", "dsm"]


def test_a_norm_and_an_ffn_are_two_kernels_apart() -> None:
    spec = parse_cascade("layernorm_ffn:tokens=4,K=32,N=64,gated=false,act=gelu")
    norm, chain = (each for each, _ in kernels("unfused", spec))
    assert str(norm) == "layernorm:rows=4,cols=32"
    assert isinstance(chain, WorkloadSpec)
    assert (chain.M, chain.K, chain.N, chain.L) == (4, 32, 64, 32)
    assert (chain.kind, chain.act, chain.residual) == ("gemm_chain", "gelu", "out")
    assert kernels("ours", spec) == ((spec, None),)


@pytest.mark.parametrize("variant", ["ours-l2", "unfused", "eager"])
def test_a_single_product_has_no_placement_and_no_parts(variant: str) -> None:
    assert kernels(variant, parse("gemm:M=4,K=32,N=64")) == ()


def test_nothing_is_started_for_one_kernel_or_without_workers() -> None:
    assert run.build_ahead(planned("ours"), 4, "nvidia-h100", 10) == 0
    assert run.build_ahead(planned("ours", "ours-l2"), 0, "nvidia-h100", 10) == 0


def test_what_cannot_be_compiled_is_left_to_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(run, "compile_kernel", refuse)
    ((spec, placement), *_) = run.distinct([Job(GATED, "ours")])
    assert not run._build(spec, placement, "nvidia-h100")
