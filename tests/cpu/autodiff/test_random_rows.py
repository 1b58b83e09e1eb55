"""Random functions of rows: sums are simplified across blocks, and gradients stay torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tvm import te, tirx

from cpu.autodiff.evaluate import run
from crossfuse.autodiff import gradients, simplify

R, C = 3, 5
#: A value of an element, or of a row, in TE and in torch.
Value = tuple[Callable[..., Any], torch.Tensor]


def f64(value: float) -> Any:
    return tirx.const(value, "float64")


class Program:
    """Sums and maxima over rows of two matrices, each of what came before, and an output."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.given = [te.placeholder((R, C), "float64", name) for name in "XY"]
        self.inputs = [self.draw().exp().requires_grad_() for _ in "XY"]
        self.elements = [(lambda *at, x=x: x(*at), value) for x, value in self.named()]
        self.rows: list[Value] = []
        for number in range(self.random.randrange(2, 5)):
            self.reduce(f"t{number}")
            if self.random.random() < 0.5:
                self.combine(f"e{number}")
        made, value = self.expression(3, self.elements, self.rows)
        (x, known), (last, sums) = self.elements[0], self.rows[-1]
        out = te.compute((R, C), lambda i, j: made(i, j) + x(i, j) * last(i), "out")
        self.function = te.create_prim_func([*self.given, out])
        self.result = value + known * sums

    def draw(self) -> torch.Tensor:
        return torch.randn(R, C, generator=self.generator, dtype=torch.float64) / 4

    def named(self) -> list[tuple[Any, torch.Tensor]]:
        return list(zip(self.given, self.inputs, strict=True))

    def reduce(self, name: str) -> None:
        made, value = self.expression(self.random.randrange(3), self.elements, self.rows)
        largest, axis = self.random.random() < 0.2, te.reduce_axis((0, C), "k")
        by = te.max if largest else te.sum
        row = te.compute((R,), lambda i: by(made(i, axis), axis=axis), name)
        value = value.expand(R, C)
        found = value.amax(1, keepdim=True) if largest else value.sum(1, keepdim=True)
        self.add(row, found)

    def combine(self, name: str) -> None:
        made, value = self.expression(2, [], self.rows)
        self.add(te.compute((R,), lambda i: made(i), name), value)

    def add(self, row: Any, value: torch.Tensor) -> None:
        self.rows.append((lambda i, *_: row(i), value))

    def expression(self, depth: int, elements: list[Value], rows: list[Value]) -> Value:
        if depth == 0 or self.random.random() < 0.25:
            return self.random.choice([*elements, *rows])
        (f, a), (g, b) = (self.expression(depth - 1, elements, rows) for _ in "ab")
        return self.random.choice(
            [
                (lambda *at: f(*at) + g(*at), a + b),
                (lambda *at: f(*at) - g(*at), a - b),
                (lambda *at: f(*at) * g(*at), a * b),
                (lambda *at: f(*at) - g(*at) * f64(1 / C), a - b / C),
                (lambda *at: f(*at) / (g(*at) * g(*at) + f64(1)), a / (b * b + 1)),
                (lambda *at: tirx.exp(f64(0.1) * (f(*at) - g(*at))), (0.1 * (a - b)).exp()),
            ]
        )


@pytest.mark.slow
def test_gradients_of_random_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    known, found = simplify._Simplifier._known, []

    def counted(self: Any, block: Any) -> Any:
        value = known(self, block)
        found.extend([value] * (value is not None))
        return value

    monkeypatch.setattr(simplify._Simplifier, "_known", counted)
    for seed in range(25):
        program = Program(seed)
        given = program.draw()
        due = torch.autograd.grad(program.result, program.inputs, given, materialize_grads=True)
        if not all(bool(each.isfinite().all()) for each in due):
            continue
        made = gradients(program.function)
        arrays = dict(zip("XY", program.inputs, strict=True))
        arrays |= {"out": program.result, "d_out": given}
        arrays = {name: arrays[name] for name in (*made.inputs, *made.kept, *made.given)}
        got = run(made.function, arrays)
        for name, each in zip("XY", due, strict=True):
            size = 1 + float(each.abs().max())
            assert torch.allclose(got[f"d_{name}"], each, rtol=1e-9, atol=1e-12 * size), seed
    assert len(found) > 10
