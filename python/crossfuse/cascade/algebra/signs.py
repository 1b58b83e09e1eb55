"""Proofs that an expression has no negative value."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from crossfuse.cascade.expressions.fence import Fence


def nonnegative(expression: sympy.Expr) -> bool:
    """Whether an expression is proved not to be negative, by its symbols' assumptions.

    Parameters
    ----------
    expression : sympy.Expr
        Over symbols whose assumptions are trusted.

    Returns
    -------
    bool
        False where nothing is proved.
    """
    if isinstance(expression, Fence):
        return nonnegative(expression.args[0])
    if isinstance(expression, sympy.Piecewise):
        return all(nonnegative(value) for value, _ in expression.args)
    if isinstance(expression, sympy.Max):
        return any(nonnegative(each) for each in expression.args)
    if isinstance(expression, sympy.Min):
        return all(nonnegative(each) for each in expression.args)
    # Exponents may be masked by -oo, of which sympy does not say that they are real.
    if expression.is_nonnegative or isinstance(expression, sympy.exp):
        return True
    if isinstance(expression, sympy.Add | sympy.Mul):
        return all(nonnegative(each) for each in expression.args)
    if isinstance(expression, sympy.Pow):
        base, power = expression.args
        return bool(power.is_even) or nonnegative(base)
    return False


def positive(expression: sympy.Expr) -> bool:
    """Whether an expression is proved to be above 0; see `nonnegative`."""
    if expression.is_positive:
        return True
    if isinstance(expression, Fence):
        return positive(expression.args[0])
    if isinstance(expression, sympy.Add):
        parts = expression.args
        return all(nonnegative(each) for each in parts) and any(positive(each) for each in parts)
    if isinstance(expression, sympy.Max):
        return any(positive(each) for each in expression.args)
    if isinstance(expression, sympy.Mul | sympy.Min):
        return all(positive(each) for each in expression.args)
    if isinstance(expression, sympy.Pow):
        return positive(expression.args[0])
    return False


def has_one_sign(parts: Iterable[sympy.Expr]) -> bool:
    """Whether all parts of a sum are proved to be of one sign, so that they cannot cancel."""
    found = list(parts)
    return all(map(nonnegative, found)) or all(nonnegative(-each) for each in found)
