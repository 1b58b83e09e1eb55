"""What sympy is to leave as it is stays a real number to it."""

from __future__ import annotations

import pytest
import sympy

from cascade_patterns import named
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.expressions.functions import UNBOUNDED, Unevaluated, magnitude
from crossfuse.cascade.rewrite.phases import scale

x, y, n = sympy.symbols("x y n", real=True)
ratio = Unevaluated(x / n)
moment = Unevaluated(
    sympy.Piecewise((magnitude(y - ratio * (2 * x - n * ratio)), x > 0), (UNBOUNDED - x, True))
)


def test_is_not_evaluated() -> None:
    assert n * ratio != x
    assert Unevaluated(x + y) - x != y


def test_sums_and_products_with_it_are_real_and_commute() -> None:
    assert (y - ratio * (2 * x - n * ratio)).is_extended_real
    assert x * ratio == ratio * x


@pytest.mark.parametrize("power", [sympy.S.Half, sympy.Rational(3, 2), 2, 3])
@pytest.mark.parametrize("base", [ratio, moment])
def test_divisors_are_scaled_without_complex_parts(base: sympy.Expr, power: sympy.Expr) -> None:
    found = scale((sympy.Rational(1, 100000) + base / n) ** power)
    assert not found.has(sympy.re, sympy.im, sympy.I, sympy.conjugate)


def test_divisors_over_a_finished_moment_are_scaled() -> None:
    """A gradient of a layer norm divides by such a power of a variance."""
    derivation = derive(named("variance").cascade)
    found = derivation.stages["M"]
    assert found.has(Unevaluated)
    assert not scale((found + 1) ** sympy.Rational(3, 2)).has(sympy.re, sympy.im)
