"""The zoo through torch.compile and through Relax: which networks are fused, what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import crossfuse  # noqa: E402
from crossfuse.bench.models import tolerance  # noqa: E402
from crossfuse.bench.problem import judged  # noqa: E402
from crossfuse.models import build, parse  # noqa: E402
from crossfuse.models.zoo import Built  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
night = pytest.mark.nightly
#: How often each model calls a kernel of each kind, by its feed-forward networks.
GATED, PLAIN = "crossfuse_gated_ffn", "crossfuse_gemm_chain"
#: Of at most 16 and 8 tokens; cases of a night tell of chains alone.
ATTENTION, TOGETHER = "crossfuse_cascade_", "crossfuse_gemms"
CASES = [
    (
        "llama-3.2-1b,layers=1,tokens=1,cache=16,reduce=16",
        ["crossfuse_gemm", "crossfuse_gemm", TOGETHER, "crossfuse_gated_gemm", ATTENTION],
    ),
    (
        "gpt2-small,layers=1,tokens=8,reduce=12,dtype=float16,head=true",
        [PLAIN, TOGETHER, ATTENTION],
    ),
    pytest.param("llama-3.2-1b,layers=2,tokens=16,reduce=8", [GATED] * 2, marks=night),
    pytest.param("llama-3-8b,layers=1,tokens=4,batch=2,cache=8,reduce=16", [GATED], marks=night),
    pytest.param("llama-3-8b,layers=3,tokens=16,reduce=16,part=mlp", [GATED] * 3, marks=night),
    pytest.param("bert-base,layers=2,tokens=16,reduce=6,head=true", [PLAIN] * 2, marks=night),
    pytest.param("gpt2-small,layers=2,tokens=4,cache=8,reduce=12", [PLAIN] * 2, marks=night),
    pytest.param("qwen-moe,layers=2,tokens=8,reduce=16", [GATED] * 2, marks=night),
    pytest.param("resnet-small,layers=1,tokens=8,reduce=4,dtype=float16", [], marks=night),
]
#: Classes of another package, where it is installed.
OTHERS = [
    pytest.param(f"{name},layers=1,tokens=16,reduce={by},source=transformers", [kind], marks=night)
    for name, by, kind in [
        ("llama-3.2-1b", 16, GATED),
        ("bert-base", 12, PLAIN),
        ("gpt2-small", 12, PLAIN),
    ]
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def check(built: Built, got: Any) -> None:
    worst, message = judged(tolerance(built), got, str(built.spec))
    assert worst is not None, message


def kinds(names: tuple[str, ...]) -> list[str]:
    """Kernels without the numbers that tell those of one kind apart."""
    return [each.rstrip("0123456789") for each in names]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "fused"), CASES)
def test_torch_compile(text: str, fused: list[str]) -> None:
    built = build(parse(f"model:{text}"))
    backend = Backend(rest="eager", always=True, cpu="llvm")
    with torch.no_grad():
        check(built, torch.compile(built.module, backend=backend)(*built.inputs))
    found = kinds(reports()[-1].fused)
    if ATTENTION not in fused:
        found = [each for each in found if each in (GATED, PLAIN)]
    assert reports()[-1].reason == "" and found == fused
    assert all(each.name or each.text for each in reports()[-1].outcomes)


@pytest.mark.parametrize(("text", "fused"), OTHERS)
def test_classes_of_transformers(text: str, fused: list[str]) -> None:
    pytest.importorskip("transformers", reason="the extra 'models' is not installed")
    test_torch_compile(text, fused)


RELAX = [
    ("llama-3.2-1b,layers=1,tokens=16,reduce=16", [GATED], ["mean", "softmax_max", "mean", "mean"]),
    ("gpt2-small,layers=1,tokens=8,reduce=12,dtype=float16", [PLAIN], None),
    ("bert-base,layers=1,tokens=8,reduce=12", [PLAIN], None),
    ("llama-3-8b,layers=1,tokens=4,cache=8,reduce=32", [GATED], None),
    ("qwen-moe,layers=1,tokens=8,reduce=16", [GATED], None),
    ("resnet-small,layers=1,tokens=8,reduce=8,dtype=float32", [], None),
]


@night
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("text", "chains", "cascades"), RELAX)
def test_relax(text: str, chains: list[str], cascades: list[str] | None) -> None:
    built = build(parse(f"model:{text}"))
    fn = crossfuse.compile_model(built.module, built.inputs, always=True, runs_on="llvm")
    check(built, fn(*built.inputs))
    found = kinds(fn.report.fused)
    assert found[: len(chains)] == chains
    if cascades is not None:
        assert found[len(chains) :] == [f"fused_{each}" for each in cascades]
    assert all(each.reason for each in fn.report.cascades)


def test_a_model_of_transformers_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = parse("model:gpt2-small,layers=1,reduce=12,source=transformers")
    with pytest.raises(
        crossfuse.RefusedError, match="found no such package; limit: transformers 5"
    ):
        build(spec)
    head = parse("model:gpt2-small,layers=1,reduce=12,source=transformers,head=true")
    with pytest.raises(crossfuse.RefusedError, match="limit: rows in and out, no cache"):
        build(head)
