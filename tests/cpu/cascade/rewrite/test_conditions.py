"""Conditions keep streams from reading beyond a tensor: on LLVM, and in the emulator's bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from crossfuse import _tvm as ir
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite import context
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.stream import schedule_stream

ROWS, LENGTH, FEW = 3, 44, 7
Arrays = dict[str, np.ndarray]


def log_sum(element: Callable[..., Any], *tensors: te.Tensor) -> Any:
    """A maximum and a sum of exponentials of an element that is read under a condition."""
    k, n = (te.reduce_axis((0, LENGTH), name) for name in "kn")
    m = te.compute((ROWS,), lambda i: te.max(element(i, k), axis=k), name="m")
    s = te.compute((ROWS,), lambda i: te.sum(te.exp(element(i, n) - m[i]), axis=n), name="S")
    return te.create_prim_func([*tensors, m, s])


def tensors() -> list[te.Tensor]:
    shapes = {"X": ((ROWS, LENGTH), "float32"), "B": ((FEW,), "float32"), "T": ((ROWS,), "int32")}
    return [te.placeholder(shape, dtype, name) for name, (shape, dtype) in shapes.items()]


def shifted(choose: Any) -> Any:
    """Each element is that before it; the first has none, and the first row nothing before it."""
    x, _, _ = tensors()
    return log_sum(lambda i, j: choose(j >= 1, x[i, j - 1], tirx.const(0.0, "float32")), x)


def short(choose: Any) -> Any:
    """A tensor that ends before the axis does, within a vector."""
    x, b, _ = tensors()
    return log_sum(lambda i, j: x[i, j] + choose(j < FEW, b[j], tirx.const(0.0, "float32")), x, b)


def looked_up(choose: Any) -> Any:
    """A place that a tensor says, the same for a row; not all of them are there."""
    x, b, t = tensors()
    zero = tirx.const(0.0, "float32")
    return log_sum(lambda i, j: x[i, j] + choose(t[i] < FEW, b[t[i]], zero), x, b, t)


def gathered(choose: Any) -> Any:
    """A place that depends on the element too."""
    x, b, t = tensors()
    zero = tirx.const(0.0, "float32")
    return log_sum(
        lambda i, j: x[i, j] + choose(t[i] + j < FEW, b[t[i] + j], zero),
        x,
        b,
        t,
    )


CASES = {each.__name__: each for each in (shifted, short, looked_up, gathered)}
#: Exact sums of exponentials below the maximum, over what each case takes for elements.
ELEMENTS: dict[str, Callable[[Arrays], np.ndarray]] = {
    "shifted": lambda a: np.pad(a["X"], ((0, 0), (1, 0)))[:, :-1],
    "short": lambda a: a["X"] + np.pad(a["B"], (0, LENGTH - FEW)),
    "looked_up": lambda a: a["X"] + np.where(a["T"] < FEW, a["B"][a["T"] % FEW], 0)[:, None],
    "gathered": lambda a: (
        a["X"]
        + np.pad(a["B"], (0, 200))[np.minimum(a["T"][:, None] + np.arange(LENGTH), FEW + 100)]
    ),
}


def inputs(name: str) -> Arrays:
    rng = np.random.default_rng(4)
    found = {"X": rng.standard_normal((ROWS, LENGTH)).astype("float32")}
    if name != "shifted":
        found["B"] = rng.standard_normal(FEW).astype("float32")
    if name in ("looked_up", "gathered"):
        found["T"] = np.array([1, 10**6 if name == "looked_up" else 90, 5], "int32")
    return found


def stream_of(name: str, choose: Any, tiles: StreamTiles) -> Any:
    (site,) = detect(CASES[name](choose))
    return streaming(site, derive(site.cascade), tiles)


def assert_right(found: np.ndarray, name: str, given: Arrays) -> None:
    element = ELEMENTS[name](given).astype(np.float64)
    due = np.exp(element - element.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(found, due, rtol=2e-6)


@pytest.mark.parametrize("choose", [tirx.if_then_else, tirx.Select], ids=["lazy", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_masked_is_not_read(name: str, choose: Any) -> None:
    tiles, given = StreamTiles(16, unroll=1, cluster=2), inputs(name)
    function = stream_of(name, choose, tiles)
    assert_right(run_sequential(function, given).outputs["S"], name, given)
    report = emulate(lower(schedule_stream(function, tiles)).image, given)
    assert report.ok, "\n".join(map(str, report.findings))
    assert_right(report.outputs["S"], name, given)


@pytest.mark.parametrize("name", ["shifted", "short", "gathered"])
def test_a_tile_without_its_bounds_reads_beyond(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_unproved", lambda load, site: ())
    tiles = StreamTiles(16, unroll=1)
    image = lower(schedule_stream(stream_of(name, tirx.Select, tiles), tiles)).image
    found = {each.kind for each in emulate(image, inputs(name)).findings}
    assert "out-of-bounds" in found


def test_a_choice_that_loads_computes_one_side() -> None:
    """Whole vectors stay where all that is read is there."""
    text = stream_of("looked_up", tirx.Select, StreamTiles(16, unroll=1)).script()
    assert "T.if_then_else(T_1[row_] < 7, B[T_1[row_]], T.float32(0.0))" in text
    assert "for lane in T.vectorized(4)" in text
    (site,) = detect(short(tirx.Select))
    symbols = [each for each in site.cascade.elements if ir.buffer_loads(site.reads.get(each, 0))]
    made = context.streams(site, symbols, vector=4)
    assert {each.buffer.name: (each.lanes, each.unproved) for each in made} == {
        "X": (4, ()),
        "B": (1, (0,)),
    }
