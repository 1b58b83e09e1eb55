"""Arithmetic fences: they preserve the source's order of additions inside sympy.

sympy joins ``(a - b) + c`` into one sum of three addends, in an order of its own. In floating point
that is another number: ``(max - min) + 1e-6`` of a constant row is 1e-6, ``(max + 1e-6) - min`` may
be 0. An arithmetic fence keeps the inner sum one addend (compare ``__arithmetic_fence`` of clang);
so it does with a sum that a number multiplies, which sympy would multiply out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE


class Fence(sympy.Expr):
    """A sum inside of a sum, or behind a number, that sympy leaves where it is.

    Only sums need a fence: anything else, and any number, is returned without one.
    """

    is_commutative = True
    precedence = PRECEDENCE["Add"]

    def __new__(cls, inner: Any) -> Any:
        """Fence an expression, or return it if it needs no fence."""
        inner = sympy.sympify(inner)
        needed = inner.is_Add and not inner.is_number
        return sympy.Expr.__new__(cls, inner) if needed else inner

    def _numpycode(self, printer: Any) -> str:
        return f"({printer._print(self.args[0])})"

    def _sympystr(self, printer: Any) -> str:
        return str(printer._print(self.args[0]))


def _same_as_inner(assumption: str) -> Any:
    return lambda fence: getattr(fence.args[0], f"is_{assumption}")


_SIGNS = ("zero", "nonnegative", "nonpositive", "positive", "negative")
for _assumption in (
    *("real", "extended_real", "finite", "infinite", "integer", *_SIGNS),
    *(f"extended_{sign}" for sign in _SIGNS[1:]),
):
    setattr(Fence, f"_eval_is_{_assumption}", _same_as_inner(_assumption))


def fenced_sum(*addends: sympy.Expr) -> sympy.Expr:
    """A sum of addends each of which is added up first.

    Sums among them get a fence; those of whole numbers none, which are exact in any order.
    """
    return sympy.Add(*(each if each.is_integer else Fence(each) for each in addends))


def fenced_product(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """A product in which no number is multiplied into a sum."""
    if right.is_number:
        left, right = right, left
    if left.is_number and not right.is_integer:
        return left * Fence(right)
    return left * right


def opened(expression: sympy.Basic, symbols: Iterable[sympy.Symbol] | None = None) -> sympy.Basic:
    """Remove the fences from an expression, or those around any of some symbols."""
    if not expression.has(Fence):
        return expression
    wanted = None if symbols is None else frozenset(symbols)

    def opens(part: sympy.Basic) -> bool:
        if not isinstance(part, Fence):
            return False
        return wanted is None or bool(part.free_symbols & wanted)

    return rebuilt_without(expression, opens)


def rebuilt_without(expression: sympy.Basic, opens: Any) -> sympy.Basic:
    """Remove the fences that a test selects; conditions stay as they are."""
    if not expression.has(Fence):
        return expression
    if isinstance(expression, sympy.Piecewise):
        sides = [(rebuilt_without(value, opens), test) for value, test in expression.args]
        return sympy.Piecewise(*sides, evaluate=False)
    args = [rebuilt_without(each, opens) for each in expression.args]
    return args[0] if opens(expression) else expression.func(*args)


def settled(expression: sympy.Basic) -> sympy.Basic:
    """Remove the fences that change nothing.

    Left are those around an addend of a sum, and behind a number: as a factor among others, or
    inside of a function, a sum is added up first anyway.
    """
    if not expression.has(Fence):
        return expression
    if isinstance(expression, Fence):
        return settled(expression.args[0])
    if isinstance(expression, sympy.Piecewise):
        sides = [(settled(value), test) for value, test in expression.args]
        return sympy.Piecewise(*sides, evaluate=False)
    if isinstance(expression, sympy.Add):
        return fenced_sum(*(settled(each) for each in expression.args))
    if isinstance(expression, sympy.Mul):
        number, rest = expression.as_coeff_Mul()
        inside = [settled(each) for each in sympy.Mul.make_args(rest)]
        if number != 1 and len(inside) == 1:
            return fenced_product(number, inside[0])
        return number * sympy.Mul(*inside)
    return expression.func(*(settled(each) for each in expression.args))


# Common subexpressions.


def shared(
    expressions: Sequence[sympy.Expr], taken: Iterable[sympy.Symbol] = ()
) -> tuple[list[tuple[sympy.Symbol, sympy.Expr]], list[sympy.Expr]]:
    """Take common subexpressions out of expressions that are numbers, not conditions.

    Returns their definitions, whose symbols are new and real and use earlier ones only, and the
    rest of each expression. New symbols get no names of `taken`.
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
    """Replace conditions by symbols: sympy would share parts of them as if they were numbers."""
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
    """Restore conditions as they were, for sympy takes a real ``m == -oo`` to be false."""
    if isinstance(expression, sympy.Piecewise):
        sides = [(_put_back(value, held), held.get(test, test)) for value, test in expression.args]
        return sympy.Piecewise(*sides, evaluate=False)
    if not expression.args:
        return expression
    return expression.func(*(_put_back(each, held) for each in expression.args))
