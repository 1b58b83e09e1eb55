"""NaN and infinities through whole models: clamps and extremes agree with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse import compile_model  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
D, H = 32, 64
VALUES = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 2.0, 7.0, -7.0]

ELEMENT_WISE: dict[str, Callable[..., Any]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "clamp": lambda x: torch.clamp(x, -1.5, 2.5),
    "clamp_min": lambda x: torch.clamp_min(x, -1.5),
    "clamp_max": lambda x: torch.clamp_max(x, 2.5),
    "clamp of tensors": lambda x: torch.clamp(x, x.flip(-1), x.roll(1, -1)),
    "maximum": lambda x: torch.maximum(x, x.flip(-1)),
    "maximum, other order": lambda x: torch.maximum(x.flip(-1), x),
    "minimum": lambda x: torch.minimum(x, x.roll(3, -1)),
    "minimum, other order": lambda x: torch.minimum(x.roll(3, -1), x),
}


class Model(nn.Module):
    """Every function of one input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each(x) for each in ELEMENT_WISE.values())


class Mlp(nn.Module):
    """Two layers with an activation between them and one behind."""

    def __init__(self, inner: Callable[..., Any], outer: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.expand, self.contract = nn.Linear(D, H), nn.Linear(H, D)
        self.inner, self.outer = inner, outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.contract(self.inner(self.expand(x))))


def rows(dtype: Any) -> torch.Tensor:
    """Rows with a NaN, with infinities, and of numbers."""
    torch.manual_seed(1)
    x = torch.randn(8, D)
    x[1, 3], x[2, 5], x[3, 7] = VALUES[:3]
    return x.to(dtype)


def assert_close(got: Any, due: torch.Tensor) -> None:
    np.testing.assert_allclose(got.double(), due.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_left_to_tvm(dtype: str) -> None:
    x = torch.tensor(VALUES * 2).to(getattr(torch, dtype))
    fn = compile_model(Model().eval(), (x,), runs_on="llvm")
    for name, got, due in zip(ELEMENT_WISE, fn(x), Model()(x), strict=True):
        torch.testing.assert_close(got, due, rtol=1e-2, atol=1e-2, equal_nan=True, msg=name)


@pytest.mark.parametrize(("inner", "outer"), [("relu", "hardtanh"), ("hardswish", "relu")])
def test_chains_of_models(inner: str, outer: str) -> None:
    """`compile_model`, and the backend of torch."""
    module = Mlp(ELEMENT_WISE[inner], ELEMENT_WISE[outer]).half().eval()
    x = rows(torch.float16)
    with torch.no_grad():
        due = module.float()(x.float())
        module = module.half()
        fn = compile_model(module, (x,), always=True, runs_on="llvm")
        assert fn.report.fused
        assert_close(fn(x), due)
        torch.compiler.reset()
        backend = Backend(rest="eager", always=True, cpu="llvm")
        assert_close(torch.compile(module, backend=backend)(x), due)
    assert reports()[-1].fused
    assert torch.isnan(due[1]).all() and not torch.isnan(due[0]).any()


def test_reductions_by_a_maximum_drop_nan() -> None:
    """What is documented of them; a softmax has NaN by its sum."""

    class Reductions(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.amax(-1), x.amin(-1), torch.softmax(x, -1)

    x = rows(torch.float32)
    fn = compile_model(Reductions().eval(), (x,), runs_on="llvm")
    largest, least, weights = fn(x)
    assert not torch.isnan(largest).any() and not torch.isnan(least).any()
    assert torch.isnan(weights[1]).all() and torch.isnan(weights[2]).any()
    torch.testing.assert_close(largest, torch.from_numpy(np.nanmax(x.numpy(), 1)))


def _number(x: torch.Tensor) -> torch.Tensor:
    """Reductions by extremes drop NaN (docs/numerics.md)."""
    return x.nan_to_num(0.0, torch.inf, -torch.inf)


def _unless(condition: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, 0.0, x)


#: Sums and extremes of rows whose terms ask for infinities or NaN, which elements may be.
ASKING: dict[str, Callable[..., Any]] = {
    "logsumexp": lambda x: torch.logsumexp(_number(x), -1),
    "no infinity": lambda x: _number(x).masked_fill(x == torch.inf, 0).amin(-1),
    # TVM's LLVM takes NaN to be no other number.
    "infinities": lambda x: (
        (_number(x) != -torch.inf).float().sum(-1) + (x > -torch.inf).float().sum(-1)
    ),
    "below infinity": lambda x: (x < torch.inf).float().sum(-1),
    "finite alone": lambda x: _unless(~torch.isfinite(x), x).sum(-1),
    "NaN": lambda x: (x != x).float().sum(-1) - (x == x).float().sum(-1),
    "no NaN": lambda x: _unless(x != x, x).sum(-1),
    "nanmean": lambda x: torch.nanmean(x, -1),
}


class Asking(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each(x) for each in ASKING.values())


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_reductions_that_ask_for_infinities_and_nan(scale: float) -> None:
    x = scale * torch.randn(8, D, generator=torch.Generator().manual_seed(2))
    x[1, 3], x[2, 4], x[3, 5] = torch.inf, -torch.inf, torch.nan
    x[4], x[5, :2] = -torch.inf, torch.inf
    model = compile_model(Asking().eval(), (x,), target="nvidia-h100", runs_on="llvm")
    assert any(each.form for each in model.report.cascades)
    for name, found, due in zip(ASKING, model(x), Asking()(x), strict=True):
        torch.testing.assert_close(
            found,
            due,
            rtol=1e-5,
            atol=1e-4,
            equal_nan=True,
            msg=lambda text, name=name: name + text,
        )
