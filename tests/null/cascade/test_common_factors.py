"""Factors that addends share, taken out of them."""

from __future__ import annotations

import pytest
import sympy

from crossfuse.cascade.algebra.separation import shared_out
from crossfuse.cascade.expressions.functions import Fence

x, d, s, v, r = sympy.symbols("x d s v r", real=True)
e = sympy.exp(x - s)
GIVEN = {x, d}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (d * e / s - r * e / s**2, e / s * (d - r / s)),
        (d / sympy.sqrt(v) - x * r / (256 * v ** sympy.Rational(3, 2)),
         (d - x * r / (256 * v)) / sympy.sqrt(v)),
        # What all addends do not share stays outside, and nothing is lost.
        (d * e + r * e + x, e * (d + r) + x),
        (Fence(d * e + r * e) + x * e, e * (Fence(d + r) + x)),
        # Elements alone are no factor to take out, nor powers of different signs.
        (x * d + x**2, x * d + x**2),
        (d * s + x / s, d * s + x / s),
        # Inside of products too, where numbers are not multiplied in.
        (v * Fence(d * e / s - r * e / s**2) + x, v * e / s * (d - r / s) + x),
        (x + 3 * Fence(s * v - r * v), x + 3 * Fence(s * v - r * v)),
        (3 * Fence(x - s) / v - r / v, (3 * Fence(x - s) - r) / v),
        # In exponents: the largest element has the exponent 0.
        (d * sympy.exp(x**2 / v**2 - s / v**2), d * sympy.exp((x**2 - s) / v**2)),
        (x - s, x - s),
        (x * s, x * s),
    ],
    ids=str,
)  # fmt: skip
def test_shared_factors(given: sympy.Expr, wanted: sympy.Expr) -> None:
    found = shared_out(given, GIVEN)
    assert found == wanted or str(found) == str(wanted)
    values = {x: 0.3, d: -1.7, s: 2.5, v: 1.25, r: 0.75}
    before, after = (float(each.replace(Fence, lambda inner: inner).xreplace(values))
                     for each in (given, found))  # fmt: skip
    assert after == pytest.approx(before, rel=1e-12)
