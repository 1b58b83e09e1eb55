"""NaN in cascades with clamps: in elements, in results, and in rows that are quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from crossfuse.compiler.options import cascade_options
from crossfuse.compiler.source import read_source
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.hardware import device
from crossfuse.lower.extract import lower

ROWS, LENGTH = 4, 96
WIDE = "float32"
LARGEST = 448.0
Arrays = dict[str, np.ndarray]


def number(value: float) -> Any:
    return tirx.const(value, WIDE)


def softmax(element: Callable[[Any, Any], Any]) -> Any:
    """The softmax of what is made of two matrices."""
    x, z = (te.placeholder((ROWS, LENGTH), WIDE, name) for name in "XZ")
    k, n = (te.reduce_axis((0, LENGTH), name) for name in "kn")

    def score(i: Any, j: Any) -> Any:
        return element(x[i, j], z[i, j])

    m = te.compute((ROWS,), lambda i: te.max(score(i, k), axis=k), "m")
    s = te.compute((ROWS,), lambda i: te.sum(te.exp(score(i, n) - m[i]), axis=n), "s")
    y = te.compute(x.shape, lambda i, j: te.exp(score(i, j) - m[i]) / s[i], "Y")
    return te.create_prim_func([x, z, y])


def softmax_of(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - np.nanmax(scores, axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def centred() -> Any:
    """What rows differ from the mean of what is positive in them, cut off at one."""
    x, z = (te.placeholder((ROWS, LENGTH), WIDE, name) for name in "XZ")
    k = te.reduce_axis((0, LENGTH), "k")
    total = te.compute((ROWS,), lambda i: te.sum(tirx.max(x[i, k], number(0)), axis=k), "total")

    def cut(i: Any, j: Any) -> Any:
        apart = x[i, j] - total[i] / number(LENGTH)
        return tirx.min(tirx.max(apart, number(-1)), tirx.abs(z[i, j]))

    return te.create_prim_func([x, z, te.compute(x.shape, cut, "Y")])


def centred_of(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    apart = x - np.maximum(x, 0).sum(axis=1, keepdims=True) / LENGTH
    return np.minimum(np.maximum(apart, -1), np.abs(z))


def shown() -> Any:
    """Distances from the mean of elements that a mask shows, the mask a number."""
    x, z = (te.placeholder((ROWS, LENGTH), WIDE, name) for name in "XZ")
    k, n = (te.reduce_axis((0, LENGTH), name) for name in "kn")

    def flag(i: Any, j: Any) -> Any:
        return (z[i, j] > number(0)).astype(WIDE)

    total = te.compute((ROWS,), lambda i: te.sum(x[i, k] * flag(i, k), axis=k), "total")
    count = te.compute((ROWS,), lambda i: te.sum(flag(i, n), axis=n), "count")
    y = te.compute(x.shape, lambda i, j: (x[i, j] - total[i] / count[i]) * flag(i, j), "Y")
    return te.create_prim_func([x, z, y])


def shown_of(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    mask = (z > 0).astype(x.dtype)
    return (x - (x * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)) * mask


CASES: dict[str, tuple[Any, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "a bound of scores": (
        lambda: softmax(lambda x, z: tirx.max(x, number(0)) + z),
        lambda x, z: softmax_of(np.maximum(x, 0) + z),
    ),
    "the larger of two": (
        lambda: softmax(tirx.max),
        lambda x, z: softmax_of(np.maximum(x, z)),
    ),
    "the smaller of two, the other way round": (
        lambda: softmax(lambda x, z: tirx.min(z, x)),
        lambda x, z: softmax_of(np.minimum(x, z)),
    ),
    "a clamp of results": (centred, centred_of),
    # Infinities that it hides are multiplied by 0.
    "a mask that is a number": (shown, shown_of),
}


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """Rows with a NaN in either matrix, and with an infinity of each sign."""
    rng = np.random.default_rng(0)
    x, z = (rng.standard_normal((ROWS, LENGTH)).astype(WIDE) for _ in range(2))
    z[0, 3], x[1, 3], x[2, 5], x[3, 7] = np.nan, np.nan, np.inf, -np.inf
    return {"X": x, "Z": z}


def outputs(func: Any, given: Arrays) -> list[Arrays]:
    """What both checkers compute of the kernel that is planned for a function."""
    schedule = cascade_options(read_source(func), device("nvidia-h100"))[0].make()
    report = emulate(lower(schedule).image, given)
    report.raise_if_wrong()
    return [report.outputs, run_sequential(schedule, given).outputs]


@pytest.mark.parametrize("name", CASES)
def test_cascades(name: str, arrays: Arrays) -> None:
    func, reference = CASES[name]
    with np.errstate(invalid="ignore"):
        due = reference(*(each.astype("float64") for each in arrays.values()))
    assert np.isnan(due).any()
    for found in outputs(func(), arrays):
        np.testing.assert_allclose(found["Y"], due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clamped", [True, False])
def test_quantised_rows(clamped: bool, arrays: Arrays) -> None:
    """A NaN stays one in the row, whose scale is that of its numbers."""
    x = te.placeholder((ROWS, LENGTH), WIDE, "X")
    k = te.reduce_axis((0, LENGTH), "k")
    a = te.compute((ROWS,), lambda i: te.max(tirx.abs(x[i, k]), axis=k), "a")
    scale = te.compute((ROWS,), lambda i: tirx.max(a[i], number(1e-10)) / number(LARGEST), "scale")

    def rounded(i: Any, j: Any) -> Any:
        value = x[i, j] / scale[i]
        if clamped:
            value = tirx.max(tirx.min(value, number(LARGEST)), number(-LARGEST))
        return value.astype("float8_e4m3fn")

    func = te.create_prim_func([x, scale, te.compute(x.shape, rounded, "Y")])
    rows = arrays["X"][:2]
    due = np.nanmax(np.abs(rows), axis=1) / LARGEST
    whole = np.concatenate([rows, rows])
    for found in outputs(func, {"X": whole}):
        np.testing.assert_allclose(found["scale"][:2], due, rtol=1e-6)
        values = found["Y"][:2].astype(WIDE)
        np.testing.assert_array_equal(np.isnan(values), np.isnan(rows))
        np.testing.assert_allclose(values * due[:, None], rows, rtol=0.07, atol=1e-2)
