"""Masks as factors, and factors as masks.

A sum skips an element by ``Piecewise((v, condition), (0, True))``. As a factor that is 1 or 0 the
mask takes part in products like any weight; in what is computed it is a choice again, so that
nothing that is masked is ever multiplied by 0.
"""

from __future__ import annotations

import sympy

from crossfuse.cascade.algebra.exponents import joined
from crossfuse.cascade.expressions.fence import Fence


def as_factors(term: sympy.Basic) -> sympy.Basic:
    """Write ``v if condition else 0`` as ``v * (1 if condition else 0)``, outside of functions."""
    if isinstance(term, sympy.Add | sympy.Mul | Fence):
        return term.func(*(as_factors(each) for each in term.args))
    if isinstance(term, sympy.Piecewise) and len(term.args) == 2 and term.args[1][0] == 0:
        shown, condition = term.args[0]
        if shown != 1:
            return as_factors(shown) * sympy.Piecewise((1, condition), (0, True))
    return term


def as_choices(term: sympy.Basic) -> sympy.Basic:
    """Undo `as_factors`."""
    if isinstance(term, sympy.Add | Fence):
        return term.func(*(as_choices(each) for each in term.args))
    if not isinstance(term, sympy.Mul):
        return term
    masks = [each for each in term.args if _is_mask(each)]
    if not masks:
        return term
    rest = sympy.Mul(*(each for each in term.args if each not in masks))
    condition = sympy.And(*(each.args[0][1] for each in masks))
    return sympy.Piecewise((rest, condition), (0, True))


def quotient(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr | None:
    """A quotient of what is masked alike; None if what is divided by is masked otherwise."""
    over = list(sympy.Mul.make_args(as_factors(above)))
    under = list(sympy.Mul.make_args(as_factors(below)))
    for mask in filter(_is_mask, tuple(under)):
        if mask not in over:
            return None
        over.remove(mask)
        under.remove(mask)
    return joined(sympy.Mul(*over) / sympy.Mul(*under))


def masks_all(term: sympy.Expr, condition: sympy.Basic) -> bool:
    """Whether all products of a term, with masks as factors, are 0 where a condition is false."""
    asked = set(sympy.And.make_args(condition))
    return all(
        asked
        <= {
            part
            for each in sympy.Mul.make_args(product)
            if _is_mask(each)
            for part in sympy.And.make_args(each.args[0][1])
        }
        for product in sympy.Add.make_args(term)
    )


def _is_mask(term: sympy.Basic) -> bool:
    return (
        isinstance(term, sympy.Piecewise)
        and len(term.args) == 2
        and (term.args[0][0], term.args[1][0]) == (1, 0)
    )
