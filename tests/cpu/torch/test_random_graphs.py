"""Random small models through the backend: as torch computes them, or left with a reason."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.torch import Backend, reports  # noqa: E402

pytestmark = pytest.mark.cpu

ROWS, WIDTHS = 16, (32, 64, 96)
#: Most are for the night.
SEEDS = [*range(8), *(pytest.param(each, marks=pytest.mark.nightly) for each in range(8, 300))]

UNARY: list[Callable[[Any], Any]] = [
    F.relu,
    F.silu,
    torch.tanh,
    torch.sigmoid,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x * torch.sigmoid(1.702 * x),
    lambda x: 0.5 * x + 1,
    lambda x: x.float().abs().to(x.dtype),
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: F.softmax(x, -1),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x.reshape(2, -1, x.shape[-1]).reshape(x.shape),
    lambda x: x.t().contiguous().t(),
    lambda x: x.flip(-1),
]


class RandomModel(nn.Module):
    """Values are made one after the other from earlier ones; the last few are the results."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, Any, tuple[int, ...]]] = []
        widths = [self.draw.choice(WIDTHS)]
        for _ in range(self.draw.randint(4, 12)):
            widths.append(self._step(widths))
        self.given, self.results = widths[0], self.draw.randint(1, 2)

    def _step(self, widths: list[int]) -> int:
        recent = max(0, len(widths) - 3)
        at = self.draw.randrange(recent, len(widths))
        kind = self.draw.choice(["linear", "linear", "unary", "unary", "binary"])
        if kind == "linear":
            width = self.draw.choice(WIDTHS)
            self.layers.append(nn.Linear(widths[at], width, bias=self.draw.random() < 0.5))
            self.steps.append((kind, len(self.layers) - 1, (at,)))
            return width
        if kind == "unary":
            self.steps.append((kind, self.draw.choice(UNARY), (at,)))
            return widths[at]
        same = [each for each, width in enumerate(widths) if width == widths[at]]
        operator = self.draw.choice([torch.add, torch.mul])
        self.steps.append((kind, operator, (at, self.draw.choice(same))))
        return widths[at]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x]
        for kind, what, places in self.steps:
            function = self.layers[what] if kind == "linear" else what
            values.append(function(*(values[each] for each in places)))
        return tuple(values[-self.results :])


def check(module: Any, got: Any, x: Any) -> None:
    """Results err at most twice as much as torch's, but for a rounding of their type."""
    with torch.no_grad():
        eager = module(x)
        exact = module.double()(x.double())
    module.half()
    for one, apart, due in zip(got, eager, exact, strict=True):
        noise = (apart.double() - due).abs().max()
        size = due.abs().max()
        assert (one.double() - due).abs().max() <= 2 * noise + 2**-10 * size


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model(seed: int) -> None:
    torch.compiler.reset()
    torch.manual_seed(seed)
    module = RandomModel(seed).half().eval()
    x = torch.randn(ROWS, module.given).half()
    with torch.no_grad():
        backend = Backend(rest="eager", always=True, cpu="llvm")
        got = torch.compile(module, backend=backend)(x)
    check(module, got, x)
    report = reports()[-1]
    assert not report.reason
    assert all(each.name or each.text for each in report.outcomes)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(60))
def test_a_random_model_of_symbolic_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    torch.manual_seed(seed)
    module = RandomModel(seed).half().eval()
    backend = Backend(rest="eager", always=True, cpu="llvm", bins=(ROWS,))
    fn = torch.compile(module, backend=backend, dynamic=True)
    monkeypatch.setattr("crossfuse.torch.report._REPORTS", deque())
    for rows in (ROWS, 6, 30):  # all of a bin, some of it, more than it has
        x = torch.randn(rows, module.given).half()
        with torch.no_grad():
            got = fn(x)
        check(module, got, x)
    (report,) = reports()  # compiled once
    assert not report.reason
