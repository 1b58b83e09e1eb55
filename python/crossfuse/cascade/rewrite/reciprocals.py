"""Divisions by numbers of a row as products: one division a row, whatever the divisor.

``x / s`` of many x is ``x * (1/s)``. But 1/s of s = 1e-41 is infinite where x/s is 0.5, and of
s = 2e38 it has lost bits. A power of two makes both factors moderate: ``(a x) * (1 / (a s))`` with
``a s`` near enough to 1, exact but for what is rounded once more. Divisors that are known to be
moderate, as the sum of a softmax, need no such factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from crossfuse.cascade.derivation import Slot, guarded, new, value
from crossfuse.cascade.expressions.fence import opened

#: Powers of two: reciprocals of what lies between have all bits, and squares of them do.
_LARGE = sympy.Integer(2) ** 62
_FACTOR = sympy.Integer(2) ** 64


def moderate(slots: Sequence[Slot]) -> frozenset[sympy.Symbol]:
    """Slots whose finished values lie between 1 and the number of elements.

    Parameters
    ----------
    slots : Sequence[Slot]
        The state.

    Returns
    -------
    frozenset[sympy.Symbol]
        Counts, and sums of exponentials below a maximum, in whatever form expressions use them.
    """
    names = [each.name for each in slots if _is_count(each) or _is_mass(each, slots)]
    return frozenset(form(name) for name in names for form in (value, new, guarded))


def _is_count(slot: Slot) -> bool:
    return slot.monoid.name == "sum" and slot.contribution == 1


def _is_mass(slot: Slot, slots: Sequence[Slot]) -> bool:
    """Whether a sum takes in 1 where a slot before it is largest."""
    if slot.monoid.name != "sum":
        return False
    shown = _unmasked(slot.contribution, sympy.S.Zero)
    base, power = shown.as_base_exp()
    if base not in (sympy.E, 2):
        return False
    tops = [each for each in slots if each.monoid.name == "max"]
    below = {
        opened(element) - form(each.name)
        for each in tops
        for element in (each.contribution, _unmasked(each.contribution, each.monoid.identity))
        for form in (new, guarded)
    }
    return opened(power) in below


def _unmasked(contribution: sympy.Expr, identity: sympy.Expr) -> sympy.Expr:
    if isinstance(contribution, sympy.Piecewise) and contribution.args[-1][0] == identity:
        return contribution.args[0][0]
    return contribution


def is_risky(factor: sympy.Expr, symbols: frozenset[sympy.Symbol]) -> bool:
    """Whether a factor is a reciprocal that may be out of range where the quotient is not.

    Parameters
    ----------
    factor : sympy.Expr
        Of a product.
    symbols : frozenset[sympy.Symbol]
        Of moderate numbers.

    Returns
    -------
    bool
        True where nothing is known of what is divided by.
    """
    if not isinstance(factor, sympy.Pow) or not factor.args[1].could_extract_minus_sign():
        return False
    return not _is_moderate(divisor(factor)[0], symbols)


def divisor(reciprocal: sympy.Pow) -> tuple[sympy.Expr, int]:
    """What is divided by, and how often."""
    base, power = reciprocal.args
    return (base, -int(power)) if power.is_Integer else (base**-power, 1)


def _is_moderate(below: sympy.Expr, symbols: frozenset[sympy.Symbol]) -> bool:
    """Whether a divisor needs no factor; a root is near enough to 1, of whatever number."""
    if below in symbols or (below.is_Symbol and below.is_integer):
        return True
    if below.is_number:
        return bool(1 / _LARGE < abs(below) < _LARGE)
    if isinstance(below, sympy.Pow):
        return bool(below.args[1] == sympy.S.Half)
    return isinstance(below, sympy.Mul) and all(_is_moderate(e, symbols) for e in below.args)


def scale(below: sympy.Expr) -> sympy.Expr:
    """The power of two that a divisor, and what it divides, are multiplied by."""
    size = sympy.Abs(below)
    return sympy.Piecewise((_FACTOR, size < 1 / _LARGE), (1 / _FACTOR, size > _LARGE), (1, True))
