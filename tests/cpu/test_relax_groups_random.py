"""Random dataflow of norms, softmaxes, products and element-wise calls: fused or not, the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tvm.relax import op

from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.relax import FuseCascades
from relax_models import Parameters, layer_norm, legalised, normals, number, rms_norm, run, softmax

pytestmark = pytest.mark.cpu

F32, BATCH, ROWS, WIDTH = "float32", 2, 5, 6
SHAPES: Parameters = {
    "x": ((BATCH, ROWS, WIDTH), F32),
    "y": ((BATCH, ROWS, WIDTH), F32),
    "weight": ((WIDTH, WIDTH), F32),
    "gamma": ((WIDTH,), F32),
    "beta": ((WIDTH,), F32),
}
#: Most are for the night.
SEEDS = [*range(15), *(pytest.param(each, marks=pytest.mark.nightly) for each in range(15, 50))]


class Writer:
    """Emits a few random operators on tensors of one shape, [batch, row, width]."""

    def __init__(self, seed: int, emit: Any, *given: Any) -> None:
        self.random = random.Random(seed)
        self.emit = emit
        x, y, self.weight, self.gamma, self.beta = given
        self.known = [x, y]

    def write(self) -> tuple[Any, ...]:
        """Results of a graph: the last value, and perhaps one that others use."""
        for _ in range(self.random.randint(2, 5)):
            self.known.append(self.random.choice(OPERATORS)(self, self.pick()))
        last, *others = reversed(self.known[2:])
        extra = [each for each in others if self.random.random() < 0.25]
        return (last, *extra[:1])

    def pick(self) -> Any:
        """A known tensor, most often the last one."""
        return self.known[-1] if self.random.random() < 0.7 else self.random.choice(self.known)

    def norm(self, x: Any) -> Any:
        return rms_norm(self.emit, x, self.gamma)

    def layer(self, x: Any) -> Any:
        return layer_norm(self.emit, x, self.gamma, self.beta)

    def softmax(self, x: Any) -> Any:
        return softmax(self.emit, x) if self.random.random() < 0.5 else self.whole(x)

    def whole(self, x: Any) -> Any:
        return self.emit(op.nn.softmax(x, self.random.choice([-1, -1, 1])))

    def product(self, x: Any) -> Any:
        return self.emit(op.matmul(x, self.weight))

    def attention(self, x: Any) -> Any:
        turned = self.emit(op.permute_dims(self.pick(), [0, 2, 1]))
        return self.emit(op.matmul(self.whole(self.emit(op.matmul(x, turned))), self.pick()))

    def residual(self, x: Any) -> Any:
        return self.emit(op.add(x, self.pick()))

    def activation(self, x: Any) -> Any:
        return self.emit(self.random.choice([op.nn.silu, op.tanh, op.sigmoid])(x))

    def scale(self, x: Any) -> Any:
        return self.emit(op.multiply(x, number(0.5)))

    def regrouped(self, x: Any) -> Any:
        flat = self.emit(op.reshape(x, (BATCH * ROWS, WIDTH)))
        done = self.emit(op.nn.softmax(flat, -1))
        return self.emit(op.reshape(done, (BATCH, ROWS, WIDTH)))


OPERATORS = (
    Writer.norm,
    Writer.layer,
    Writer.softmax,
    Writer.product,
    Writer.attention,
    Writer.residual,
    Writer.activation,
    Writer.scale,
    Writer.regrouped,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_graph_computes_what_it_did(seed: int) -> None:
    mod = legalised(SHAPES, lambda emit, *given: Writer(seed, emit, *given).write())
    fuse = FuseCascades(
        tiles=CascadeTiles(rows=4, elements=random.Random(seed).choice([4, 8])),
        stream=StreamTiles(threads=2, unroll=2),
    )
    made = fuse(mod)
    given = normals(SHAPES, seed)
    for one, other in zip(run(made, given), run(mod, given), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    assert all(each.after <= each.before for each in fuse.outcomes if each.form)
