"""Cascades of reductions on the GPU: right on all kinds of inputs, and the same bits every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import crossfuse
from crossfuse.runtime.tensors import to_numpy, to_torch
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascades import resolve

torch = pytest.importorskip("torch")

REPEATS = 100
SPECS = [
    "softmax:rows=33,cols=4099",
    "softmax:rows=4,cols=262144",
    "softmax:rows=3,cols=253696",  # the last CTAs of clusters have fewer vectors
    "layernorm:rows=10,cols=28288",
    "softmax:rows=1000,cols=100,dtype=float32",
    "cross_entropy:rows=17,cols=32001",
    "layernorm:rows=64,cols=8192",
    "log_softmax:rows=80,cols=131080",
    "rmsnorm:rows=40,cols=262144,residual=true",
    "layernorm:rows=150,cols=65536,residual=true",
    "layernorm:rows=3,cols=17,dtype=float16",
    "variance:rows=2,cols=1048576",
    "moment_of_inertia:bodies=3,points=65537",
    "attention:batch=2,heads=4,q_len=300,kv_len=500,head_dim=64,kv_heads=2,causal=true",
    "attention:batch=1,heads=2,q_len=512,kv_len=512,head_dim=128,causal=true",
    "attention:batch=1,heads=2,q_len=200,kv_len=333,head_dim=128,dtype=float16",
    "attention:batch=1,heads=2,q_len=200,kv_len=333,head_dim=256",
    "attention:batch=1,heads=2,q_len=200,kv_len=333,head_dim=512,causal=true",
    "mla_decode:batch=70,q_heads=128,kv_len=501,latent_dim=512,rope_dim=64",
    "mla_decode:batch=3,q_heads=37,kv_len=333,latent_dim=512,rope_dim=64",
    "mla_decode:batch=2,q_heads=128,kv_len=333,latent_dim=128,rope_dim=32",
    "rmsnorm_gemm:tokens=257,K=4096,N=1000",
    "quant_gemm:tokens=300,K=1040,N=520",
    "rmsnorm_ffn:tokens=1,K=2048,N=8192",
    "rmsnorm_ffn:tokens=33,K=520,N=1032",
    "rmsnorm_ffn:tokens=128,K=2048,N=8192",
    "layernorm_ffn:tokens=300,K=1024,N=4096,gated=false,act=gelu",
    "attention_out:batch=1,heads=32,kv_heads=8,head_dim=64,hidden=2048,q_len=16,kv_len=1024",
    "attention_out:batch=3,heads=6,q_len=64,kv_len=200,head_dim=80,hidden=344,bias=true",
]


@pytest.mark.parametrize("text", SPECS)
def test_a_cascade_is_right_and_repeats(text: str) -> None:
    spec = resolve(text)
    kernel = crossfuse.compile(spec).kernel
    names = [each.name for each in spec.outputs]

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        found = kernel.run(*inputs)
        return found if isinstance(found, tuple) else (found,)

    def checked(inputs: dict[str, np.ndarray]) -> tuple[list[Any], tuple[Any, ...]]:
        given = [to_torch(each).cuda() for each in inputs.values()]
        found = run(given)
        arrays = (to_numpy(each.cpu()) for each in found)
        check(spec, inputs, dict(zip(names, arrays, strict=True)))
        return given, found

    given, first = checked(random_inputs(spec))
    for _ in range(REPEATS - 1):
        for one, other in zip(run(given), first, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    for _, other in adversarial_inputs(spec):
        checked(other)


@pytest.mark.parametrize("columns", [3072, 12288], ids=["split", "clusters"])
def test_rows_are_made_of_what_the_kernel_before_wrote(columns: int) -> None:
    """With constant weights the kernel starts before that one is over, and waits in time."""
    from crossfuse.bench.cascades import draw

    spec = resolve(f"rmsnorm_gemm:tokens=256,K=4096,N={columns}")
    compiled = crossfuse.compile(spec)
    assert compiled.lowered.image.launches[0].early
    x, gamma, weight = draw(spec, 0, "cuda").values()
    # Not multiples of each other, whose norms are equal.
    rows = [x.roll(number, 0) for number in range(8)]
    due = []
    for each in rows:
        due.append(compiled.kernel.run(each, gamma, weight))
        torch.cuda.synchronize()
    given = torch.empty_like(x)
    for _ in range(20):
        found = []
        for each in rows:
            given.copy_(each)
            found.append(compiled.kernel.run(given, gamma, weight))
        torch.cuda.synchronize()
        for one, other in zip(found, due, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))
