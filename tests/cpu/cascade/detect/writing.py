"""Shorthands for plain functions, in TE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import te, tirx

#: Value at the loops around, and at the reduced loop.
Element = Callable[..., Any]
NOTHING = tirx.const(float("-inf"), "float32")
ZERO = tirx.const(0, "float32")


def tensor(name: str, *shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype, name)


def each(name: str, shape: tuple[int, ...], element: Element) -> te.Tensor:
    return te.compute(shape, element, name)


def fold(name: str, shape: tuple[int, ...], depth: int, element: Element, by: Any = te.sum) -> Any:
    axis = te.reduce_axis((0, depth), "r")
    return te.compute(shape, lambda *at: by(element(*at, axis), axis=axis), name)


def most(name: str, shape: tuple[int, ...], depth: int, element: Element) -> te.Tensor:
    return fold(name, shape, depth, element, te.max)


def square(value: Any) -> Any:
    return value * value


def softmax_of(scores: Element, rows: tuple[int, ...], depth: int) -> tuple[te.Tensor, Element]:
    """The sums of exponentials below the maximum, and these."""
    m = most("m", rows, depth, scores)
    power = each("power", (*rows, depth), lambda *at: tirx.exp(scores(*at) - m(*at[:-1])))
    return fold("s", rows, depth, lambda *at: power(*at)), power


def attention(score: Element, heads: int = 2, queries: int = 5, keys: int = 7) -> list[te.Tensor]:
    """Values weighted by a softmax of ``score(q @ k.T, h, i, j)``; the parameters."""
    q, k = tensor("q", heads, queries, 4), tensor("k", heads, keys, 4)
    v = tensor("v", heads, keys, 3)
    raw = fold("scores", (heads, queries, keys), 4, lambda h, i, j, d: q(h, i, d) * k(h, j, d))
    scores = each("scaled", raw.shape, lambda h, i, j: score(raw(h, i, j), h, i, j))
    s, power = softmax_of(lambda *at: scores(*at), (heads, queries), keys)
    o = fold("o", (heads, queries, 3), keys, lambda h, i, d, j: power(h, i, j) * v(h, j, d))
    return [q, k, v, each("out", o.shape, lambda h, i, d: o(h, i, d) / s(h, i))]


def function(*parameters: te.Tensor) -> Any:
    return te.create_prim_func(list(parameters))


def drawn(*tensors: te.Tensor, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values of placeholders; integers are small, and flags are any."""
    rng = np.random.default_rng(seed)
    found = {}
    for one in tensors:
        name, shape, dtype = one.op.name, [int(extent) for extent in one.shape], str(one.dtype)
        if dtype == "bool":
            found[name] = rng.random(shape) < 0.7
        elif "int" in dtype:
            found[name] = rng.integers(0, 3, shape).astype(dtype)
        else:
            found[name] = rng.standard_normal(shape).astype(dtype)
    return found
