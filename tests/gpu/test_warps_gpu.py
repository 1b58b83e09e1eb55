"""Attention of few rows on the GPU, by warps that stream keys of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest

import crossfuse
from crossfuse.planner.cascade.plan import ranked_cascade
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascades import resolve

torch = pytest.importorskip("torch")

REPEATS = 1000
SPECS = [
    "attention:batch=1,heads=32,kv_heads=8,q_len=1,kv_len=1024,head_dim=64",
    "attention:batch=3,heads=28,kv_heads=4,q_len=1,kv_len=1001,head_dim=128",
    "attention:batch=16,heads=32,kv_heads=8,q_len=1,kv_len=777,head_dim=64,dtype=float16",
    "attention:batch=2,heads=12,kv_heads=1,q_len=1,kv_len=2050,head_dim=64",
    "attention:batch=2,heads=3,q_len=13,kv_len=333,head_dim=64,causal=true",
]


@pytest.mark.parametrize("text", SPECS)
def test_all_tiles_are_right_and_repeat(text: str) -> None:
    spec = resolve(text)
    inputs = random_inputs(spec)
    for plan in ranked_cascade(spec, only=("warps",)):
        kernel = crossfuse.compile(spec, plan=plan).kernel
        found = kernel.run(*inputs.values())
        check(spec, inputs, {"out": found})
        for _ in range(20):
            assert kernel.run(*inputs.values()).tobytes() == found.tobytes()
    kernel = crossfuse.compile(spec, plan=ranked_cascade(spec, only=("warps",))[0]).kernel
    for _, other in adversarial_inputs(spec):
        check(spec, other, {"out": kernel.run(*other.values())})


@pytest.mark.parametrize("batch", [1, 16])
def test_masks_of_keys_and_two_streams(batch: int) -> None:
    """A thousand launches have the same bits, also where two streams launch in turn."""
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    ours = torch.compile(attention, backend="crossfuse", dynamic=False)
    q = torch.randn(batch, 32, 1, 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(batch, 8, 1024, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lengths = torch.arange(1, batch + 1, device="cuda") * (1024 // batch)
    for shift in (0, 5):
        seen = torch.arange(1024, device="cuda") < (lengths - shift)[:, None]
        mask = seen[:, None, None]
        first = ours(q, k, v, mask)
        exact = attention(q.double(), k.double(), v.double(), mask)
        plain = attention(q, k, v, mask)
        error = (first.double() - exact).norm()
        assert error <= 2 * (plain.double() - exact).norm() and math.isfinite(float(error))
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        found = []
        for number in range(REPEATS):
            with torch.cuda.stream(streams[number % 2]):
                found.append(ours(q, k, v, mask))
        torch.cuda.synchronize()
        assert all(torch.equal(each.view(torch.int16), first.view(torch.int16)) for each in found)
