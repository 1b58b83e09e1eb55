"""Variants of the bench that compile: our kernels, as one function and apart."""

from __future__ import annotations

import pytest

from crossfuse.bench import variants
from crossfuse.workload import parse

pytest.importorskip("torch")


def test_our_variant_has_a_kernel_of_clusters_for_each_product() -> None:
    made = variants.make("ours", parse("gated_ffn:M=16,K=64,N=128,L=64"), "cpu")
    assert "cluster" in made.note
    assert made.note.count("grid") == 2


@pytest.mark.parametrize("kind", ["gated_ffn", "gemm_chain"])
def test_unfused_variant_is_a_kernel_a_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each kernel is made for, and that together they compute the workload."""
    import torch

    from crossfuse.bench.problem import make_problem
    from crossfuse.compiler.weights import to_torch

    spec = parse(f"{kind}:M=16,K=64,N=128,L=32")
    compile_kernel, made = variants._kernel, []

    def emulated(part, device):
        _, output, note = compile_kernel(part, device)
        made.append(part)
        plain = variants.eager(part, together=True)
        return lambda *tensors: tensors[-1].copy_(plain.call(*tensors[:-1])), output, note

    monkeypatch.setattr(variants, "_kernel", emulated)
    variant = variants.make("unfused", spec, "cpu")
    assert [each.act for each in made[:2]] == [spec.act, "identity"]
    assert len(made) == (3 if spec.gated else 2)
    assert variant.note.count("grid") >= 2
    problem = make_problem(spec)
    a, *weights = (to_torch(array) for array in problem.inputs.values())
    packed = variant.pack(dict(zip(list(problem.inputs)[1:], weights, strict=True)))
    with torch.no_grad():
        worst, message = problem.judge(variant.call(a, *packed))
    assert message == ""
    assert worst is not None
    assert worst <= 1
