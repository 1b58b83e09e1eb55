"""Operators that TVM's importer computes otherwise than torch, through `compile_model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse import compile_model  # noqa: E402
from crossfuse.errors import RefusedError  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

INF = float("inf")
MASK = torch.arange(8) % 3 == 1

#: Of x [3, 8], indices of 0 to 7 [3, 8], and an image [1, 8, 4, 4].
ARITHMETIC: list[Callable[..., Any]] = [
    lambda x, i, p: torch.add(x, x.flip(0), alpha=2),
    lambda x, i, p: torch.sub(x, 1, alpha=3),
    lambda x, i, p: torch.rsub(x, x.flip(0), alpha=3),
    lambda x, i, p: (i * 0.5, i / 2.5, i / (i + 1), i > 0.5, i == 1.5),
    lambda x, i, p: ((x > 0) + 1, (x > 0) * 2.5, x.half() * x[0, 0]),
    lambda x, i, p: torch.where(x > 0, x.half(), x),
    lambda x, i, p: (torch.where(x > 0, x, -INF), torch.where(x > 0, 2, x)),
    lambda x, i, p: (torch.where(i > 3, 1, 2), torch.where(i > 3, 0.5, INF)),
    lambda x, i, p: ((x > 2).any(-1), x.any(), (x > -9).all(0, keepdim=True), i.all(), i.any(1)),
    lambda x, i, p: torch.cat([x.half(), x]),
    lambda x, i, p: x.masked_fill(MASK, -INF) + torch.full((8,), -INF),
    lambda x, i, p: (x.std(-1), x.std(), x.std(0, keepdim=True, unbiased=False)),
    lambda x, i, p: (x.amax(-1), x.amin((0, 1), keepdim=True)),
    lambda x, i, p: (F.softmax(i.half(), -1, dtype=torch.float32), (x > 0).cumsum(-1)),
]
ACTIVATIONS: list[Callable[..., Any]] = [
    lambda x, i, p: torch.clamp_max(x, 0.1) + torch.clamp_min(x, -0.1),
    lambda x, i, p: (x.clamp(-0.5, 0.7), x.clamp(0.7, -0.5), i.clamp(2, 5), x.clamp(max=x[0])),
    lambda x, i, p: (F.hardtanh(x, -0.3, 0.6), F.relu6(4 * x), F.hardswish(3 * x)),
    lambda x, i, p: (F.celu(x, 2.0), F.elu(x, 0.5), F.selu(x), F.hardsigmoid(3 * x)),
]
PLACES: list[Callable[..., Any]] = [
    lambda x, i, p: (x[:, -1], x[-2], x[torch.tensor([-1, 0])], x[:, i[0] - 8]),
    lambda x, i, p: F.pixel_shuffle(p, 2),
    lambda x, i, p: (F.group_norm(p, 2), F.instance_norm(p, eps=0.1)),
    lambda x, i, p: (F.interpolate(p, size=(7, 5)), F.interpolate(p, scale_factor=2)),
    lambda x, i, p: F.scaled_dot_product_attention(p, p, p, scale=0.3),
]


class Every(nn.Module):
    """Results of several functions."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = (function(*given) for function in self.functions)
        return tuple(x for each in made for x in (each if isinstance(each, tuple) else (each,)))


@pytest.mark.parametrize("functions", [ARITHMETIC, ACTIVATIONS, PLACES])
def test_operators_are_torchs(functions: list[Callable[..., Any]]) -> None:
    given = (torch.randn(3, 8), torch.randint(0, 8, (3, 8)), torch.randn(1, 8, 4, 4))
    module = Every(functions).eval()
    got, due = compile_model(module, given, runs_on="llvm")(*given), module(*given)
    for place, (one, other) in enumerate(zip(got, due, strict=True)):
        near = dict(rtol=2e-3, atol=2e-3) if other.dtype == torch.float16 else {}
        text = f"result {place}"
        torch.testing.assert_close(
            one, other, equal_nan=True, msg=lambda m, text=text: f"{text}: {m}", **near
        )


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: F.avg_pool2d(x, 2, divisor_override=3), "an average pool with a divisor of it"),
        (lambda x: F.interpolate(x, scale_factor=1.3), r"a resize of 4 by 1\.3, which is no integ"),
        (
            lambda x: x[torch.tensor([0]), :, torch.tensor([1])],
            r"aten\.index\.Tensor as R\.Tensor\(\(1, 8, 1, 4\).*where torch makes \[1, 8, 4\] of",
        ),
    ],
)
def test_what_has_no_converter_is_refused(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(RefusedError, match=text):
        compile_model(Every([function]).eval(), (torch.zeros(1, 8, 4, 4),), runs_on="llvm")


NEAR_ZERO: list[Callable[..., Any]] = [
    torch.log1p,
    torch.expm1,
    lambda x: F.softplus(16 * x),
    lambda x: F.softplus(x, beta=3, threshold=1),
    lambda x: F.logsigmoid(16 * x),
    lambda x: F.elu(-x, 0.5),
    F.celu,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_numbers_keep_their_digits(dtype: torch.dtype) -> None:
    size = 10.0 ** torch.linspace(-30, 0.3, 60)
    x = torch.cat([size, -size.clamp(max=0.9)]).to(dtype)

    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # elu and celu of 2 bytes stay as kernels have them
            kept = NEAR_ZERO[: -2 if dtype == torch.bfloat16 else None]
            return tuple(each(x) for each in kept)

    module = Small().eval()
    found, allowed = compile_model(module, (x,), runs_on="llvm")(x), 3 * torch.finfo(dtype).eps
    for got, due in zip(found, module(x.double()), strict=True):
        assert ((got.double() - due).abs() <= allowed * due.abs()).all()
