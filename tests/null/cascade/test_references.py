"""Sums over distances from several means and extremes, and sums that no split is good for."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.expressions.functions import (
    Abs,
    Fence,
    cancelled,
    fenced_product,
    fenced_sum,
    opened,
    settled,
)
from crossfuse.cascade.run import merge_tree, two_pass
from crossfuse.cascade.spec import MAX, MIN, SUM, Cascade, Stage
from crossfuse.errors import CascadeRefused

x, y, w = sympy.symbols("x y w", real=True)
N = sympy.Symbol("N", integer=True, positive=True)
LEAST, MOST = Stage("mn", MIN, x), Stage("mx", MAX, x)
TOTAL, OTHER = Stage("sx", SUM, x), Stage("sy", SUM, y)
mn, mx, mean, apart = LEAST.symbol, MOST.symbol, TOTAL.symbol / N, OTHER.symbol / N
EPS = sympy.Rational("1e-6")
EPSILON = float(np.finfo(np.float32).eps)


def cascade(term: sympy.Expr) -> Cascade:
    stages = (LEAST, MOST, TOTAL, OTHER, Stage("t", SUM, term))
    return Cascade(stages, (x, y, w), (N,), length=N)


TERMS = {
    "mean and maximum": (x - mean) * (mx - x),
    "minimum and maximum": (x - mn) * (mx - x),
    "three": (x - mean) * (mx - x) * (x - mn),
    "a range": (x - mn) / fenced_sum(mx - mn, EPS),
    "a weighted range": w * (x - mn) / fenced_sum(mx - mn, EPS),
    "a middle": (x - (mx + mn) / 2) ** 2,
    "covariance": (x - mean) * (y - apart),
    "a difference of two": (fenced_sum(x - mean, -(y - apart))) ** 2,
    "a reference as a factor": (x - mn) * mx,
    "multiplied out": sympy.expand((x - mean) ** 2),
}


@pytest.mark.parametrize("about", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("name", TERMS)
def test_as_exact_as_two_passes(name: str, about: float) -> None:
    found = derive(cascade(TERMS[name]))
    rng = np.random.default_rng(4)
    rows = {each: about + rng.standard_normal((12, 256)) for each in "xyw"}
    single = {each: array.astype(np.float32) for each, array in rows.items()}
    exact = two_pass(found.cascade, {k: v.astype(np.float64) for k, v in single.items()})["t"]
    error = np.abs(merge_tree(found, single, [64] * 4, tile=16)["t"] - exact).max()
    unfused = np.abs(two_pass(found.cascade, single)["t"] - exact).max()
    assert error <= 2 * unfused + 8 * EPSILON * np.abs(exact).max()


def test_infinities_stay_infinities() -> None:
    """Nothing that did not move is multiplied by an infinite moment."""
    squares = derive(Cascade((LEAST, Stage("t", SUM, (x - mn) ** 2)), (x,)))
    data = {"x": np.array([[1.0, 2.0, np.inf, 0.5], [3.0, 1.0, 2.0, np.inf]])}
    assert np.isinf(merge_tree(squares, data, [2, 2], tile=1)["t"]).all()


@pytest.mark.parametrize("at", [0, 2, 3])
def test_an_infinite_mean_is_infinite_where_it_is_seen(at: int) -> None:
    seen = {"S": TOTAL.symbol}
    variance = Cascade((TOTAL, Stage("t", SUM, (x - mean) ** 2)), (x,), (N,), seen, length=N)
    data = {"x": np.array([[1.0, 2.0, 0.5, 4.0], [1.0, 2.0, 0.5, 4.0], [1.0, 2.0, 0.5, 4.0]])}
    data["x"][0, at], data["x"][1, at] = np.inf, -np.inf
    found = merge_tree(derive(variance), data, [2, 2], tile=1)
    np.testing.assert_array_equal(found["S"], [np.inf, -np.inf, 7.5])
    assert np.isnan(found["t"][:2]).all()


def test_elements_that_are_sums_are_added_up_before_their_distance() -> None:
    """The least of them is 0 away from itself, also where rounding made it another number."""
    least = Stage("mn", MIN, x + y)
    far = derive(Cascade((least, Stage("t", SUM, Fence(x + y) - mn)), (x, y)))
    rng = np.random.default_rng(3)
    data = {
        "x": (1e4 + rng.standard_normal((64, 1))).astype(np.float32),
        "y": rng.standard_normal((64, 1)).astype(np.float32),
    }
    assert not np.any(merge_tree(far, data, [1], tile=1)["t"])


def test_moves_that_are_squared_alone_would_overflow() -> None:
    variance = derive(Cascade((TOTAL, Stage("t", SUM, (x - mean) ** 2)), (x,), (N,), length=N))
    drawn = 3e19 * (1 + 1e-3 * np.random.default_rng(5).standard_normal((3, 64)))
    data = {"x": drawn.astype(np.float32)}
    exact = two_pass(variance.cascade, {"x": data["x"].astype(np.float64)})["t"]
    np.testing.assert_allclose(merge_tree(variance, data, [16] * 4, tile=4)["t"], exact, rtol=1e-5)


def test_one_weight_may_be_most_of_them() -> None:
    """Of signed weights too: distances are from the mean by magnitudes of weights."""
    total = Stage("q", SUM, w)
    moment = Stage("S", SUM, w * x)
    term = w * (x - moment.symbol / total.symbol) ** 2
    found = derive(Cascade((total, moment, Stage("t", SUM, term)), (x, w)))
    rng = np.random.default_rng(6)
    weights = rng.uniform(0.5, 1, (6, 128))
    weights[:, 9] = 1e6
    data = {"x": 100 + rng.standard_normal((6, 128)), "w": weights}
    single = {name: each.astype(np.float32) for name, each in data.items()}
    exact = two_pass(found.cascade, {k: v.astype(np.float64) for k, v in single.items()})["t"]
    error = np.abs(merge_tree(found, single, [32] * 4, tile=8)["t"] - exact)
    unfused = np.abs(two_pass(found.cascade, single)["t"] - exact)
    assert error.max() <= 2 * unfused.max() + 8 * EPSILON * exact.max()


@pytest.mark.parametrize(
    ("term", "rule", "words"),
    [
        (x - OTHER.symbol / N, "cascade-cancels", "3 times the error of separate passes"),
        ((x - OTHER.symbol / N) ** 2, "cascade-cancels", r"a product of x - sy/N: multiplied out"),
        ((x * mx - y * OTHER.symbol) ** 2, "cascade-cancels", r"a product of mx·x - sy·y: multi"),
        ((x - TOTAL.symbol) ** 2, "cascade-cancels", r"a product of x - sx: .* where its mean is"),
    ],
)
def test_what_would_cancel_is_refused(term: sympy.Expr, rule: str, words: str) -> None:
    with pytest.raises(CascadeRefused, match=words) as caught:
        derive(cascade(term))
    assert (caught.value.refusal.rule, caught.value.refusal.where) == (rule, "stage t")
    assert "cut the cascade before this stage" in caught.value.refusal.instead


def test_squares_that_are_nearly_equal_are_tried() -> None:
    """Of rows of alternating signs they are, and so their variance is no sum of fourth powers."""
    square = Stage("q", SUM, (x - mean) ** 2)
    last = Stage("t", SUM, ((x - mean) ** 2 - square.symbol / N) ** 2)
    with pytest.raises(CascadeRefused, match=r"0\.001 apart, of alternating signs") as caught:
        derive(Cascade((TOTAL, square, last), (x,), (N,), length=N))
    assert (caught.value.refusal.rule, caught.value.refusal.where) == ("cascade-cancels", "stage t")


def test_a_part_of_a_sum_has_no_distance_from_its_mean() -> None:
    """`x - mean(x + y)` is a distance less `y`, with the rounding of the larger of the two."""
    both = Stage("s", SUM, x + y)
    mean = both.symbol / N
    with pytest.raises(CascadeRefused, match=r"a product of y - s/N") as caught:
        derive(Cascade((both, Stage("t", SUM, (x - mean) * (y - mean))), (x, y), (N,), length=N))
    assert caught.value.refusal.rule == "cascade-cancels"


def test_parts_of_one_sign_need_no_trial() -> None:
    """Both parts of an entropy are never positive, which is proved."""
    square = Stage("q", SUM, x**2)
    term = y**2 * square.symbol + x**2 * (1 + square.symbol)
    found = derive(Cascade((square, Stage("t", SUM, term)), (x, y)))
    assert len([each for each in found.slots if each.name.startswith("t")]) == 1


def test_a_fence_says_what_is_added_first() -> None:
    a, b, c = sympy.symbols("a b c", real=True)
    assert len(sympy.Add.make_args(fenced_sum(a - b, c))) == 2
    assert opened(fenced_sum(a - b, c)) == a - b + c
    assert fenced_product(sympy.Integer(3), a - b) == 3 * Fence(a - b)
    assert settled(Fence(a - b) * c) == (a - b) * c
    assert settled(sympy.exp(Fence(a - b))) == sympy.exp(a - b)
    i, j = sympy.symbols("i j", integer=True)
    assert fenced_sum(i + j, sympy.Integer(1)) == i + j + 1
    # Exact among each other, but not in front of anything else.
    assert fenced_sum(i + j, a) == a + Fence(i + j)
    assert fenced_product(sympy.Integer(3), i - j) == 3 * i - 3 * j
    assert fenced_product(EPS, i - j) == EPS * Fence(i - j)
    assert fenced_product(sympy.Integer(10**9), 1 - i) == 10**9 * Fence(1 - i)


def test_a_magnitude_leaves_fences_and_small_numbers() -> None:
    a, b, c = sympy.symbols("a b c", real=True)
    p = sympy.Symbol("p", nonnegative=True)
    apart = fenced_product(sympy.Rational(1, 10), fenced_sum(a - b, -c))
    assert Abs(apart) == sympy.Rational(1, 10) * Abs(Fence(fenced_sum(a - b, -c)))
    assert Abs(x / sympy.sqrt(p + EPS)) == Abs(x) / sympy.sqrt(p + EPS)
    # As sympy's own where nothing is lost.
    known = (x * p, x**2 * y, x**3, 1 / y, -3 * x, x - y, y - x, x * (y - x), x * sympy.exp(y))
    for each in (*known, x / y**3, sympy.exp(x), sympy.Integer(-2), -p):
        assert str(Abs(each)) == str(sympy.Abs(each))


def scores(element: sympy.Expr, first: str, squares: str) -> tuple[list[Stage], sympy.Expr]:
    """A layer norm: its two sums, and its rows."""
    total = Stage(first, SUM, element)
    apart = fenced_sum(element, -total.symbol / N)
    square = Stage(squares, SUM, apart**2)
    return [total, square], apart / sympy.sqrt(fenced_sum(square.symbol / N, EPS))


@pytest.mark.parametrize(("about", "spread"), [(0, 1), (1e2, 1e-3), (1e4, 1e-3), (1e5, 1)])
def test_a_layer_norm_of_a_layer_norm(about: float, spread: float) -> None:
    """The second mean is what rounding left of the first: it is taken off once, not twice."""
    inner, rows = scores(x, "S", "q")
    outer, rows = scores(rows, "S2", "q2")
    found = derive(Cascade((*inner, *outer), (x,), (N,), rows={"y": rows}, length=N))
    drawn = about + spread * np.random.default_rng(8).standard_normal((8, 96))
    single = {"x": drawn.astype(np.float32)}
    exact = two_pass(found.cascade, {"x": single["x"].astype(np.float64)})["y"]
    error = np.abs(merge_tree(found, single, [32] * 3, tile=16)["y"] - exact).max()
    unfused = np.abs(two_pass(found.cascade, single)["y"] - exact).max()
    assert error <= 2 * unfused + 8 * EPSILON


@pytest.mark.parametrize("level", [0.1, 0.3, 100.3, 1e37])
def test_equal_elements_are_their_mean(level: float) -> None:
    """Also where nothing but rows takes distances from it; a sum of them is rounded."""
    rows = {"plain": x - mean, "range": (x - mean) / fenced_sum(mx - mn, EPS)}
    found = derive(Cascade((TOTAL, LEAST, MOST), (x,), (N,), rows=rows, length=N))
    single = {"x": np.full((1, 100), level, np.float32)}
    streamed = merge_tree(found, single, [32, 32, 36], tile=16)
    assert not np.any(streamed["plain"]) and not np.any(streamed["range"])


def test_conditions_of_rows_and_of_elements_are_sampled() -> None:
    row = sympy.Symbol("r", real=True)
    shown = sympy.And(x < 1, row < 1, y < 2)
    masked = sympy.Piecewise((x * mx, shown), (0, True))
    stages = (MOST, Stage("t", SUM, masked))
    assert derive(Cascade(stages, (x, y), (row,))).exact


def test_fences_open_where_an_addend_cancels() -> None:
    assert cancelled(fenced_sum(x - mean, -fenced_sum(mx, -mean))) == x - mx
    assert cancelled(sympy.exp(fenced_sum(x - mean, mean - mx))) == sympy.exp(x - mx)
    kept = fenced_sum(mx - mn, EPS)
    assert cancelled(kept) == kept
    # Nothing vanishes of what is there twice.
    twice = fenced_sum(x - mean, x)
    assert cancelled(twice) == twice


@pytest.mark.parametrize("spread", [1.0, 1e3, 1e17])
def test_a_softmax_of_distances_from_the_mean_needs_no_mean(spread: float) -> None:
    """Subtracted and added again, a large mean left nothing of small elements, or infinities."""
    apart = fenced_sum(x, -mean)
    largest = Stage("m", MAX, apart)
    power = sympy.exp(fenced_sum(apart, -largest.symbol))
    total = Stage("s", SUM, power)
    rows = {"y": power / total.symbol}
    found = derive(Cascade((TOTAL, largest, total), (x,), (N,), rows=rows, length=N))
    data = {"x": spread * np.random.default_rng(7).standard_normal((8, 77))}
    data["x"][0, 0] = 1e6
    single = {"x": data["x"].astype(np.float32)}
    exact = two_pass(found.cascade, {"x": single["x"].astype(np.float64)})["y"]
    error = np.abs(merge_tree(found, single, [20, 57], tile=16)["y"] - exact).max()
    assert error <= 4 * EPSILON


def test_weights_of_distances_are_not_multiplied_out() -> None:
    """Of a gradient of a softmax of standard scores: both ``exp(x - c)`` and ``x - c``."""
    c, p = sympy.symbols("c p", real=True)
    largest = Stage("m", MAX, p * (x - c))
    weight = sympy.exp(p * (x - c) - largest.symbol)
    mass = Stage("s", SUM, weight)
    moment = Stage("d", SUM, weight * y / mass.symbol)
    pulled = weight / mass.symbol * (y - moment.symbol)
    stages = (largest, mass, moment, Stage("t", SUM, pulled * (x - c) * p))
    found = derive(Cascade(stages, (x, y), (c, p)))
    rng = np.random.default_rng(3)
    rows = {"x": 1e4 + rng.standard_normal((6, 96)), "y": rng.standard_normal((6, 96))}
    rows |= {"c": rows["x"].mean(axis=1), "p": rng.uniform(0.5, 1, 6)}
    single = {name: each.astype(np.float32) for name, each in rows.items()}
    exact = two_pass(found.cascade, {k: v.astype(np.float64) for k, v in single.items()})["t"]
    error = np.abs(merge_tree(found, single, [32] * 3, tile=8)["t"] - exact).max()
    unfused = np.abs(two_pass(found.cascade, single)["t"] - exact).max()
    assert error <= 2 * unfused + 8 * EPSILON * np.abs(exact).max()


def test_exponentials_below_an_extreme_that_is_rounded_are_refused() -> None:
    """The largest of w*x is rounded as far as x is from 0, not as far as its distance is."""
    r = sympy.Symbol("r", real=True)
    largest = Stage("m", MAX, r * (x - mean))
    mass = Stage("t", SUM, sympy.exp(r * (x - mean) - largest.symbol))
    with pytest.raises(
        CascadeRefused, match="parts that are added up at the end, and cancel"
    ) as caught:
        derive(Cascade((TOTAL, largest, mass), (x,), (N, r), length=N))
    assert (caught.value.refusal.rule, caught.value.refusal.where) == (
        "cascade-cancels",
        "stage m",
    )
    rows = {"p": sympy.exp(r * (x - mean) - largest.symbol)}
    with pytest.raises(CascadeRefused, match="stage p: found parts that are added up at the end"):
        derive(Cascade((TOTAL, largest), (x,), (N, r), rows=rows, length=N))
    plain = Stage("t", SUM, sympy.exp((x - mean) - Stage("m", MAX, x - mean).symbol))
    assert derive(Cascade((TOTAL, Stage("m", MAX, x - mean), plain), (x,), (N,), length=N)).exact


def test_elements_are_compared_with_the_mean_of_a_row() -> None:
    """The mean of equal elements is one of them, where a sum divided by its length is rounded."""
    above = sympy.Piecewise((x, x > mean), (0, True))
    found = derive(Cascade((TOTAL,), (x,), (N,), rows={"above": above}, length=N))
    rows = np.float32([0.1, -0.7, 100.3, 33000.7])[:, None] + np.zeros((1, 1000), np.float32)
    assert not merge_tree(found, {"x": rows}, [250] * 4, tile=32)["above"].any()
    drawn = np.random.default_rng(3).standard_normal((4, 1000)).astype(np.float32)
    got = merge_tree(found, {"x": drawn}, [250] * 4, tile=32)["above"]
    wide = drawn.astype(np.float64)
    assert np.array_equal(got, np.where(wide > wide.mean(axis=1, keepdims=True), drawn, 0))


def test_exponentials_below_several_extremes_keep_their_distances() -> None:
    """Of ``exp(x - m) * exp(y - n)`` neither m and n nor x and y are added up first."""
    m, n = Stage("m", MAX, x), Stage("n", MAX, y)
    weights = sympy.exp(x - m.symbol) * sympy.exp(y - n.symbol)
    stages = (m, n, Stage("s", SUM, weights))
    p, q = sympy.symbols("p q", real=True)
    given = {"g": sympy.exp(x - p) * sympy.exp(y - q)}
    found = derive(Cascade(stages, (x, y), (p, q), rows={"w": weights, **given}))
    top = Stage("t", MAX, sympy.exp(x - p))
    shares = sympy.exp(sympy.exp(x - p) - top.symbol) * sympy.exp(x - p)
    again = derive(Cascade((top, Stage("s", SUM, shares)), (x,), (p,), rows={"w": shares}))
    rng = np.random.default_rng(3)
    rows = {name: 1e5 + rng.standard_normal((6, 96)) for name in "xy"}
    rows |= {"p": rows["x"].max(axis=1), "q": rows["y"].max(axis=1)}
    single = {name: each.astype(np.float32) for name, each in rows.items()}
    double = {name: each.astype(np.float64) for name, each in single.items()}
    for derived in (found, again):
        exact = two_pass(derived.cascade, double)
        for name, got in merge_tree(derived, single, [32] * 3, tile=8).items():
            error = np.abs(got - exact[name]).max()
            assert error <= 8 * EPSILON * np.abs(exact[name]).max(), name


def test_masks_within_masks_are_not_divided_by() -> None:
    shown = sympy.Ne(w, 0)
    total = Stage("S", SUM, sympy.Piecewise((x, shown), (0, True)))
    inner = sympy.Piecewise((x - mn * total.symbol, shown), (0, True))
    term = -sympy.Piecewise((2 * y * inner, shown), (0, True))
    found = derive(Cascade((LEAST, total, Stage("t", SUM, term)), (x, w, y)))
    assert not any(each.contribution.has(sympy.zoo, sympy.nan) for each in found.slots)
    rng = np.random.default_rng(8)
    data = {name: rng.uniform(0.5, 1, (3, 48)) for name in "xyw"}
    data["w"][:, ::3] = 0
    due = two_pass(found.cascade, data)["t"]
    np.testing.assert_allclose(merge_tree(found, data, [16] * 3, tile=4)["t"], due, rtol=1e-9)


@pytest.mark.parametrize("level", [0.1, -1e4, 1e37])
def test_equal_elements_are_their_weighted_mean(level: float) -> None:
    """The gradient of a softmax's mean: a sum of weighted elements is rounded, and out of range."""
    top = Stage("m", MAX, x)
    power = sympy.exp(x - top.symbol)
    mass = Stage("s", SUM, power)
    moment = Stage("r", SUM, x * power / mass.symbol)
    rows = {"gradient": power / mass.symbol * (x - moment.symbol)}
    found = derive(Cascade((top, mass, moment), (x,), (N,), rows=rows, length=N))
    single = {"x": np.full((1, 100), level, np.float32)}
    assert not np.any(merge_tree(found, single, [32, 32, 36], tile=16)["gradient"])


def test_a_root_of_no_deviation_multiplies_what_divides_by_it() -> None:
    """Each distance over the root is 0 of a constant row; their sum over it is no number."""
    square = Stage("q", SUM, (x - mean) ** 2)
    root = sympy.sqrt(square.symbol)
    each = sympy.Piecewise((0, sympy.Eq(root, 0)), ((x - mean) / root, True))
    term = Stage("t", SUM, y * each)
    with pytest.raises(CascadeRefused, match="no number of rows of x, y about 0") as caught:
        derive(Cascade((TOTAL, square, term), (x, y), (N,), {"t": term.symbol}, length=N))
    assert caught.value.refusal.rule == "cascade-range"
