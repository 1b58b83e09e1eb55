"""Random small models of torch: layers, activations, residuals, what no kernel of ours takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

ROWS, WIDTHS = 16, (32, 64, 96)


def in_two(x: Any) -> Any:
    """What needs an even number of rows."""
    return x.reshape(2, -1, x.shape[-1]).reshape(x.shape)


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
    in_two,
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


def check(got: Any, module: RandomModel, x: Any) -> None:
    """Results err at most twice as much as eager torch."""
    with torch.no_grad():
        eager = module(x)
        exact = deepcopy(module).double()(x.double())
    for one, apart, due in zip(got, eager, exact, strict=True):
        noise = (apart.double() - due).abs().max()
        size = due.abs().max()
        assert (one.double() - due).abs().max() <= 2 * noise + 2**-10 * size
