"""Moments about a mean that is only known at the end, without cancellation.

The mean is a slot of its own, which each tile moves. A sum of ``w * P(u - mean)`` moves with it by
the binomial formula: with ``d = mean - mean'``

    sum of w P(u - mean') = sum of w P((u - mean) + d)

whose terms are powers of d times sums of lower degree. Those of degree one, with the mean's own
weight, would be 0 if the mean were not rounded: they are kept (`Centre.rest`), and correct the mean
at the next step. Those of degree zero are sums of weights. No difference of large numbers is ever
taken, unlike by ``sum x**2 - n * mean**2``. The same holds of distances from a largest or least
element, such as ``log(p)`` has in the entropy of a softmax: ``sum e**(u - m) * (u - m)`` moves by
d times the sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class Mean:
    """A sum that later stages use as a mean.

    Attributes
    ----------
    stage : str
        The sum.
    weight : str
        The stage that sums weights; empty where elements are counted.
    element : sympy.Expr
        What is averaged.
    scale : sympy.Expr
        The sum is this times the sum of weights times the mean; over stages and invariants.
    signed : bool
        Whether weights may be negative, so that the mean may not exist before the end.
    """

    stage: str
    weight: str
    element: sympy.Expr
    scale: sympy.Expr
    signed: bool = False


@dataclass(frozen=True)
class Centre:
    """A mean in the state, or a largest or least element.

    Attributes
    ----------
    element : sympy.Expr
        What is averaged or compared.
    symbol : sympy.Symbol
        Its slot.
    mass : sympy.Symbol | None
        The slot of weights; None of an element.
    distance : sympy.Dummy
        Stands for an element's distance from the mean.
    rest : sympy.Symbol | None
        The slot of the first moment about it, which only rounding keeps from being 0; None where
        distances are from the mean, but no moments are taken about it.
    """

    element: sympy.Expr
    symbol: sympy.Symbol
    mass: sympy.Symbol | None
    distance: sympy.Dummy
    rest: sympy.Symbol | None = None


def centred(
    term: sympy.Expr, centres: Mapping[sympy.Symbol, tuple[sympy.Expr, sympy.Symbol]]
) -> sympy.Expr | None:
    """Write a term over distances from means.

    Parameters
    ----------
    term : sympy.Expr
        Over elements and symbols of means.
    centres : Mapping
        For the symbol of a mean what is averaged, and what stands for the distance from it.

    Returns
    -------
    sympy.Expr | None
        Without means; None if it depends on them otherwise.
    """
    found = term
    for mean, (element, distance) in centres.items():
        if mean not in found.free_symbols:
            continue
        joined = _joined(found, mean, element, distance)
        if mean in joined.free_symbols:
            joined = _shifted(joined, mean, element, distance)
        if mean in joined.free_symbols:
            return None
        found = joined
    return found


def _joined(
    part: sympy.Basic, mean: sympy.Symbol, element: sympy.Expr, distance: sympy.Symbol
) -> sympy.Basic:
    """Differences of an element and the mean as distances, wherever they are spelt out."""
    if mean not in part.free_symbols or part.is_Atom:
        return part
    if isinstance(part, sympy.Add):
        slope = part.coeff(mean)
        apart = part - slope * (mean - element)
        if slope != 0 and mean not in slope.free_symbols | apart.free_symbols:
            fewer = len(sympy.Add.make_args(apart)) < len(part.args)
            if fewer and not slope.free_symbols & element.free_symbols:
                return apart - slope * distance
    return part.func(*(_joined(each, mean, element, distance) for each in part.args))


def _shifted(
    term: sympy.Expr, mean: sympy.Symbol, element: sympy.Expr, distance: sympy.Symbol
) -> sympy.Expr:
    """The term at the mean plus a distance, multiplied out: polynomials that were expanded."""
    if not element.is_Symbol or sympy.count_ops(term) > 200:
        return term
    return sympy.expand(term.xreplace({element: mean + distance}))


def is_polynomial(term: sympy.Expr, distance: sympy.Symbol) -> bool:
    """Whether distances are only multiplied and added."""
    if distance not in term.free_symbols or term == distance:
        return True
    if isinstance(term, sympy.Piecewise):
        tests = set().union(*(test.free_symbols for _, test in term.args))
        return distance not in tests and all(is_polynomial(v, distance) for v, _ in term.args)
    if isinstance(term, sympy.Add | sympy.Mul):
        return all(is_polynomial(each, distance) for each in term.args)
    if isinstance(term, sympy.Pow):
        base, power = term.args
        return bool(power.is_Integer and power > 0) and is_polynomial(base, distance)
    return False
