"""Where the elements of views lie, against numpy's own views of numbered elements."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
from tvm import relax

from crossfuse.relax.graph import clean, read_graph
from crossfuse.relax.views import axes_of, merged, source_of

pytestmark = pytest.mark.cpu


def drawn(rng: random.Random) -> tuple[Any, Any, np.ndarray]:
    """A graph of random views of one tensor, its last value, and the elements that this has."""
    shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
    elements = np.arange(np.prod(shape)).reshape(shape)
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value: Any = x
            for _ in range(rng.randint(1, 5)):
                kind = rng.choice(["reshape", "permute", "broadcast"])
                if kind == "permute":
                    axes = rng.sample(range(elements.ndim), elements.ndim)
                    value = builder.emit(relax.op.permute_dims(value, axes))
                    elements = elements.transpose(axes)
                elif kind == "broadcast":
                    extents = [rng.choice([2, 3]) if e == 1 else e for e in elements.shape]
                    extents = [*([2] * rng.randint(0, 1)), *extents]
                    value = builder.emit(relax.op.broadcast_to(value, extents))
                    elements = np.broadcast_to(elements, extents)
                else:
                    extents = _factors(rng, elements.size)
                    value = builder.emit(relax.op.reshape(value, extents))
                    elements = elements.reshape(extents)
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    graph = read_graph(clean(builder.get())["main"])
    return graph, graph.output, elements


def _factors(rng: random.Random, size: int) -> list[int]:
    found = []
    for prime in (2, 3):
        while size % prime == 0:
            found.append(prime)
            size //= prime
    rng.shuffle(found)
    shape = [1] * rng.randint(1, 3)
    for each in found:
        shape[rng.randrange(len(shape))] *= each
    return shape


@pytest.mark.parametrize("seed", range(100))
def test_views_have_the_elements_that_their_axes_tell(seed: int) -> None:
    graph, value, elements = drawn(random.Random(seed))
    source = source_of(graph, value)
    assert source not in graph.makers
    axes = axes_of(graph, value, source)
    if axes is not None:
        places = [
            [sum(at * stride for at, (_, stride) in zip(turn, axis, strict=True)) for turn in turns]
            for axis in axes
            for turns in [product(*(range(extent) for extent, _ in axis))]
        ]
        told = np.array([sum(each) for each in product(*places)]).reshape(elements.shape)
        np.testing.assert_array_equal(told, elements)


def test_loops_that_follow_one_another_are_one() -> None:
    assert merged(((2, 12), (3, 4)), ((1, 7),), ((4, 1),)) == ((24, 1),)
    assert merged(((2, 12),), ((3, 5),)) == ((2, 12), (3, 5))
    assert merged(((2, 0), (3, 0))) == ((6, 0),)
