"""What one step of a stream computes, in which order; pure algebra.

Contributions that need a new value of an earlier slot wait until a sweep over the tile has made
it: the maximum first, then the sum of exponentials. So slots are parted into phases. Each phase
is one sweep over the elements of a tile, which stay in registers, and then new values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from crossfuse.cascade.derivation import Slot, guarded, new
from crossfuse.cascade.expressions.functions import factored
from crossfuse.cascade.expressions.sharing import shared
from crossfuse.cascade.rewrite.reciprocals import divisor, is_risky, moderate, scale

Definition = tuple[sympy.Symbol, sympy.Expr]


@dataclass(frozen=True)
class Shared:
    """Expressions with what they share computed once, and what does not change hoisted.

    Attributes
    ----------
    fixed : tuple[Definition, ...]
        What is the same for all elements.
    definitions : tuple[Definition, ...]
        What several expressions use, for each element.
    expressions : tuple[sympy.Expr, ...]
        What is left of them.
    """

    fixed: tuple[Definition, ...]
    definitions: tuple[Definition, ...]
    expressions: tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Phase:
    """One sweep over a tile, and the slots whose new values follow.

    Attributes
    ----------
    slots : tuple[Slot, ...]
        In the order of updates.
    """

    slots: tuple[Slot, ...]


def phases(slots: Sequence[Slot]) -> tuple[Phase, ...]:
    """Part slots into sweeps, as few as there can be.

    Parameters
    ----------
    slots : Sequence[Slot]
        The state, in the order of updates.

    Returns
    -------
    tuple[Phase, ...]
        Each with slots whose contributions need new values of earlier phases only.
    """
    level: dict[str, int] = {}
    for slot in slots:
        needed = [0]
        for name, each in level.items():
            fresh = {new(name), guarded(name)}
            if slot.contribution.free_symbols & fresh:
                needed.append(each + 1)
            if slot.carry.free_symbols & fresh:
                needed.append(each)
        level[slot.name] = max(needed)
    count = 1 + max(level.values(), default=-1)
    return tuple(Phase(tuple(s for s in slots if level[s.name] == i)) for i in range(count))


def share(
    expressions: Sequence[sympy.Expr],
    changing: Iterable[sympy.Symbol],
    slots: Sequence[Slot] = (),
) -> Shared:
    """Compute once what expressions share, and once for all elements what does not change.

    Factors and addends that no element changes are gathered, so that a division by a sum becomes
    one reciprocal and products with it, see `crossfuse.cascade.rewrite.reciprocals`. Addends of a
    row are added to a difference, not to what is subtracted: of ``x - m - log(s)`` the first two
    are close together, and large.

    Parameters
    ----------
    expressions : Sequence[sympy.Expr]
        Of each element.
    changing : Iterable[sympy.Symbol]
        Elements.
    slots : Sequence[Slot]
        The state, of which it is known what may be divided by without care.

    Returns
    -------
    Shared
        The same expressions in parts.
    """
    hoist = _Hoist(frozenset(changing), moderate(slots))
    inside = [hoist.run(each) for each in expressions]
    fixed = tuple((symbol, each) for each, symbol in hoist.found.items())
    definitions, left = shared(inside)
    return Shared(fixed, tuple(definitions), tuple(left))


class _Hoist:
    """Replaces what does not change by symbols."""

    def __init__(
        self, changing: frozenset[sympy.Symbol], moderate: frozenset[sympy.Symbol]
    ) -> None:
        self.changing = changing
        self.moderate = moderate
        self.found: dict[sympy.Expr, sympy.Symbol] = {}

    def run(self, expression: sympy.Expr) -> sympy.Expr:
        if expression.is_number or expression.is_Atom:
            return expression
        if not self.changes(expression):
            return self.symbol(expression)
        if isinstance(expression, sympy.Piecewise):
            # Conditions stay as they are: sympy takes a real ``m == -oo`` to be false.
            sides = [(self.run(value), test) for value, test in expression.args]
            return sympy.Piecewise(*sides, evaluate=False)
        if isinstance(expression, sympy.exp):
            factor, difference = factored(expression.args[0])
            if factor != 1:
                return sympy.exp(factor * sympy.UnevaluatedExpr(self.run(difference)))
        if isinstance(expression, sympy.Add):
            return self.added(expression)
        if isinstance(expression, sympy.Mul):
            return self.gathered(expression)
        return expression.func(*(self.run(each) for each in expression.args))

    def gathered(self, expression: sympy.Expr) -> sympy.Expr:
        still = [each for each in expression.args if not self.changes(each)]
        moving = [self.run(each) for each in expression.args if self.changes(each)]
        if not still:
            return expression.func(*moving)
        risky = [each for each in still if is_risky(each, self.moderate)]
        if isinstance(expression, sympy.Mul) and risky:
            return self.divided(sympy.Mul(*moving), still, risky)
        return expression.func(self.run(expression.func(*still)), *moving)

    def divided(
        self, moving: sympy.Expr, still: list[sympy.Expr], risky: list[sympy.Expr]
    ) -> sympy.Expr:
        """A product with reciprocals that may be out of range, one after another."""
        above = sympy.Mul(*(each for each in still if each not in risky))
        for each in risky:
            below, times = divisor(each)
            factor = self.symbol(scale(below))
            for _ in range(times):
                reciprocal = self.symbol(above / sympy.UnevaluatedExpr(factor * below))
                moving = sympy.UnevaluatedExpr(factor * moving) * reciprocal
                above = sympy.S.One
        return moving

    def added(self, expression: sympy.Add) -> sympy.Expr:
        """A sum, the differences of elements and slots first."""
        still = [each for each in expression.args if not self.changes(each)]
        slots = [each for each in still if each.as_coeff_Mul()[1].is_Symbol]
        others = [each for each in still if each not in slots and not each.is_number]
        if not slots or not others:
            return self.gathered(expression)
        near = self.gathered(sympy.Add(*(each for each in expression.args if each not in others)))
        return sympy.UnevaluatedExpr(near) + self.run(sympy.Add(*others))

    def changes(self, expression: sympy.Expr) -> bool:
        return bool(expression.free_symbols & self.changing)

    def symbol(self, expression: sympy.Expr) -> sympy.Symbol:
        fresh = sympy.Dummy(f"h{len(self.found)}", real=True)
        return self.found.setdefault(expression, fresh)
