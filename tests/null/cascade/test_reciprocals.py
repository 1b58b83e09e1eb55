"""Quotients of a row by products: as exact as divisions, whatever the divisor."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from crossfuse.cascade.expressions.functions import Unevaluated, function
from crossfuse.cascade.rewrite.phases import Shared, is_risky, moderate, share
from crossfuse.cascade.spec import MAX, SUM, Slot, new, value

x, s, c = sympy.symbols("x s c", real=True)
DIVISORS = (1e-45, 1e-41, 1e-38, 1e-20, 1.0, 3e18, 1e38, 3e38)


def evaluated(parts: Shared, data: dict[sympy.Symbol, np.ndarray]) -> np.ndarray:
    values = dict(data)
    for symbol, each in (*parts.fixed, *parts.definitions):
        symbols = list(each.free_symbols)
        found = function(symbols, each)(*(values[one] for one in symbols))
        values[symbol] = np.asarray(found, np.float32)
    (left,) = parts.expressions
    symbols = list(left.free_symbols)
    return np.asarray(function(symbols, left)(*(values[one] for one in symbols)))


@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("expression", [x / s, c * x / s, x**2 / s**2], ids=str)
def test_any_divisor(expression: sympy.Expr, size: float, divisor: float) -> None:
    below = np.float32(divisor)
    drawn = np.random.default_rng(1).uniform(0.1, 1, 32)
    with np.errstate(all="ignore"):
        above = (size * drawn * np.float64(below)).astype(np.float32)
        data = {x: above, s: below, c: np.float32(0.5)}
        found = evaluated(share([expression], [x]), data)
    known = [x, s, c]
    wanted = function(known, expression)(*(np.float64(data[each]) for each in known))
    if expression == x**2 / s**2 and not 1e-18 < divisor < 1e18:
        return  # the square is what leaves the range
    np.testing.assert_allclose(found, wanted, rtol=5e-7)


def test_what_is_divided_is_multiplied_before_it_is_scaled_again() -> None:
    """As a gradient by a range: a quotient by 1e30, times 2**-64, is 0; times 1e30 it is not."""
    (left,) = share([c * x / s**2], [x, c]).expressions
    outer = max(left.atoms(Unevaluated), key=sympy.count_ops)
    inside = [each for each in outer.args[0].args if each.free_symbols & {x, c}]
    assert len(inside) == 1 and isinstance(inside[0], Unevaluated)
    assert {x, c} <= inside[0].free_symbols


@pytest.mark.parametrize("divisor", [1e-26, 1.0, 1e13, 1e26, 1e37])
def test_a_power_of_halves_divides_by_a_number_and_its_root(divisor: float) -> None:
    """As a gradient of a norm: of a variance of 1e26 the power 3/2 is infinite."""
    variance = sympy.Symbol("v", positive=True)
    root = np.float32(np.sqrt(divisor))
    above = (np.random.default_rng(1).uniform(0.1, 1, 32) * root).astype(np.float32)
    data = {x: above, c: root, variance: np.float32(divisor)}
    found = evaluated(share([c * x * variance ** sympy.Rational(-3, 2)], [x]), data)
    wanted = np.float64(above) * np.float64(root) * np.float64(data[variance]) ** -1.5
    np.testing.assert_allclose(found, wanted, rtol=5e-7)


def test_what_is_known_needs_no_factor() -> None:
    top = Slot("m", MAX, x, value("m"), None, -sympy.oo)
    mass = Slot("s", SUM, sympy.exp(x - new("m")), value("s"), None, sympy.S.Zero)
    known = moderate((top, mass))
    assert value("s") in known and value("m") not in known
    assert not is_risky(1 / value("s"), known)
    assert is_risky(1 / value("m"), known)
    assert not is_risky(1 / sympy.sqrt(value("m")), known)
    assert not is_risky(value("m"), known)
    (product,) = share([x / value("s")], [x], (top, mass)).expressions
    assert len(product.args) == 2
