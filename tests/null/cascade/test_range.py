"""Sums that are divided when they are complete, on numbers whose squares are out of range."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.algebra.exponents import rescaled
from crossfuse.cascade.expressions.functions import fraction
from crossfuse.cascade.run import merge_tree, two_pass
from crossfuse.cascade.spec import MAX, MIN, PROD, SUM, Cascade, Stage
from crossfuse.errors import CascadeRefused

x, w, y = sympy.symbols("x w y", real=True)
N = sympy.Symbol("N", integer=True, positive=True)
EPS = sympy.Rational(1, 10**12)
TOTAL = Stage("s", SUM, w * x)
LEAST, LARGEST = Stage("l", MIN, x), Stage("a", MAX, sympy.Abs(x))
LARGEST_OF_ALL = Stage("m", MAX, x)
s, a = TOTAL.symbol, LARGEST.symbol


def of(term: sympy.Expr, first: Stage = TOTAL, monoid: object = SUM) -> Cascade:
    return Cascade((first, Stage("t", monoid, term)), (x, w))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cascade",
    [
        of((x / (sympy.Abs(s) + EPS)) ** 2),
        of(w * (x / (1 + sympy.Abs(s))) ** 3),
        of((x / (1 + sympy.Abs(LEAST.symbol))) ** 2, LEAST),
        of(x / (1 + sympy.Abs(LEAST.symbol)), LEAST, PROD),
    ],
)
def test_what_leaves_the_range_is_refused(cascade: Cascade) -> None:
    with pytest.raises(CascadeRefused) as caught:
        derive(cascade)
    refusal = caught.value.refusal
    assert (refusal.rule, refusal.where) == ("cascade-range", "stage t")
    assert "divided, or multiplied, when it is complete: of rows of" in str(refusal.found)
    assert "which scale each element" in str(refusal.limit)
    assert "divide by a largest magnitude of the same elements" in str(refusal.instead)


@pytest.mark.parametrize("power", [3, 4, 5])
@pytest.mark.parametrize(
    ("inside", "eps"), [(True, 0), (True, EPS), (False, EPS)], ids=["bare", "inside", "behind"]
)
def test_powers_of_standard_scores_are_in_range(power: int, inside: bool, eps: sympy.Expr) -> None:
    """Cubes of 1e13 are not; where all are equal 0/0 is left, in an infinite deviation 0."""
    mean = Stage("S", SUM, x)
    square = Stage("M", SUM, (x - mean.symbol / N) ** 2)
    share = square.symbol / N
    below = sympy.sqrt(share + eps) if inside else sympy.sqrt(share) + eps
    score = (x - mean.symbol / N) / below
    stages = (mean, square, Stage("t", SUM, score**power))
    cascade = Cascade(stages, (x,), (N,), length=N, firsts={x: sympy.Symbol("x_first", real=True)})
    data = np.random.default_rng(0).standard_normal((9, 96)).astype(np.float32)
    for row, by in enumerate((1.0, 1e13, 1e17, 1e-4, 1e-13)):
        data[row] *= by
    data[5], data[6, 40], data[7, 40], data[8, 40] = 1e26, 1e37, np.inf, np.nan
    got = merge_tree(derive(cascade), {"x": data}, [32, 0, 33, 31], tile=8)["t"]
    wide = data[:5].astype(np.float64)
    apart = wide - wide.mean(axis=1, keepdims=True)
    within, behind = (float(eps), 0.0) if inside else (0.0, float(eps))
    deviation = np.sqrt(wide.var(axis=1, keepdims=True) + within) + behind
    exact = ((apart / deviation) ** power).sum(axis=1)
    np.testing.assert_allclose(got[:5], exact, rtol=1e-5, atol=1e-5)
    assert np.isnan(got[5]) if eps == 0 else got[5] == 0
    assert got[6] == 0 and np.isnan(got[7:]).all()


def test_powers_over_a_deviation_of_another_kernel_are_refused() -> None:
    """It is given, and nothing says that it grows with the elements: their powers are summed."""
    mean = Stage("S", SUM, x)
    last = Stage("t", SUM, ((x - mean.symbol / N) / w) ** 4)
    with pytest.raises(CascadeRefused) as caught:
        derive(Cascade((mean, last), (x,), (w, N), length=N))
    refusal = caught.value.refusal
    assert (refusal.rule, refusal.where) == ("cascade-range", "stage t")
    assert "1e+13 apart, where w is the mean of x" in str(refusal.found)


@pytest.mark.parametrize("scale", [a, a + EPS, sympy.Max(a, EPS)])
def test_a_largest_magnitude_keeps_squares_in_range(scale: sympy.Expr) -> None:
    """With an epsilon added too: it is what partial sums are scaled by."""
    found = derive(of((x / scale) ** 2, LARGEST))
    data = np.random.default_rng(0).standard_normal((4, 96)).astype(np.float32)
    data[1] *= 1e30
    data[2, 40] = 1e37
    data[3] *= 1e-30
    given = {"x": data, "w": np.ones_like(data)}
    exact = two_pass(found.cascade, {k: v.astype(np.float64) for k, v in given.items()})["t"]
    got = merge_tree(found, given, [32, 33, 31], tile=8)["t"]
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-37)


def test_means_of_sums_are_in_range() -> None:
    """Quotients of sums by sums are hoisted, and no larger than elements are."""
    assert derive(of(w * x / (1 + sympy.Abs(s)))).exact


def test_epsilons_stay_small() -> None:
    """Sympy's magnitudes bring sums over a common denominator, which is out of range."""
    inside = sympy.Abs(y) + EPS
    brought = sympy.Abs(x / sympy.sqrt(inside))
    assert brought.has(sympy.Integer(10**12))
    assert rescaled(brought) == sympy.Abs(x) / sympy.sqrt(inside)
    choice = sympy.Piecewise((1 / (1000 * y + 1), y > 0), (2 * y + 1, True))
    milli = sympy.Rational(1, 1000)
    assert rescaled(choice) == sympy.Piecewise((milli / (y + milli), y > 0), (2 * y + 1, True))
    assert rescaled(1 / (2 * y + 1)) == 1 / (2 * y + 1)


def test_a_magnitude_of_a_quotient_by_a_large_number() -> None:
    mean = Stage("m", SUM, w / sympy.sqrt(a + EPS))
    result = w / (EPS + sympy.Abs(mean.symbol / N))
    cascade = Cascade((LARGEST, mean), (x, w), (N,), rows={"r": result}, length=N)
    found = derive(cascade)
    data = np.random.default_rng(1).standard_normal((2, 24)).astype(np.float32)
    data[0, 3] = 1e37
    given = {"x": data, "w": np.ones_like(data)}
    exact = two_pass(cascade, {k: v.astype(np.float64) for k, v in given.items()})["r"]
    np.testing.assert_allclose(merge_tree(found, given, [8, 16], tile=4)["r"], exact, rtol=1e-5)


def test_a_maximum_of_nothing_is_what_separate_passes_make_of_it() -> None:
    """It counts as 0 within exponents alone; elsewhere infinities have results of their own."""
    seen = sympy.Symbol("seen", real=True)
    top = Stage("m", MAX, sympy.Piecewise((x, seen > 0), (-sympy.oo, True)))
    power = sympy.Piecewise((sympy.exp(x - top.symbol), seen > 0), (0, True))
    total = Stage("s", SUM, power)
    rows = {"scaled": w * x / (sympy.Abs(top.symbol) + EPS), "power": power}
    cascade = Cascade((top, total), (x, w, seen), (), {"top": top.symbol}, rows)
    found = derive(cascade)
    drawn = np.random.default_rng(2).standard_normal((2, 32)).astype(np.float32)
    given = {"x": drawn, "w": np.ones_like(drawn), "seen": np.array([[1.0], [0.0]]) + 0 * drawn}
    for made in (two_pass(cascade, given), merge_tree(found, given, [16, 16], tile=4)):
        assert made["top"][1] == -np.inf
        assert (made["scaled"][1] == 0).all() and (made["power"][1] == 0).all()
        np.testing.assert_allclose(made["scaled"][0], drawn[0] / np.abs(drawn[0].max()), rtol=1e-5)


@pytest.mark.parametrize("otherwise", [0, w * sympy.exp(x - LARGEST_OF_ALL.symbol)])
def test_exponentials_in_a_choice_by_a_result_stay_in_range(otherwise: sympy.Expr) -> None:
    """As torch spells a softmax that is 0 where a row is masked: no exponential is of x alone."""
    m = LARGEST_OF_ALL.symbol
    total, least = Stage("e", SUM, sympy.exp(x - m)), Stage("l", MIN, w)
    term = sympy.Piecewise(
        (otherwise, least.symbol > 0), (w * sympy.exp(x - m) / total.symbol, True)
    )
    derivation = derive(Cascade((LARGEST_OF_ALL, total, least, Stage("o", SUM, term)), (x, w)))
    rng = np.random.default_rng(3)
    data = {name: rng.normal(size=(4, 32)).astype(np.float32) for name in "xw"}
    data["x"] *= np.float32(1e4)
    data["w"][2:] = np.abs(data["w"][2:])
    wanted = two_pass(derivation.cascade, data)["o"]
    assert np.isfinite(wanted).all()
    found = merge_tree(derivation, data, [9, 0, 23])["o"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30, 1e18, 1e-36])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_a_power_of_a_divisor_divides_in_turns(scale: float, power: int) -> None:
    """As a gradient by a largest magnitude: what is divided is in range, its powers are not."""
    found = derive(of(w * x**power / a ** (power + 1), LARGEST))
    data = scale * np.random.default_rng(2).standard_normal((3, 96))
    given = {"x": data.astype(np.float32), "w": np.ones((3, 96), np.float32)}
    exact = two_pass(found.cascade, {k: v.astype(np.float64) for k, v in given.items()})["t"]
    got = merge_tree(found, given, [32, 33, 31], tile=8)["t"]
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-37)


def test_an_infinite_divisor_makes_0_of_what_it_divides() -> None:
    """Before a length divides, which may be too late: of an infinite variance gradients are 0."""
    r, v = sympy.symbols("r v", real=True)
    above, below = fraction(x * w * r / (N * v**2))
    assert above == [r, w, x]
    assert below == [v, v, N]
    above, below = fraction(x * r / v ** sympy.Rational(5, 2))
    assert set(above) == {r, x, 1 / sympy.sqrt(v)}
    assert below == [v, v]
    assert fraction(x / (7 * v**9))[1] == [v**9]
    assert fraction(sympy.exp(x - v) / 2)[1] == []
