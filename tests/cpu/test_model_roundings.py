"""What a model rounds on purpose is rounded in its kernels, and in what TVM computes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import crossfuse
from crossfuse.compiler import CompiledModel

F16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: torch.Tensor) -> Any:
        return self.function(*x)


def compiled(function: Callable[..., Any], *given: torch.Tensor) -> CompiledModel:
    return crossfuse.compile_model(Function(function).eval(), given, runs_on="llvm", always=True)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(E4M3), scale


ROUNDINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "elements of a variance": lambda x: (1e3 * x).to(F16).float().var(-1),
    "an overflow in front of a softmax": lambda x: torch.softmax((4e4 * x).to(F16).float(), -1),
    "a sum of bfloat16": lambda x: x.to(BF16).float().sum(-1),
    "an output": lambda x: torch.softmax(x, -1).to(BF16).float() * 3,
    "8 bits and back": lambda x: (100 * x).to(E4M3).float() + (100 * x).to(E5M2).float(),
    "8 bits of a scaled row and back": lambda x: quantised(x)[0].float() * quantised(x)[1],
    "8 bits that are stored": lambda x: tuple(each.float() for each in quantised(x)),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounding_stays(name: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    x[1], x[2], x[3, 0] = 0, 1e-3, 3.0
    expected = ROUNDINGS[name](x)
    torch.testing.assert_close(
        compiled(ROUNDINGS[name], x)(x), expected, rtol=2e-5, atol=1e-6, equal_nan=True
    )


def test_a_kernel_stores_8_bits() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    made, scale = compiled(quantised, x)(x)
    assert made.dtype == E4M3
    torch.testing.assert_close(scale, quantised(x)[1], rtol=3e-7, atol=0)
    # A scale that differs in its last digit moves single elements to the next number.
    assert (made.float() - quantised(x)[0].float()).norm() < 0.01 * made.float().norm()


@pytest.mark.parametrize("dtype", [F16, E4M3])
def test_a_rounding_between_layers_keeps_them_apart(dtype: torch.dtype) -> None:
    scale = 1e4 if dtype == F16 else 1

    def layers(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (scale * torch.relu(x @ first)).to(dtype).to(BF16) @ second

    sizes = ((16, 64), (64, 128), (128, 64))
    given = [torch.randn(s, generator=torch.Generator().manual_seed(sum(s))) for s in sizes]
    given = [each.to(BF16) for each in given]
    model = compiled(layers, *given)
    assert f"a cast to {str(dtype)[6:]} between values of bfloat16" in model.report.text()
    got, expected = model(*given), layers(*given)
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert dtype == E4M3 or not expected.isfinite().all()
