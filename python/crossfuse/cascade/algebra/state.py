"""The state while it is derived: slots, and expressions over them as each side sees them.

Inside the derivation a slot is a symbol of its own kind (`Kept.symbol`) whose sign is known. Only
when an expression goes into a slot, a result or a row does it become the value so far, the new one,
or what stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import sympy

from crossfuse.cascade.algebra.exponents import nonnegative, positive, powers_of_products
from crossfuse.cascade.expressions.functions import Unevaluated
from crossfuse.cascade.spec import Monoid, Slot, guarded, new, value

#: From a name to the symbol of one side: `value`, `new`, `left` or `right`.
Side = Callable[[str], sympy.Symbol]


@dataclass(eq=False)
class Kept:
    """A `Slot` in the making."""

    name: str
    monoid: Monoid
    contribution: sympy.Expr
    carry: sympy.Expr
    merge: sympy.Expr | None
    #: Stands for the slot inside the derivation.
    symbol: sympy.Dummy
    #: Whether anything uses it where it may have no inverse.
    stands_in: bool = False
    #: The value of no elements, if that is not the reduction's own.
    begun: sympy.Expr | None = None

    @property
    def signed(self) -> bool:
        """Whether it may be negative."""
        return not self.symbol.is_nonnegative

    @property
    def extreme(self) -> bool:
        """Whether it is a largest or least element."""
        return self.monoid.name in ("max", "min")

    @property
    def infinite(self) -> bool:
        """Whether it is an infinity while no element has been reduced."""
        # The largest of no magnitudes is 0, but there is no least one.
        return self.monoid.ordered and (self.signed or self.monoid.name != "max")

    def slot(self) -> Slot:
        """The finished slot, with its guard if anything needs that."""
        # The largest of no magnitudes is 0, as of magnitudes that are all 0.
        largest = self.monoid.name == "max" and not self.signed
        init = sympy.S.Zero if largest else self.monoid.identity
        init = init if self.begun is None else self.begun
        brought = powers_of_products(self.contribution)
        return Slot(self.name, self.monoid, brought, self.carry, self.merge, init, self.guard())

    def guard(self) -> sympy.Expr | None:
        """The stand-in for the new value where that has no inverse; None if none is used."""
        if not self.stands_in:
            return None
        symbol = new(self.name)
        if self.infinite:
            return chosen(symbol, self.monoid.identity, sympy.S.Zero, symbol)
        return chosen(symbol, sympy.S.Zero, sympy.S.One, symbol)


@dataclass(frozen=True)
class _Rules:
    """What an expression over slots is where a slot has no inverse."""

    #: Whether infinities stay; else they count as 0.
    infinite: bool = False
    #: Whether 0 divides as in separate passes; else it counts as 1 where it is never negative.
    divides: bool = False


class State:
    """Slots in the order of updates; `taken` are names that no slot may have."""

    def __init__(self, taken: frozenset[str]) -> None:
        self.taken = set(taken)
        self.kept: list[Kept] = []
        self._of: dict[sympy.Basic, Kept] = {}

    @property
    def symbols(self) -> frozenset[sympy.Basic]:
        """Symbols that stand for slots inside the derivation."""
        return frozenset(self._of)

    def of(self, symbol: sympy.Basic) -> Kept:
        """The slot that a symbol stands for."""
        return self._of[symbol]

    def among(self, kept: Kept, symbols: Iterable[sympy.Basic]) -> bool:
        """Whether any of some symbols stands for a slot."""
        return any(self._of.get(each) is kept for each in symbols)

    def same(self, monoid: Monoid, contribution: sympy.Expr) -> sympy.Symbol | None:
        """A new symbol for a slot that reduces the same already; None if there is none.

        Not the slot's own symbol, so that nothing cancels that may be 0 or infinite: the sum
        divided by itself is 0 where all elements are masked.
        """
        for each in self.kept:
            if each.monoid == monoid and each.contribution == contribution:
                return self.alias(each)
        return None

    def alias(self, kept: Kept) -> sympy.Symbol:
        """Another symbol of a slot."""
        symbol = sympy.Dummy(kept.name, **kept.symbol.assumptions0)
        self._of[symbol] = kept
        return symbol

    def fresh(self, wanted: str) -> str:
        """Take a free name like the wanted one."""
        number, name = 0, wanted
        while name in self.taken:
            number += 1
            name = f"{wanted}{number}"
        self.taken.add(name)
        return name

    def add(
        self,
        name: str,
        monoid: Monoid,
        contribution: sympy.Expr,
        carry: sympy.Expr,
        merge: sympy.Expr | None,
        *,
        no_sign: bool,
    ) -> sympy.Symbol:
        """Add a slot whose name is taken already; returns its symbol."""
        symbol = sympy.Dummy(name, nonnegative=True) if no_sign else sympy.Dummy(name, real=True)
        self._of[symbol] = Kept(name, monoid, contribution, carry, merge, symbol)
        self.kept.append(self._of[symbol])
        return symbol

    def raw(self, expression: sympy.Basic, side: Side) -> sympy.Basic:
        """An expression over the slots of one side, as they are."""
        return expression.xreplace({each: side(kept.name) for each, kept in self._of.items()})

    def usable(self, expression: sympy.Expr, side: Side = value) -> sympy.Expr:
        """An expression over new slots, defined where a state has seen nothing, or zeros alone.

        A maximum of nothing counts as 0, unless it is the whole expression; a divisor that is
        proved not to be negative counts as 1 where it is 0.
        """
        if expression in self.symbols:
            return self.raw(expression, side)
        return self._defined(expression, side, _Rules())

    def within(self, expression: sympy.Expr, side: Side) -> sympy.Expr:
        """A part of an expression over new slots: as `usable`, but infinities never remain."""
        return self._defined(expression, side, _Rules())

    def term(self, expression: sympy.Expr) -> sympy.Expr:
        """A term of a separate pass: as `within`, but divided as in `finished`."""
        return self._defined(expression, value, _Rules(divides=True))

    def finished(self, expression: sympy.Expr) -> sympy.Expr:
        """An expression over finished slots, for results and rows: what separate passes have.

        A maximum of nothing counts as 0 within exponents alone, a divisor that is 0 as 1 where it
        is the sum of exponentials below such a maximum, or a largest magnitude. Anything else is
        what it is over an infinity or over 0.
        """
        if expression in self.symbols:
            return self.raw(expression, value)
        return self._defined(expression, value, _Rules(infinite=True, divides=True))

    def _defined(self, part: sympy.Basic, side: Side, rules: _Rules) -> sympy.Basic:
        """Substitute one side's slots."""
        if not part.free_symbols & self.symbols:
            return part
        if isinstance(part, sympy.Symbol):
            kept = self.of(part)
            stands_in = kept.infinite and not rules.infinite
            return self._stand_in(kept) if stands_in else side(kept.name)
        if isinstance(part, sympy.Max | sympy.Min):
            return self.raw(part, side)
        if isinstance(part, sympy.exp):
            addends = sympy.Add.make_args(part.args[0])
            return sympy.exp(sympy.Add(*(self._power(each, side, rules) for each in addends)))
        if isinstance(part, sympy.Piecewise):
            sides = [
                (self._defined(each, side, rules), self.raw(test, side)) for each, test in part.args
            ]
            return sympy.Piecewise(*sides)
        if isinstance(part, sympy.Pow) and part.args[1].could_extract_minus_sign():
            base, power = part.args
            return sympy.Pow(self._divisor(base, side, rules), self._defined(power, side, rules))
        if isinstance(part, sympy.Mul):
            return self._product(part, side, rules)
        return part.func(*(self._defined(each, side, rules) for each in part.args))

    def _product(self, part: sympy.Mul, side: Side, rules: _Rules) -> sympy.Expr:
        """A product that keeps a slot divided by itself, which is NaN of 0 and of infinity."""
        factors = [self._defined(each, side, rules) for each in part.args]
        parts = [each.as_base_exp() for each in factors]
        below = {base for base, power in parts if power.could_extract_minus_sign()}
        kept = [
            Unevaluated(each)
            if base.is_Symbol and base in below and not power.could_extract_minus_sign()
            else each
            for each, (base, power) in zip(factors, parts, strict=True)
        ]
        return sympy.Mul(*kept)

    def _power(self, part: sympy.Expr, side: Side, rules: _Rules) -> sympy.Expr:
        """An addend of an exponent: one that is -oo makes the exponential 0, as it should."""
        if part in self.symbols and self.of(part).monoid.name in ("max", "topk", "argmax"):
            return self.raw(part, side)
        return self._defined(part, side, replace(rules, infinite=False))

    def _divisor(self, base: sympy.Expr, side: Side, rules: _Rules) -> sympy.Expr:
        if rules.divides and not any(map(self._is_empty, base.free_symbols & self.symbols)):
            return self._defined(base, side, rules)
        if base in self.symbols and not (self.of(base).signed or self.of(base).infinite):
            return self._stand_in(self.of(base))
        defined = self._defined(base, side, rules)
        if positive(base) or not (nonnegative(base) or self._is_range(base)):
            return defined
        return chosen(defined, sympy.S.Zero, sympy.S.One, defined)

    def _is_empty(self, symbol: sympy.Basic) -> bool:
        """Whether a slot that is 0 says that no element was seen, or zeros alone.

        It is a largest magnitude, or a sum of exponentials below a maximum of the same elements:
        these are 0 of a row of -oo by the stand-in for that maximum. Weights may be 0 in any row,
        and so may exponentials of some elements below the maximum of all.
        """
        kept = self.of(symbol)
        if kept.monoid.name == "max":
            return not kept.signed
        sides = [(kept.contribution, sympy.true)]
        if isinstance(kept.contribution, sympy.Piecewise):
            sides = [each for each in kept.contribution.args if each[0] != 0]
        hides = len(sides) == 1 and sides[0][1] != sympy.true
        tops = [
            each
            for each in self.kept
            if each.infinite and (not hides or each.contribution.has(sides[0][1]))
        ]
        below = {each.symbol for each in tops} | {guarded(each.name) for each in tops}
        return all(isinstance(e, sympy.exp) and e.free_symbols & below for e, _ in sides)

    def _is_range(self, base: sympy.Expr) -> bool:
        """Whether it is a maximum minus the minimum of the same elements."""
        if not (isinstance(base, sympy.Add) and len(base.args) == 2):
            return False
        found = {each.as_coeff_Mul() for each in base.args}
        if {number for number, _ in found} != {sympy.S.One, sympy.S.NegativeOne}:
            return False
        if not all(symbol in self.symbols for _, symbol in found):
            return False
        ends = {number: self.of(symbol) for number, symbol in found}
        names = (ends[sympy.S.One].monoid.name, ends[sympy.S.NegativeOne].monoid.name)
        alike = len({each.contribution for each in ends.values()}) == 1
        return alike and names == ("max", "min")

    def _stand_in(self, kept: Kept) -> sympy.Symbol:
        kept.stands_in = True
        return guarded(kept.name)


def chosen(
    tested: sympy.Expr, equal: sympy.Expr, then: sympy.Expr, otherwise: sympy.Expr
) -> sympy.Expr:
    """``then`` where two are equal, else ``otherwise``.

    Not evaluated: sympy takes a real number not to be an infinity.
    """
    test = sympy.Eq(tested, equal, evaluate=False)
    return sympy.Piecewise((then, test), (otherwise, True), evaluate=False)
