"""Products of exponentials as exponentials of sums: ``exp(x - m)``, never ``exp(x) * exp(-m)``."""

from __future__ import annotations

import sympy


def joined(expression: sympy.Basic) -> sympy.Basic:
    """Join the exponentials of every product in an expression.

    Parameters
    ----------
    expression : sympy.Basic
        Any.

    Returns
    -------
    sympy.Basic
        Equal to it.
    """
    if not expression.has(sympy.exp):
        return expression
    if isinstance(expression, sympy.Piecewise):
        # Conditions stay as they are: sympy takes a real number not to be an infinity.
        sides = [(joined(value), test) for value, test in expression.args]
        return sympy.Piecewise(*sides, evaluate=False)
    if expression.args:
        expression = expression.func(*(joined(each) for each in expression.args))
    if not isinstance(expression, sympy.Mul):
        return expression
    powers = [each for each in expression.args if isinstance(each, sympy.exp)]
    if len(powers) < 2:
        return expression
    rest = [each for each in expression.args if each not in powers]
    return sympy.Mul(sympy.exp(sympy.Add(*(each.args[0] for each in powers))), *rest)
