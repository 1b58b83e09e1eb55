"""Random functions, written so that nothing but their accesses says what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from cpu.cascade.detect.evaluate import assert_same
from cpu.planner.layouts import random_layout
from crossfuse.cascade.detect import detect

pytestmark = pytest.mark.cpu

Value = Callable[[Any, Any], Any]
Result = Callable[[Any], Any]
FACTORS = ((6,), (2, 3), (3, 2), (4,), (2, 2), (5,), (2, 3, 2))


@dataclass
class Writer:
    """Writes a cascade whose tensors have any layout, and whose loops are split anywhere."""

    rng: np.random.Generator
    inputs: list[te.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.columns = (FACTORS[self.rng.integers(len(FACTORS))] for _ in range(2))

    def name(self) -> str:
        return "".join(self.rng.choice(list("abcxyz"), 7))

    def element(self, *axes: str) -> Value:
        """An input over rows, columns, or both."""
        known = {"row": self.rows, "column": self.columns}
        layout = random_layout(self.rng, [known[each] for each in axes])
        tensor = te.placeholder(layout.shape, "float32", self.name())
        self.inputs.append(tensor)

        def value(row: Any, column: Any) -> Any:
            positions = {"row": row, "column": column}
            return tensor(*layout.indices([positions[each] for each in axes]))

        return value

    def stored(self, value: Value) -> Value:
        """An element-wise block, in any layout."""
        layout = random_layout(self.rng, [self.rows, self.columns])
        tensor = self.tensor(layout, value)
        return lambda row, column: tensor(*layout.indices([row, column]))

    def tensor(self, layout: Any, value: Value) -> te.Tensor:
        return te.compute(
            layout.shape,
            lambda *at: value(layout.position(at, 0), layout.position(at, 1)),
            self.name(),
        )

    def reduced(self, value: Value, by: Any) -> tuple[te.Tensor, Result]:
        layout = random_layout(self.rng, [self.rows])
        pieces = random_layout(self.rng, [self.columns])
        loops = [te.reduce_axis((0, extent), self.name()) for extent in pieces.shape]
        order = [loops[each] for each in self.rng.permutation(len(loops))]
        tensor = te.compute(
            layout.shape,
            lambda *at: by(value(layout.position(at, 0), pieces.position(loops, 0)), axis=order),
            self.name(),
        )
        return tensor, lambda row: tensor(*layout.indices([row]))


def softmax(writer: Writer, x: Value) -> tuple[list[te.Tensor], Value, int]:
    m, most = writer.reduced(x, te.max)
    power = writer.stored(lambda row, column: tirx.exp(x(row, column) - most(row)))
    s, total = writer.reduced(power, te.sum)
    return [m, s], lambda row, column: power(row, column) / total(row), 2


def norm(writer: Writer, x: Value) -> tuple[list[te.Tensor], Value, int]:
    count = float(prod(writer.columns))
    _, total = writer.reduced(x, te.sum)
    away = writer.stored(lambda row, column: x(row, column) - total(row) / count)
    q, squares = writer.reduced(lambda row, column: away(row, column) * away(row, column), te.sum)
    gamma = writer.element("column")

    def normal(row: Any, column: Any) -> Any:
        return away(row, column) * tirx.rsqrt(squares(row) / count + 0.5) * gamma(row, column)

    return [q], normal, 2


def magnitude(writer: Writer, x: Value) -> tuple[list[te.Tensor], Value, int]:
    _, most = writer.reduced(lambda row, column: tirx.abs(x(row, column)), te.max)
    share = writer.stored(lambda row, column: x(row, column) / (most(row) + 1.0))
    w = writer.element("column")
    y, _ = writer.reduced(lambda row, column: share(row, column) * w(row, column), te.sum)
    return [y], share, 2


@pytest.mark.parametrize(
    "seed",
    [*range(16), *(pytest.param(each, marks=pytest.mark.nightly) for each in range(16, 40))],
)
def test_random_functions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    writer = Writer(rng)
    raw = writer.element("row", "column")
    bias = writer.element(*(["row"] if rng.random() < 0.5 else ["column"]))
    x = writer.stored(lambda row, column: raw(row, column) + bias(row, column))
    kind = (softmax, norm, magnitude)[rng.integers(3)]
    made, rows, stages = kind(writer, x)
    outputs = list(made)
    if rng.random() < 0.7:
        outputs.append(writer.tensor(random_layout(rng, [writer.rows, writer.columns]), rows))
    (site,) = detect(te.create_prim_func([*writer.inputs, *outputs]))
    assert len(site.cascade.stages) == stages
    assert site.extents[site.axis] == prod(writer.columns)
    assert prod(site.extents[each] for each in site.rows) == prod(writer.rows)
    assert len(site.outputs) == len(outputs)
    inputs = {
        each.op.name: rng.standard_normal([int(extent) for extent in each.shape]).astype("float32")
        for each in writer.inputs
    }
    assert_same(site, inputs)
