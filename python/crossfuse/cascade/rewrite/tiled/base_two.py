"""Rewrites exponentials to the base of two, with the factor folded into other constants.

``exp(scale*x - m)`` is ``2**(scale*log2(e)*x - m2)`` if the maximum ``m2`` is of
``scale*log2(e)*x``. The hardware has ``exp2`` alone, and so no multiplication is left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import sympy
from sympy.core.relational import Relational

from crossfuse.cascade.derivation import Derivation, Slot, guarded, left, new, right, value
from crossfuse.cascade.expressions.functions import Fence, with_parts

#: As a fraction: sympy would turn ``2**(x/log(2))`` back into ``exp(x)``.
LOG2E = sympy.Rational(1 / math.log(2))


def base_two(derivation: Derivation) -> Derivation:
    """Write a derivation with exponentials to the base of two.

    The slots of maxima and minima that stand in exponents hold them times ``log2(e)``; results are
    the same.
    """
    names = [each.name for each in derivation.slots if _is_scaled(each, derivation)]
    change = _Change({form(name) for name in names for form in (value, new, guarded, left, right)})
    return replace(
        derivation,
        slots=tuple(_slot(each, each.name in names, change) for each in derivation.slots),
        stages=_mapped(derivation.stages, change.run),
        results=_mapped(derivation.results, change.run),
        rows=_mapped(derivation.rows, change.run),
    )


def times(expression: sympy.Expr, factor: sympy.Rational) -> sympy.Expr:
    """Multiply an expression by a positive number, inside of sums, choices and constants."""
    if expression.is_infinite:
        return expression
    if isinstance(expression, sympy.Piecewise | sympy.Add | Fence | sympy.Max | sympy.Min):
        return with_parts(expression, lambda each: times(each, factor))
    if isinstance(expression, sympy.Mul):
        number, rest = expression.as_coeff_Mul()
        if number > 0 and number != 1:
            return times(rest, number * factor)
    return factor * expression


def rebuilt(
    expression: sympy.Basic, change: Callable[[sympy.Basic], sympy.Basic | None]
) -> sympy.Basic:
    """Replace parts of an expression; where `change` returns None, their parts in turn.

    Conditions are left as they are written: sympy takes a real ``m == -oo`` to be false.
    """
    found = change(expression)
    if found is not None:
        return found
    if not expression.args:
        return expression
    args = [rebuilt(each, change) for each in expression.args]
    if isinstance(expression, sympy.Piecewise | Relational):
        return expression.func(*args, evaluate=False)
    return expression.func(*args)


def _is_scaled(slot: Slot, derivation: Derivation) -> bool:
    """Whether a slot is a maximum or minimum of its own that stands in an exponent."""
    own = {form(slot.name) for form in (value, new, guarded, left, right)}
    alone = slot.monoid.name in ("max", "min") and not slot.corrected
    states = {form(each.name) for each in derivation.slots for form in (value, new, guarded)}
    if not alone or slot.contribution.free_symbols & states:
        return False
    if slot.merge != slot.monoid.combine(left(slot.name), right(slot.name)):
        return False
    others = [each for each in derivation.slots if each is not slot]
    used = [part for each in others for part in (each.contribution, each.carry)]
    powers = [power for each in used for power in each.atoms(sympy.exp)]
    return any(power.free_symbols & own for power in powers)


def _mapped(
    expressions: Mapping[str, sympy.Expr], change: Callable[[sympy.Expr], sympy.Expr]
) -> dict[str, sympy.Expr]:
    return {name: change(each) for name, each in expressions.items()}


def _slot(slot: Slot, scaled: bool, change: _Change) -> Slot:
    if not scaled:
        return replace(
            slot,
            contribution=change.run(slot.contribution),
            carry=change.run(slot.carry),
            merge=None if slot.merge is None else change.run(slot.merge),
            guard=None if slot.guard is None else change.run(slot.guard),
        )
    return replace(
        slot,
        contribution=times(change.run(slot.contribution), LOG2E),
        init=times(slot.init, LOG2E),
        guard=None if slot.guard is None else times(change.run(slot.guard), LOG2E),
    )


class _Change:
    """Substitutes scaled symbols, and powers of two for exponentials."""

    def __init__(self, scaled: set[sympy.Symbol]) -> None:
        self.scaled = scaled

    def run(self, expression: sympy.Expr) -> sympy.Expr:
        return rebuilt(expression, self.part)

    def part(self, expression: sympy.Basic) -> sympy.Basic | None:
        if expression in self.scaled:
            return expression / LOG2E
        if isinstance(expression, sympy.exp):
            return sympy.Pow(2, times(self.run(expression.args[0]), LOG2E))
        infinite = isinstance(expression, Relational) and any(
            each.is_infinite for each in expression.args
        )
        # An infinity is the same whatever it is scaled by.
        return expression if infinite else None
