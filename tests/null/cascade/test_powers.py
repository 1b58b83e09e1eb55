"""Powers, roots and quotients as computer algebra leaves them: in range where their source is."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.algebra.exponents import averages, powers_of_products, ratios
from crossfuse.cascade.expressions.functions import Unevaluated, fenced_sum
from crossfuse.cascade.run import merge_tree, two_pass
from crossfuse.cascade.spec import MAX, SUM, Cascade, Stage
from crossfuse.errors import CascadeRefused

x, y, w, g, r = sympy.symbols("x y w g r", real=True)
a, b, c = sympy.symbols("a b c", real=True)
N = sympy.Symbol("N", integer=True, positive=True)
EPS = sympy.Rational(1, 10**6)
RELU = sympy.Max(x, 0)


def drawn(*names: str, rows: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    return {each: rng.standard_normal((rows, 96)).astype(np.float32) for each in names}


def streamed(cascade: Cascade, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        return merge_tree(derive(cascade), given, [32, 0, 33, 31], tile=8)


def exact(cascade: Cascade, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return two_pass(cascade, {name: each.astype(np.float64) for name, each in given.items()})


@pytest.mark.parametrize(
    ("product", "written"),
    [
        (x**2 * w**2, Unevaluated(w * x) ** 2),
        (y * x**2 * w**2, y * Unevaluated(w * x) ** 2),
        (x**2 / w**2, Unevaluated(x / w) ** 2),
        (x**2 * w**3, x**2 * w**3),
        (y / (x**2 * w**2), y / (x**2 * w**2)),
        (sympy.exp(2 * x) * w**2, sympy.exp(2 * x) * w**2),
        (1 + sympy.sqrt(x**2 * w**2 + 1), 1 + sympy.sqrt(Unevaluated(w * x) ** 2 + 1)),
    ],
)
def test_equal_powers_are_of_a_product(product: sympy.Expr, written: sympy.Expr) -> None:
    assert powers_of_products(product) == written


@pytest.mark.parametrize("size", [1e19, 1e30])
def test_a_square_of_what_is_masked_is_0(size: float) -> None:
    """By a mask that is a number, or a gate that closed: 0 times the square would be no number."""
    total = Stage("s", SUM, (x * g) ** 2)
    rows = {"row": x * g / sympy.sqrt(total.symbol + EPS)}
    given = drawn("x", "g")
    given["g"] = (given["g"] > 0).astype(np.float32)
    given["x"] *= np.where(given["g"] > 0, np.float32(1), np.float32(size))
    cascade = Cascade((total,), (x, g), rows=rows)
    got, due = streamed(cascade, given), exact(cascade, given)
    np.testing.assert_allclose(got["s"], due["s"], rtol=1e-5)
    np.testing.assert_allclose(got["row"], due["row"], rtol=1e-5)


def test_a_square_of_a_gate_is_in_range() -> None:
    """Of ``x * silu(y)``, whose exponential is infinite: that of the quotient is 0."""
    total = Stage("s", SUM, (x * y / (1 + sympy.exp(-y))) ** 2)
    given = drawn("x", "y")
    given["y"] *= np.float32(1e10)
    cascade = Cascade((total,), (x, y))
    np.testing.assert_allclose(streamed(cascade, given)["s"], exact(cascade, given)["s"], rtol=1e-5)


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e10, 1e15])
def test_powers_of_quotients_stay_such_in_results(size: float) -> None:
    """A projection's energy, ``sum (y * xy/yy)**2``: squares of sums are out of range."""
    yy = sympy.Symbol("yy", positive=True)
    product = Stage("xy", SUM, x * y)
    energy = Stage("e", SUM, (product.symbol / yy * y) ** 2)
    cascade = Cascade((product, energy), (x, y), (yy,), {"e2": 1 + energy.symbol})
    given = drawn("x", "y")
    given["y"] *= np.float32(size)
    given["yy"] = (given["y"].astype(np.float64) ** 2).sum(axis=1).astype(np.float32)
    np.testing.assert_allclose(
        streamed(cascade, given)["e2"], exact(cascade, given)["e2"], rtol=1e-5
    )


def test_roots_are_divided_by_roots() -> None:
    """A quotient of deviations is in range where that of variances is not."""
    assert ratios(sympy.sqrt(a) / sympy.sqrt(b)) == sympy.sqrt(a) / sympy.sqrt(b)
    assert ratios(a**2 / b**2) == Unevaluated(a / b) ** 2
    one, other = Stage("sx", SUM, x**2), Stage("sy", SUM, y**2)
    row = sympy.sqrt(one.symbol) / sympy.sqrt(other.symbol) * y
    cascade = Cascade((one, other), (x, y), rows={"row": row})
    given = drawn("x", "y")
    given["y"] *= np.float32(1e-18)
    given["x"] *= np.float32(1e18)
    np.testing.assert_allclose(
        streamed(cascade, given)["row"], exact(cascade, given)["row"], rtol=1e-5
    )


@pytest.mark.parametrize("size", [1.0, 1e18, 1e20, 1e30])
def test_a_norm_is_no_largest_magnitude(size: float) -> None:
    """Bounded from below it divides a sum at the end: so far it may be infinite, as in torch."""
    square = Stage("n", SUM, x**2)
    norm = sympy.Max(sympy.Rational(1, 10**5), sympy.sqrt(square.symbol))
    cascade = Cascade((square, Stage("t", SUM, x * y / norm**2)), (x, y))
    given = drawn("x", "y")
    given["x"] *= np.float32(size)
    got = streamed(cascade, given)["t"]
    if size > 1e19:
        assert (got == 0).all()
    else:
        np.testing.assert_allclose(got, exact(cascade, given)["t"], rtol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e19, 1e30])
def test_a_sum_that_becomes_a_mean_keeps_its_divisor(size: float) -> None:
    """The gradient of ``relu(x)/(sum relu(x) + eps)``: the square of that is not multiplied out."""
    mass = Stage("s", SUM, RELU)
    pulled = Stage("t", SUM, -y * RELU / (mass.symbol + EPS) ** 2)
    row = y / (mass.symbol + EPS) + pulled.symbol
    rows = {"row": sympy.Piecewise((0, RELU <= 0), (row, True))}
    cascade = Cascade((mass, pulled), (x, y), rows=rows)
    given = drawn("x", "y")
    given["x"] *= np.float32(size)
    got, due = streamed(cascade, given)["row"], exact(cascade, given)["row"]
    np.testing.assert_allclose(got * size, due * size, rtol=1e-4, atol=1e-4)


def test_squares_of_means_are_compared_in_range() -> None:
    """``where(mean x**2 >= (mean x)**2, y, 0)``, the gradient of a variance that is clamped."""
    squares, total = Stage("q", SUM, x**2), Stage("s", SUM, x)
    test = fenced_sum(squares.symbol / N, -((total.symbol / N) ** 2)) >= 0
    rows = {"row": sympy.Piecewise((y, test), (0, True))}
    cascade = Cascade((squares, total), (x, y), (N,), rows=rows, length=N)
    given = drawn("x", "y")
    given["x"] = np.abs(given["x"]) * np.float32(1e18)
    np.testing.assert_array_equal(streamed(cascade, given)["row"], given["y"])
    compared = averages(sympy.Piecewise((y, a**2 / N**2 > 1), (0, True)), {a}, N)
    assert compared.args[0][1] == (Unevaluated(a / N) ** 2 > 1)


def test_what_is_given_may_become_a_mean() -> None:
    """Of a masked mean the total is given, and what the mask counts divides it.

    ``sum w (x - total/count)`` has two parts that cancel, wherever the total comes from.
    """
    count = Stage("n", SUM, g)
    apart = Stage("t", SUM, w * (x - r / sympy.Max(1, count.symbol)))
    with pytest.raises(CascadeRefused) as caught:
        derive(Cascade((count, apart), (x, w, g), (r,)))
    refusal = caught.value.refusal
    assert (refusal.rule, refusal.where) == ("cascade-cancels", "stage t")
    assert "rows of x about 10000, 1 apart, where r makes t 0" in str(refusal.found)


def test_what_is_given_and_stands_alone_is_split() -> None:
    """No element is added to it, so nothing near to it cancels."""
    top = Stage("m", MAX, x)
    mass = Stage("s", SUM, sympy.exp(x - top.symbol))
    lifted = Stage("t", SUM, w * (sympy.exp(x - top.symbol) / mass.symbol - r * y))
    assert derive(Cascade((top, mass, lifted), (x, y, w), (r,))).exact


def test_a_norm_of_a_norm_is_another_cascade() -> None:
    """Squares of 1e30 over an infinite norm are 0, one by one; what they sum to over it is none."""
    square = Stage("q", SUM, x**2)
    again = Stage("t", SUM, (x * w / sympy.sqrt(square.symbol / N + EPS)) ** 2)
    with pytest.raises(CascadeRefused) as caught:
        derive(Cascade((square, again), (x, w), (N,), length=N))
    refusal = caught.value.refusal
    assert (refusal.rule, refusal.where) == ("cascade-range", "stage t")
    assert "is no number of rows of x about 0, 1e+30 apart" in str(refusal.found)
    assert "they scale each element" in str(refusal.limit)
    assert "cut the cascade before this stage" in str(refusal.instead)


@pytest.mark.parametrize("size", [1.0, 1e19, 1e30])
def test_rows_of_squares_under_a_norm_are_in_range(size: float) -> None:
    """Of ``(x * rsqrt(s))**2``, which is written as ``x**2/s``."""
    square = Stage("q", SUM, x**2)
    row = (x * w / sympy.sqrt(square.symbol / N + EPS)) ** 2
    cascade = Cascade((square,), (x, w), (N,), rows={"row": row}, length=N)
    given = drawn("x", "w")
    given["x"] *= np.float32(size)
    got, due = streamed(cascade, given)["row"], exact(cascade, given)["row"]
    np.testing.assert_allclose(got, due if size == 1 else 0 * due, rtol=1e-5)
