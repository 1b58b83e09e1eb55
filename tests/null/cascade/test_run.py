"""The executors against numpy written by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import sympy

from cascade_patterns import named
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.expressions.functions import function
from crossfuse.cascade.run import merge_tree, stream, two_pass

Data = dict[str, np.ndarray]


def weights(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)


def quantised(data: Data) -> np.ndarray:
    scale = np.abs(data["x"]).max(axis=1, keepdims=True)
    return (data["x"] / scale * 448 * data["w"]).sum(axis=1) * scale[:, 0] / 448


def normalised(data: Data) -> np.ndarray:
    x = data["x"]
    rms = np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
    scale = np.abs(x / rms * data["g"]).max(axis=1, keepdims=True)
    return (x / rms * data["g"] / scale * data["w"]).sum(axis=1)


def causal(data: Data) -> np.ndarray:
    x, i = data["x"], data["i"][:, None]
    seen = np.where(np.arange(x.shape[1]) <= i, x, -np.inf)
    return (weights(seen) * data["v"]).sum(axis=1)


BY_HAND: dict[str, tuple[str, Callable[[Data], np.ndarray]]] = {
    "softmax tensor": ("out", lambda d: weights(d["x"])),
    "attention": ("out", lambda d: (weights(d["x"]) * d["v"]).sum(axis=1)),
    "causal attention": ("out", causal),
    "log-sum-exp": ("out", lambda d: np.log(np.exp(d["x"]).sum(axis=1))),
    "cross-entropy": (
        "out",
        lambda d: -np.log(np.take_along_axis(weights(d["x"]), d["t"][:, None], 1)[:, 0]),
    ),
    "entropy": ("o", lambda d: (weights(d["x"]) * np.log(weights(d["x"]))).sum(axis=1)),
    "top-k of probabilities": ("o", lambda d: -np.sort(-weights(d["x"]), axis=1)[:, :3]),
    "argmax of probabilities": ("where", lambda d: d["x"].argmax(axis=1)),
    "variance": ("out", lambda d: d["x"].var(axis=1)),
    "skewness": ("out", lambda d: (standard(d["x"]) ** 3).mean(axis=1)),
    "Pearson correlation": (
        "o",
        lambda d: (standard(d["x"]) * standard(d["y"])).mean(axis=1),
    ),
    "absmax quantisation and GEMM": ("out", quantised),
    "RMS norm, absmax, GEMM": ("out", normalised),
    "safe 2-norm": ("out", lambda d: np.linalg.norm(d["x"], axis=1)),
}


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_executors_agree_with_numpy(name: str) -> None:
    pattern = named(name)
    rng = np.random.default_rng(3)
    data: Data = {e.name: rng.normal(size=(4, 23)) for e in pattern.cascade.elements}
    data |= {"t": rng.integers(0, 23, 4), "i": rng.integers(0, 23, 4)}
    key, by_hand = BY_HAND[name]
    derivation = derive(pattern.cascade)
    for found in (
        two_pass(pattern.cascade, data),
        stream(derivation, data, 5),
        merge_tree(derivation, data, [10, 0, 1, 12]),
    ):
        np.testing.assert_allclose(found[key], by_hand(data), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arithmetic_is_of_the_inputs_type(dtype: type) -> None:
    pattern = named("RMS norm, absmax, GEMM")
    data = {e.name: np.ones((2, 8), dtype) for e in pattern.cascade.elements}
    for found in (two_pass(pattern.cascade, data), stream(derive(pattern.cascade), data, 3)):
        assert {each.dtype for each in found.values()} == {np.dtype(dtype)}


def test_one_row_needs_no_rows() -> None:
    pattern = named("softmax tensor")
    found = stream(derive(pattern.cascade), {"x": np.zeros(4)}, 3)
    np.testing.assert_array_equal(found["out"], [[0.25] * 4])


def test_segments_hold_all_elements() -> None:
    pattern = named("variance")
    with pytest.raises(ValueError, match="segments of 5 elements for rows of 4"):
        merge_tree(derive(pattern.cascade), {"x": np.zeros((1, 4))}, [2, 3])


def test_symbols_need_values() -> None:
    x, y = sympy.symbols("x y")
    with pytest.raises(ValueError, match=r"no value for y in x \+ y"):
        function([x], x + y)


def test_functions_take_arrays_of_any_shape() -> None:
    x, y = sympy.symbols("x y", real=True)
    made = function([x, y], sympy.Max(x, y, sympy.erf(x)))
    found = made(np.array([[0.0], [2.0]]), np.array([[1.0, 3.0]]))
    np.testing.assert_array_equal(found, [[1, 3], [2, 3]])
