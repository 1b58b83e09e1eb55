"""What occurs more than once in expressions, taken out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sympy


def shared(
    expressions: Sequence[sympy.Expr], taken: Iterable[sympy.Symbol] = ()
) -> tuple[list[tuple[sympy.Symbol, sympy.Expr]], list[sympy.Expr]]:
    """Take out of expressions what occurs more than once.

    Parameters
    ----------
    expressions : Sequence[sympy.Expr]
        Numbers, not conditions.
    taken : Iterable[sympy.Symbol]
        Symbols besides those of the expressions whose names no new one may have.

    Returns
    -------
    definitions : list[tuple[sympy.Symbol, sympy.Expr]]
        New symbols, real, in an order in which each uses earlier ones only.
    expressions : list[sympy.Expr]
        What is left of each.
    """
    held: dict[sympy.Basic, sympy.Dummy] = {}
    inside = [_hold_conditions(each, held) for each in map(sympy.sympify, expressions)]
    names = {each.name for one in expressions for each in sympy.sympify(one).free_symbols}
    names |= {each.name for each in taken}
    symbols = (each for each in sympy.numbered_symbols("t", real=True) if each.name not in names)
    definitions, left = sympy.cse(inside, symbols=symbols)
    back = {symbol: condition for condition, symbol in held.items()}
    return (
        [(symbol, _put_back(each, back)) for symbol, each in definitions],
        [_put_back(each, back) for each in left],
    )


def _hold_conditions(expression: sympy.Basic, held: dict[sympy.Basic, sympy.Dummy]) -> sympy.Basic:
    """Conditions as symbols: sympy would share parts of them as if they were numbers."""
    if isinstance(expression, sympy.Piecewise):
        sides = []
        for value, condition in expression.args:
            if condition not in (sympy.true, sympy.false):
                condition = held.setdefault(condition, sympy.Dummy(f"c{len(held)}"))
            sides.append((_hold_conditions(value, held), condition))
        return sympy.Piecewise(*sides, evaluate=False)
    if not expression.args:
        return expression
    return expression.func(*(_hold_conditions(each, held) for each in expression.args))


def _put_back(expression: sympy.Basic, held: Mapping[sympy.Dummy, sympy.Basic]) -> sympy.Basic:
    """Symbols as conditions: as they were, for sympy takes a real ``m == -oo`` to be false."""
    if isinstance(expression, sympy.Piecewise):
        sides = [(_put_back(value, held), held.get(test, test)) for value, test in expression.args]
        return sympy.Piecewise(*sides, evaluate=False)
    if not expression.args:
        return expression
    return expression.func(*(_put_back(each, held) for each in expression.args))
