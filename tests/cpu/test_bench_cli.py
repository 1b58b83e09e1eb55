"""Variants of the bench that compile: our kernels, as one function and apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossfuse.bench import variants
from crossfuse.workload import parse

pytest.importorskip("torch")


@pytest.mark.slow
def test_our_variant_has_a_kernel_of_clusters_for_each_product() -> None:
    made = variants.make("ours-global", parse("gated_ffn:M=16,K=64,N=128,L=64"), "cpu")
    assert "cluster" in made.note
    assert made.note.count("grid") == 2
    assert made.note.count("registers, no spills") == 2
    assert [usage.complaints for usage in made.resources] == [(), ()]


@pytest.mark.parametrize(
    "further",
    [
        pytest.param("", marks=pytest.mark.nightly),
        ",bias=first+last,scale=last,residual=out",
    ],
)
@pytest.mark.parametrize("kind", ["gated_ffn", "gemm_chain"])
def test_unfused_variant_is_a_kernel_a_product(
    kind: str, further: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each kernel is made for, and that together they compute the workload."""
    import torch

    from crossfuse.bench.problem import make_problem
    from crossfuse.runtime.tensors import to_torch

    spec = parse(f"{kind}:M=16,K=64,N=128,L=32{further}")
    compile_kernel, made = variants._kernel, []

    def emulated(part, device):
        made.append(part)
        call = variants.eager(part, together=True).call
        kernel = compile_kernel(part, device)
        return replace(kernel, call=call)

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
