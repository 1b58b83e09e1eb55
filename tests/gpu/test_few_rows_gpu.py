"""Products of few rows on a GPU, also of rows that a sum scales: right, and the same every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpu.schedule.scaled import with_norm
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import starting_early
from crossfuse.runtime import load
from crossfuse.runtime.artefact import build_library
from crossfuse.schedule.rules.skinny import schedule_skinny
from crossfuse.workload import parse
from crossfuse.workload.build import emit, form_of

torch = pytest.importorskip("torch")

REPEATS = 300
TEXTS = [
    "gemm:M=1,K=2048,N=2048,weights=nk,residual=in",
    "gemm:M=8,K=8192,N=2048,weights=nk,residual=in",
    "gemm:M=13,K=896,N=512,weights=nk",
    "gemm:M=16,K=8192,N=2048,weights=nk",
    "gemm:M=32,K=576,N=1536,weights=nk",
    "gated_gemm:M=1,K=2048,N=8192",
    "gated_gemm:M=16,K=2048,N=4096",
]


def due(given: dict[str, Any], dtype: Any) -> Any:
    """What a function computes, in float64 or as separate kernels do."""
    x = given["A"].to(dtype)
    if "gain" in given:
        wide = x.float() if dtype == torch.bfloat16 else x
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        x = (wide * scale).to(dtype) * given["gain"].to(dtype)
    made = [x @ each.to(dtype).t() for name, each in given.items() if name.startswith("B")]
    result = made[0] if len(made) == 1 else torch.nn.functional.silu(made[0]) * made[1]
    return result + given["residual"].to(dtype) if "residual" in given else result


@pytest.mark.parametrize("kind", ["normal", "far", "outlier"])
@pytest.mark.parametrize("norm", [False, True], ids=["stored", "normed"])
@pytest.mark.parametrize("text", TEXTS)
def test_products_of_few_rows(text: str, norm: bool, kind: str, tmp_path: Path) -> None:
    func = emit(with_norm(text) if norm else form_of(parse(text)))
    torch.manual_seed(0)
    given = {
        str(each.name): torch.randn(*map(int, each.ty.shape), device="cuda").bfloat16()
        for each in func.params[:-1]
    }
    if kind == "far":
        given["A"] = 100 + given["A"]
    elif kind == "outlier":
        given["A"][:, 7] = 1e4
    scheduled = schedule_skinny(func).mod["main"]
    constant = [each for each in given if each.startswith("B")]
    image = lower(starting_early(scheduled, constant), device()).image
    kernel = load(build_library(image, tmp_path).shared_object)
    first = kernel.run(*given.values()).clone()
    exact, apart = due(given, torch.float64), due(given, torch.bfloat16).double()
    allowed = 2 * (apart - exact).abs().max() + 2.0**-9 * exact.abs().max()
    assert (first.double() - exact).abs().max() <= allowed
    for _ in range(REPEATS):
        again = kernel.run(*given.values())
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))
