"""Sums and extremes beside rows of the same terms: what rounding adds to one the other has too."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.expressions.functions import Abs, Compared
from crossfuse.cascade.run import merge_tree, two_pass
from crossfuse.cascade.spec import MAX, MIN, SUM, Cascade, Stage, check_extremes
from crossfuse.errors import CascadeRefused

x, y, w = sympy.symbols("x y w", real=True)
W, g = sympy.symbols("W g", real=True)
N = sympy.Symbol("N", integer=True, positive=True)
TOP, TOTAL, OTHER = Stage("m", MAX, x), Stage("S", SUM, x), Stage("T", SUM, y)
MASS = Stage("s", SUM, sympy.exp(x - TOP.symbol))
SHARE = sympy.exp(x - TOP.symbol) / MASS.symbol
EPSILON = float(np.finfo(np.float32).eps)


def errors(one: Cascade, data: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """Of each output the error of a stream, and of two passes with the rounding of the output."""
    single = {name: each.astype(np.float32) for name, each in data.items()}
    exact = two_pass(one, {name: each.astype(np.float64) for name, each in single.items()})
    apart = two_pass(one, single)
    length = single["x"].shape[1]
    found = merge_tree(derive(one), single, [length // 4] * 4, tile=8)
    return {
        name: (
            float(np.abs(found[name] - exact[name]).max()),
            float(
                2 * np.abs(apart[name] - exact[name]).max()
                + 8 * EPSILON * np.abs(exact[name]).max()
            ),
        )
        for name in (*one.results, *one.rows)
    }


@pytest.mark.parametrize("heavy", [slice(0, 32), slice(48, 64), slice(96, 128)])
def test_a_mean_is_rounded_as_far_as_what_weighs(heavy: slice) -> None:
    """Elements that are large, and have no weight, leave no rounding in it."""
    mean = Stage("r", SUM, SHARE * y)
    one = Cascade((TOP, MASS, mean), (x, y), rows={"out": SHARE * (y - mean.symbol)})
    rng = np.random.default_rng(1)
    data = {"x": rng.standard_normal((4, 128)) - 200, "y": 1e6 * rng.standard_normal((4, 128))}
    data["x"][:, heavy] += 200
    data["y"][:, heavy] = rng.standard_normal(data["y"][:, heavy].shape)
    error, allowed = errors(one, data)["out"]
    assert error <= allowed


@pytest.mark.parametrize("place", [(1.0, 1e-3), (100.0, 1e-3), (1e4, 1e-3), (1e4, 1.0)])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_sums_change_with_the_mean_that_rows_have(power: int, place: tuple[float, float]) -> None:
    apart = x - TOTAL.symbol / N
    term = g * (apart + apart**power)
    last = Stage("r", SUM, term)
    rows = {"out": term - last.symbol / N}
    one = Cascade((TOTAL, last), (x,), (g, N), rows=rows, length=N)
    rng = np.random.default_rng(2)
    about, spread = place
    data = {"x": about + spread * rng.standard_normal((6, 128)), "g": rng.standard_normal(6)}
    error, allowed = errors(one, data)["out"]
    assert error <= allowed


@pytest.mark.parametrize("place", [(1.0, 1e-3), (100.0, 1e-3), (1e4, 1.0)])
def test_a_distance_is_added_up_before_it_is_scaled(place: tuple[float, float]) -> None:
    one, other = x - TOTAL.symbol / N, y - OTHER.symbol / N
    square = Stage("M", SUM, one**2)
    scale = sympy.Max(sympy.sqrt(square.symbol), sympy.Rational(1, 10**8))
    last = Stage("r", SUM, one * other / scale**2)
    results = {"out": last.symbol}
    stages = (TOTAL, OTHER, square, last)
    cascade = Cascade(stages, (x, y), (N,), results, length=N)
    rng = np.random.default_rng(3)
    about, spread = place
    data = {name: about + spread * rng.standard_normal((6, 128)) for name in "xy"}
    error, allowed = errors(cascade, data)["out"]
    assert error <= allowed


def weighted(shown: str) -> Cascade:
    """Distances from a mean by weights whose sum is given, and their sum."""
    first = Stage("a", SUM, w * x)
    term = w * (x - first.symbol / W)
    stages = (first, Stage("r", SUM, term))
    shows = {"rows": {}, "results": {"mean": first.symbol / W}}.get(shown, {})
    rows = {"out": term} if shown == "rows" else {}
    return Cascade(stages, (x, w), (W,), {"r": stages[1].symbol, **shows}, rows)


@pytest.mark.parametrize("shown", ["rows", "results"])
def test_sums_beside_what_has_their_mean_rounded_are_refused(shown: str) -> None:
    """An invariant may be the sum of the weights: the sum is then what rounding leaves of it."""
    with pytest.raises(CascadeRefused) as caught:
        derive(weighted(shown))
    assert (caught.value.refusal.rule, caught.value.refusal.where) == ("cascade-cancels", "stage r")


i = sympy.Symbol("i", integer=True, nonnegative=True)
BELOW = MASS.symbol + sympy.exp(-TOP.symbol)
VALUES = Stage("v", SUM, y * sympy.exp(x - TOP.symbol))
PULLED = VALUES.symbol / BELOW**2


@pytest.mark.parametrize(
    ("addend", "given"),
    [
        (W * PULLED, (g, W)),
        (-g * sympy.Piecewise((PULLED, sympy.Eq(i, 0)), (0, True)), (g, i)),
        (-g * sympy.Piecewise((PULLED, sympy.Ne(i, 0)), (0, True)), (g, i)),
    ],
    ids=["two factors", "at position 0", "at others"],
)
def test_sums_beside_rows_that_cancel_by_what_is_given_are_refused(
    addend: sympy.Expr, given: tuple[sympy.Symbol, ...]
) -> None:
    """Of the gradient of a softmax with 1 in its sum: W may be -g, which another kernel made."""
    term = (y * g / BELOW + addend) * sympy.exp(x - TOP.symbol)
    stages = (TOP, VALUES, MASS, Stage("r", SUM, term))
    results = {"m": TOP.symbol, "r": stages[-1].symbol}
    with pytest.raises(CascadeRefused) as caught:
        derive(Cascade(stages, (x, y), given, results, {"out": term}))
    assert (caught.value.refusal.rule, caught.value.refusal.where) == ("cascade-cancels", "stage r")


LEAST = Stage("l", MIN, SHARE)
SCORE = w * x / MASS.symbol
LARGEST = Stage("l", MAX, Abs(SCORE))


@pytest.mark.parametrize(
    ("stage", "row"),
    [
        (LEAST, SHARE),
        (LARGEST, SCORE),
        (LEAST, sympy.Eq(Compared(LEAST.symbol), Compared(SHARE))),
        (LEAST, sympy.Piecewise((1, sympy.Eq(Compared(LEAST.symbol), SHARE)), (0, True))),
    ],
)
def test_extremes_that_equal_no_row_are_refused(stage: Stage, row: sympy.Basic) -> None:
    """The least quotient is that of the least element; rows are products with a reciprocal."""
    stages = (TOP, MASS, stage)
    found = derive(Cascade(stages, (x, w), results={"l": stage.symbol}, rows={"out": row}))
    with pytest.raises(CascadeRefused) as caught:
        check_extremes(found)
    assert (caught.value.refusal.rule, caught.value.refusal.where) == ("cascade-form", "stage l")
    assert "it is then taken of what rows store" in caught.value.refusal.instead


@pytest.mark.parametrize("row", [SCORE / LARGEST.symbol, x])
def test_extremes_that_rows_are_divided_by_stay(row: sympy.Expr) -> None:
    stages = (TOP, MASS, LARGEST)
    check_extremes(derive(Cascade(stages, (x, w), results={"l": LARGEST.symbol}, rows={"o": row})))
