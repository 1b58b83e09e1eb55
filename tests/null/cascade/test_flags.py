"""Masks as numbers, which multiply, beside masks as choices, which hide."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.expressions.functions import Flag
from crossfuse.cascade.run import merge_tree, two_pass
from crossfuse.cascade.spec import MAX, SUM, Cascade, Stage

x = sympy.Symbol("x", real=True)
b = sympy.Symbol("b", integer=True, nonnegative=True)
MASK = sympy.Piecewise((1, sympy.Ne(b, 0)), (0, True))
FLAG = Flag(MASK)
COUNT = Stage("n", SUM, MASK)


def hidden(term: sympy.Expr) -> sympy.Expr:
    return sympy.Piecewise((term, sympy.Ne(b, 0)), (0, True))


def variance(first: sympy.Expr, second: type) -> Cascade:
    """By a mask that is either, in the mean and in the squares."""
    total = Stage("S", SUM, first)
    square = (x - total.symbol / COUNT.symbol) ** 2
    last = Stage("M", SUM, FLAG * square if second is Flag else hidden(square))
    results = {"mean": total.symbol / COUNT.symbol, "out": last.symbol / COUNT.symbol}
    return Cascade((COUNT, total, last), (x, b), results=results)


def rows() -> dict[str, np.ndarray]:
    """Infinities and NaN that masks show or hide, and rows far from 0."""
    rng = np.random.default_rng(0)
    found = 1e4 + rng.standard_normal((8, 96))
    shown = (rng.random((8, 96)) < 0.5).astype(np.int64)
    for row, value in enumerate((np.inf, -np.inf, np.nan) * 2):
        found[row, 40], shown[row, 40] = value, row < 3
    return {"x": found.astype(np.float32), "b": shown}


@pytest.mark.parametrize("second", [Flag, sympy.Piecewise])
@pytest.mark.parametrize("first", [FLAG * x, hidden(x)])
def test_moments_by_masks(first: sympy.Expr, second: type) -> None:
    one, data = variance(first, second), rows()
    with np.errstate(all="ignore"):
        due, found = two_pass(one, data), merge_tree(derive(one), data, [32] * 3, tile=8)
    for name in one.results:
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(np.isfinite(found[name]), np.isfinite(due[name]))
        np.testing.assert_allclose(found[name][6:8], due[name][6:8], rtol=1e-4)


@pytest.mark.parametrize("factor", [FLAG, MASK, x**2])
def test_weights_that_hide_the_largest_leave_nothing_to_divide_by(factor: sympy.Expr) -> None:
    """A sum below the maximum of more than it has is 0 in other rows than those of -oo."""
    top = Stage("m", MAX, x)
    power = sympy.exp(x - top.symbol)
    term = hidden(power) if factor == MASK else factor * power
    part = Stage("s", SUM, term)
    one = Cascade((top, part), (x, b), rows={"out": term / part.symbol})
    data = {"x": np.full((1, 8), -1e3, np.float32), "b": np.ones((1, 8), np.int64)}
    data["x"][0, 3], data["b"][0, 3] = 0, 0
    with np.errstate(all="ignore"):
        found = merge_tree(derive(one), data, [4, 4], tile=2)["out"]
    assert np.isnan(found).any()
