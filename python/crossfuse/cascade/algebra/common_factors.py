"""Takes factors that addends share out of sums.

``exp(x - m)/s * (d - r/s)``, never ``d*exp(x - m)/s - r*exp(x - m)/s**2``: the two addends may be
nearly equal, and each factor that both are rounded by is an error of their size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

import sympy

from crossfuse.cascade.expressions.functions import Fence, unopened


def shared_out(
    expression: sympy.Expr, elements: Set[sympy.Basic], invariants: Set[sympy.Basic] = frozenset()
) -> sympy.Expr:
    """Take powers of what depends on results out of addends that share them.

    With them come all other powers that these addends share. Numbers stay where they are, and so do
    factors of a product that are the same for all elements.
    """
    if isinstance(expression, Fence):
        return Fence(shared_out(expression.args[0], elements, invariants))
    if isinstance(expression, sympy.Mul) and expression.free_symbols & elements:
        return unopened(*(shared_out(each, elements, invariants) for each in expression.args))
    if not isinstance(expression, sympy.Add):
        return expression
    # A fenced sum that becomes a product needs no fence, and is an addend like others.
    expression = sympy.Add(*(shared_out(each, elements, invariants) for each in expression.args))
    powers = {each: _powers(each) for each in expression.args}
    count = Counter(
        (base, bool(power > 0))
        for each in powers.values()
        for base, power in each.items()
        if base.free_symbols - elements - invariants
    )
    found = [key for key, number in count.items() if number > 1]
    if not found:
        return expression
    base, above = max(found, key=lambda key: (count[key], str(key)))
    members = [each for each, of in powers.items() if base in of and (of[base] > 0) == above]
    shared = _shared([powers[each] for each in members])
    factor = sympy.Mul(*(base**power for base, power in shared.items()))
    inner = sympy.Add(*(Fence(_without(each, shared)) for each in members))
    rest = [each for each in expression.args if each not in members]
    return sympy.Add(factor * shared_out(inner, elements, invariants), *rest)


#: Exponents by base.
_Powers = dict[sympy.Expr, sympy.Expr]


def _powers(product: sympy.Expr) -> _Powers:
    found: _Powers = {}
    for each in sympy.Mul.make_args(product):
        base, power = _power(each)
        if not base.is_number and power.is_Rational:
            found[base] = power
    return found


def _power(factor: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Base and exponent; an exponential is a base of its own."""
    if isinstance(factor, sympy.exp):
        return factor, sympy.S.One
    base, power = factor.as_base_exp()
    return base, power


def _without(product: sympy.Expr, shared: _Powers) -> sympy.Expr:
    """A product without the powers that are taken out of it."""
    left = []
    for each in sympy.Mul.make_args(product):
        base, power = _power(each)
        left.append(base ** (power - shared[base]) if base in shared else each)
    return unopened(*left)


def _shared(several: list[_Powers]) -> _Powers:
    """The powers that all of several have, of each the one nearest to 0."""
    first, *others = several
    found = {}
    for base, power in first.items():
        every = [power, *(each.get(base, sympy.S.Zero) for each in others)]
        if all(each > 0 for each in every) or all(each < 0 for each in every):
            found[base] = min(every, key=abs)
    return found
