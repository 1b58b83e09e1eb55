"""Counts the arithmetic of an element of the axis in expressions."""

from __future__ import annotations

from collections.abc import Iterable

import sympy

#: Functions that take more than one instruction of the special-function units.
_SEVERAL = {sympy.tanh: 2}
#: Functions that these units compute, beside powers that are no products.
_SPECIAL = (sympy.exp, sympy.log, sympy.tanh, sympy.sin, sympy.cos)


def exponentials(expressions: Iterable[sympy.Expr], elements: Iterable[sympy.Symbol]) -> int:
    """Instructions of the special-function units for each element, each value computed once.

    `elements` change along the axis; anything else is computed once a row and is not counted.
    """
    moving = set(elements)
    found = {each for each in _parts(expressions, moving) if _is_special(each)}
    return sum(_SEVERAL.get(each.func, 1) for each in found)


def operations(expressions: Iterable[sympy.Expr], elements: Iterable[sympy.Symbol]) -> int:
    """Additions, products and comparisons of each element; a multiply-add counts as one.

    Conditions of masks are not counted.
    """
    moving = set(elements)
    return sum(_count(each, moving) for each in set(_parts(expressions, moving)))


def _parts(expressions: Iterable[sympy.Expr], moving: set[sympy.Symbol]) -> list[sympy.Basic]:
    """Parts of expressions that change along the axis, but for conditions."""
    found: list[sympy.Basic] = []

    def visit(part: sympy.Basic) -> None:
        if not part.free_symbols & moving:
            return
        found.append(part)
        inner = [each for each, _ in part.args] if isinstance(part, sympy.Piecewise) else part.args
        for each in inner:
            visit(each)

    for each in expressions:
        visit(each)
    return found


def _is_special(part: sympy.Basic) -> bool:
    if isinstance(part, sympy.Pow):
        return not (part.exp.is_Integer and part.exp > 0)
    return isinstance(part, _SPECIAL)


def _count(part: sympy.Basic, moving: set[sympy.Symbol]) -> int:
    if isinstance(part, sympy.Pow):
        return int(part.exp) - 1 if part.exp.is_Integer and part.exp > 0 else 0
    if not isinstance(part, sympy.Add | sympy.Mul | sympy.Max | sympy.Min):
        return 0
    changing = [each for each in part.args if each.free_symbols & moving]
    # What does not change is one number; a sign is part of the instruction.
    fixed = [each for each in part.args if each not in changing and each != -1]
    terms = len(changing) + bool(fixed) - 1
    if isinstance(part, sympy.Add):
        products = sum(isinstance(_chosen(each), sympy.Mul) for each in changing)
        # A product of two that is added is one instruction, which `_count` of it has counted.
        return max(0, terms - products)
    return terms


def _chosen(part: sympy.Basic) -> sympy.Basic:
    """An element without its mask."""
    return part.args[0][0] if isinstance(part, sympy.Piecewise) else part
