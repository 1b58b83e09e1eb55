"""What the variants of our own ask of the compiler, with a compiler that is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from crossfuse import compiler
from crossfuse.bench import variants, worker
from crossfuse.bench.job import OF_MODELS, OWN
from crossfuse.errors import LoweringRefused, ScheduleRefused, WorkloadRefused, refuse
from crossfuse.measure.job import Job, Request
from crossfuse.runtime.manifest import ResourceUsage
from crossfuse.workload import parse

torch = pytest.importorskip("torch")

CHAIN = "gemm_chain:M=4,K=32,N=64,L=16"
GATED = "gated_ffn:M=8,K=64,N=96,L=32"
USAGE = ResourceUsage("main_0", 168, 0, 0, 0, 0, 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of each call of a compiler whose kernels do nothing."""
    calls: list[dict[str, Any]] = []
    launches = [
        SimpleNamespace(symbol="main_0", grid=(30, 1, 1), cluster=(4, 1, 1)),
        SimpleNamespace(symbol="main_1", grid=(2, 1, 1), cluster=(1, 1, 1)),
    ]

    def fake(spec: object, **options: Any) -> SimpleNamespace:
        calls.append({"spec": str(spec), **options})
        manifest = SimpleNamespace(launches=launches, resources=(USAGE,))
        return SimpleNamespace(kernel=SimpleNamespace(manifest=manifest))

    monkeypatch.setitem(vars(compiler), "compile", fake)
    return calls


@pytest.mark.parametrize("name", [each for each in OWN if each not in OF_MODELS])
def test_placement_is_passed_on_where_the_variant_names_one(
    asked: list[dict[str, Any]], name: str
) -> None:
    variants.make(name, parse(CHAIN), "cpu")
    (options,) = asked
    assert "rule" not in options and "constant_weights" not in options
    assert options["target"] in ("nvidia-h100", "nvidia-h200")
    if name == "ours":
        assert "placement" not in options
    else:
        assert options["placement"] == name.removeprefix("ours-")


def test_note_has_launches_and_what_ptxas_said(asked: list[dict[str, Any]]) -> None:
    made = variants.make("ours", parse(CHAIN), "cpu")
    assert made.note == (
        "main_0 grid 30x1x1 cluster 4x1x1 (168 registers, no spills), "
        "main_1 grid 2x1x1 cluster 1x1x1"
    )
    assert made.resources == (USAGE,)


def test_separate_kernels_are_single_products(asked: list[dict[str, Any]]) -> None:
    made = variants.make("unfused", parse(GATED), "cpu")
    assert [each["spec"].partition(":")[0] for each in asked] == ["gemm"] * 3
    assert all("placement" not in each for each in asked)
    assert len(made.resources) == 3


def test_separate_kernels_of_gate_and_up(asked: list[dict[str, Any]]) -> None:
    variants.make("unfused", parse("gated_gemm:M=8,K=64,N=96,bias=last"), "cpu")
    due = "gemm:M=8,K=64,N=96,dtype=bfloat16,act=silu,weights=nk,bias=last"
    assert [each["spec"] for each in asked] == [due, due.replace(",act=silu", "")]
    with pytest.raises(WorkloadRefused, match="limit: a residual behind a product"):
        variants.make("unfused", parse("gated_gemm:M=8,K=64,N=96,residual=in"), "cpu")


@pytest.mark.parametrize("family", [ScheduleRefused, LoweringRefused])
def test_refused_placement_is_a_row(
    monkeypatch: pytest.MonkeyPatch, family: type[ScheduleRefused]
) -> None:
    def refuses(spec: object, **options: Any) -> None:
        found = f"placement {options['placement']}"
        raise refuse(family, "compile", "chain", found=found, limit="l2", instead="take l2")

    variants.compile_kernel.cache_clear()
    monkeypatch.setitem(vars(compiler), "compile", refuses)
    found = worker.Session("cpu").answer(Request(Job(CHAIN, "ours-global")))
    assert found.status == "refused"
    assert "found placement global" in found.message
