"""Many element-wise calls around a cascade: how often they are looked at, counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm.relax import op

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.cascade.detect import detect, group
from crossfuse.cascade.detect.program import read_program
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.relax import FuseCascades
from crossfuse.relax.cascades import kernels
from relax_models import Parameters, legalised, number, softmax

pytestmark = pytest.mark.cpu

ROW: Parameters = {"x": ((6, 32), "float32")}


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """A list that gets an element for each call of a function."""
    calls: list[Any] = []
    inner = getattr(owner, name)

    def call(*given: Any) -> Any:
        calls.append(given)
        return inner(*given)

    monkeypatch.setattr(owner, name, call)
    return calls


def largest(calls: list[Any], build: Callable[..., Any]) -> tuple[Any, int]:
    """The function of most calls that was looked at for a graph, and how many were."""
    calls.clear()
    fuse = FuseCascades(stream=StreamTiles(threads=4, unroll=2))
    fuse(legalised(ROW, build))
    assert [each.form for each in fuse.outcomes if each.calls] == ["threads"]
    functions = [func for (func,) in calls]
    return max(functions, key=lambda each: len(read_program(each).made)), len(functions)


@pytest.mark.slow
def test_each_neighbour_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more call before a softmax and one more behind it are two more detections."""
    calls = counted(monkeypatch, kernels, "_find")

    def looked_at(neighbours: int) -> int:
        def build(emit: Any, x: Any) -> Any:
            for _ in range(neighbours):
                x = emit(op.multiply(x, number(0.5)))
            x = softmax(emit, x)
            for _ in range(neighbours):
                x = emit(op.add(x, number(0.5)))
            return x

        return largest(calls, build)[1]

    first = looked_at(2)
    assert [looked_at(each) - first for each in (4, 8)] == [2 * 2, 2 * 6]


def squared(times: int) -> Callable[..., Any]:
    """A softmax of what is squared again and again, which reads x so often: 2**times."""

    def build(emit: Any, x: Any) -> Any:
        for _ in range(times):
            x = emit(op.multiply(x, x))
        return softmax(emit, x)

    return build


def test_what_is_read_often_is_matched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, kernels, "_find")
    functions = [largest(calls, squared(times))[0] for times in (2, 5)]
    matched = counted(monkeypatch, group, "extended")

    def matches(func: Any) -> int:
        matched.clear()
        assert len(detect(func)) == 1
        return len(matched)

    assert matches(functions[0]) == matches(functions[1]) < 20


def test_equal_indices_of_other_variables_are_simplified_once() -> None:
    def simplest() -> Any:
        i, j, k = (ir.Var(name, "int32") for name in "ijk")
        (found,) = access.simplified([(i * 24 + j * 3 + k) // 24 * 24 + j * 3], {i: 5, j: 8, k: 3})
        assert ir.alike(found, i * 24 + j * 3)
        return access._settled_once.cache_info().misses

    assert simplest() == simplest()


def test_indices_that_differ_in_how_far_they_count_are_told_apart() -> None:
    i, j = ir.Var("i", "int32"), ir.Var("j", "int32")
    short, long = (access.simplified([(i * 8 + j) // 8], {i: 4, j: size}) for size in (8, 9))
    assert ir.alike(short[0], i) and not ir.alike(long[0], i)
