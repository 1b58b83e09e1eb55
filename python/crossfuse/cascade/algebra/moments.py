"""Moments about a mean that is only known at the end, without cancellation.

The mean is a slot of its own, which each tile moves. A sum of ``w * P(u - mean)`` moves with it by
the binomial formula: with ``d = mean - mean'``

    sum of w P(u - mean') = sum of w P((u - mean) + d)

whose terms are powers of d times sums of lower degree. Those of degree one, with the mean's own
weight, would be 0 if the mean were not rounded: they have a slot (`Centre.rest`), and correct the
mean at the next step. Those of degree zero are sums of weights. No difference of large numbers is
ever taken, unlike by ``sum x**2 - n * mean**2``. The same holds of distances from a largest or
least element, such as ``log(p)`` has in the entropy of a softmax: ``sum e**(u - m) * (u - m)``
moves by d times the sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import sympy

from crossfuse.cascade.expressions.functions import Fence, opened, with_parts


@dataclass(frozen=True)
class Mean:
    """A sum that later stages use as a mean."""

    #: The stage that sums.
    stage: str
    #: The stage that sums weights; empty where elements are counted.
    weight: str
    #: The averaged expression.
    element: sympy.Expr
    #: The sum is this times the sum of weights times the mean; over stages and invariants.
    scale: sympy.Expr
    #: Whether weights may be negative, so that the mean may not exist before the end.
    signed: bool = False
    #: Whether anything but sums about the mean shows it: an infinite one is then to stay infinite,
    #: where those sums, and what is computed from them, are no numbers.
    visible: bool = False
    #: Whether masks among the weights multiply what they hide, as flags do.
    flagged: bool = False


@dataclass(frozen=True)
class Centre:
    """A reference point of distances: a mean in the state, or a largest or least element."""

    #: The averaged or compared expression.
    element: sympy.Expr
    #: Its slot.
    symbol: sympy.Symbol
    #: The slot of weights; None of an extreme.
    mass: sympy.Symbol | None
    #: Stands for an element's distance from the centre.
    distance: sympy.Dummy
    #: The slot of the first moment about it, which only rounding keeps from being 0; None where
    #: distances are from the mean, but no moments are taken about it.
    rest: sympy.Symbol | None = None
    #: Stands for how far the centre moves.
    move: sympy.Dummy = field(default_factory=lambda: sympy.Dummy("move", real=True))

    @property
    def kind(self) -> str:
        """The reference point in words."""
        return "an extreme" if self.mass is None else "the mean"


def centred(
    term: sympy.Expr, reference: sympy.Symbol, element: sympy.Expr, distance: sympy.Symbol
) -> sympy.Expr | None:
    """Rewrite a term over distances of an element from a mean or an extreme, the reference.

    The reference may be left as a factor. None if distances do not take its place anywhere, or it
    is still added to elements.
    """
    joined = _joined(term, reference, element, distance)
    if _mixed(joined, reference, element):
        joined = _joined(_flat(joined, reference, element), reference, element, distance)
    if _mixed(joined, reference, element):
        shifted = _shifted(joined, reference, element, distance)
        parts = [each for each in sympy.Add.make_args(shifted) if reference in each.free_symbols]
        if all(distance in each.free_symbols for each in parts):
            joined = shifted
    return joined if distance in joined.free_symbols else None


def _mixed(part: sympy.Basic, reference: sympy.Symbol, element: sympy.Expr) -> bool:
    """Whether the reference is added to elements anywhere."""
    if not _has_both(part, reference, element):
        return False
    return part.is_Add or any(_mixed(each, reference, element) for each in part.args)


def _flat(part: sympy.Basic, reference: sympy.Symbol, element: sympy.Expr) -> sympy.Basic:
    """Multiply out sums of elements and the reference, without the fences between the two."""
    if not _has_both(part, reference, element):
        return part
    if isinstance(part, sympy.Add):
        free = {reference, *element.free_symbols}
        return sympy.Add(*(expanded(opened(each), free) for each in part.args))
    return part.func(*(_flat(each, reference, element) for each in part.args))


def _has_both(part: sympy.Basic, reference: sympy.Symbol, element: sympy.Expr) -> bool:
    free = part.free_symbols
    return reference in free and bool(free & element.free_symbols)


def _joined(
    part: sympy.Basic, reference: sympy.Symbol, element: sympy.Expr, distance: sympy.Symbol
) -> sympy.Basic:
    """Replace differences of an element and the reference by distances wherever they occur."""
    if reference not in part.free_symbols or part.is_Atom:
        return part
    if isinstance(part, sympy.Add):
        slope = part.coeff(reference)
        if slope != 0 and not slope.free_symbols & (element.free_symbols | {reference}):
            for whole in (Fence(element), opened(element)):
                apart = part - slope * (reference - whole)
                if reference not in apart.free_symbols and _cancels(part, apart, whole):
                    return apart - slope * distance
    return part.func(*(_joined(each, reference, element, distance) for each in part.args))


def _cancels(part: sympy.Add, apart: sympy.Expr, element: sympy.Expr) -> bool:
    """Whether taking the distance out of a sum leaves less of the element in it.

    Of an element that is itself a sum, all addends are to be there: that `x - mean` is a distance
    of `x + y` less `y` is true, and has the rounding of the larger of the two.
    """
    before, after = part.coeff(element), apart.coeff(element)
    if before != 0 and before.is_number and after.is_number:
        return bool(abs(after) < abs(before))
    left = 0 if apart == 0 else len(sympy.Add.make_args(apart))
    return left + 1 + len(sympy.Add.make_args(element)) <= len(part.args)


def _shifted(
    term: sympy.Expr, reference: sympy.Symbol, element: sympy.Expr, distance: sympy.Symbol
) -> sympy.Expr:
    """The term at the reference plus a distance, multiplied out: polynomials that were expanded."""
    if not element.is_Symbol or sympy.count_ops(term) > 200:
        return term
    apart = opened(term).xreplace({element: reference + distance})
    return expanded(apart, {reference, distance})


def expanded(term: sympy.Expr, variables: Collection[sympy.Symbol]) -> sympy.Expr:
    """Multiply out what depends on variables, and leave all else as it is.

    Of ``d * (x - c) * exp(x - c)``, a weight of the distance d, sympy would make a difference of
    two large products, and an exponential that is infinite.
    """
    held: dict[sympy.Basic, sympy.Dummy] = {}
    apart = sympy.expand(_with_held(term, frozenset(variables), held))
    return apart.xreplace({dummy: part for part, dummy in held.items()})


def _with_held(
    part: sympy.Basic, variables: frozenset[sympy.Symbol], held: dict[sympy.Basic, sympy.Dummy]
) -> sympy.Basic:
    """A term with a symbol for each part that has no variable."""
    if part.free_symbols & variables:
        return with_parts(part, lambda each: _with_held(each, variables, held))
    if part.is_Atom or part.is_number:
        return part
    return held.setdefault(part, sympy.Dummy(f"held{len(held)}", real=True))


def is_polynomial(term: sympy.Expr, distance: sympy.Symbol) -> bool:
    """Whether distances are only multiplied and added."""
    if distance not in term.free_symbols or term == distance:
        return True
    if isinstance(term, sympy.Piecewise):
        tests = set().union(*(test.free_symbols for _, test in term.args))
        return distance not in tests and all(is_polynomial(v, distance) for v, _ in term.args)
    if isinstance(term, sympy.Add | sympy.Mul | Fence):
        return all(is_polynomial(each, distance) for each in term.args)
    if isinstance(term, sympy.Pow):
        base, power = term.args
        return bool(power.is_Integer and power > 0) and is_polynomial(base, distance)
    return False
