"""Routing of tokens to experts, in tile form, and its exact answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu.cascade.tiles.forms import scheduled
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import random_inputs
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import resolve

Arrays = dict[str, np.ndarray]


def spec(tokens: int, hidden: int, experts: int, top_k: int, dtype: str = "bfloat16") -> Any:
    """A packaged cascade."""
    sizes = f"tokens={tokens},hidden={hidden},experts={experts},top_k={top_k}"
    return resolve(f"moe_routing:{sizes},dtype={dtype}")


def schedule(given: CascadeSpec, **tiles: int) -> Any:
    """Its schedule."""
    return scheduled(prim_func(given), **tiles)


def whole_numbers(given: CascadeSpec, largest: int = 1) -> Arrays:
    """Inputs whose scores are small whole numbers, many of them equal."""
    rng = np.random.default_rng(3)
    made = random_inputs(given)
    for name, array in made.items():
        numbers = rng.integers(-largest, largest + 1, array.shape)
        if name == "x":
            numbers[:, 8:] = 0
        made[name] = numbers.astype(array.dtype)
    return made


def reference(inputs: Arrays, top_k: int) -> Arrays:
    """In float64, of equal scores the lower expert first."""
    x, router = (inputs[each].astype(np.float64) for each in ("x", "router"))
    with np.errstate(invalid="ignore"):
        scores = x @ router.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    top = scores.max(axis=1, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    gates = np.take_along_axis(weights, order, 1) / np.where(total > 0, total, 1)
    return {"gates": gates, "chosen": order}


def check_exact(inputs: Arrays, outputs: Arrays, top_k: int) -> None:
    """The same experts in the same order, and their probabilities."""
    due = reference(inputs, top_k)
    np.testing.assert_array_equal(outputs["chosen"], due["chosen"])
    np.testing.assert_allclose(outputs["gates"], due["gates"], rtol=2e-5, atol=1e-30)
