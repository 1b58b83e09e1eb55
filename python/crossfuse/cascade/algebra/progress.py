"""A derivation in the making: the state so far, what stages became, and how."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from crossfuse.cascade.algebra.exponents import nonnegative
from crossfuse.cascade.algebra.moments import Centre
from crossfuse.cascade.algebra.rescaling import Rescaling, as_choices
from crossfuse.cascade.algebra.separation import (
    Cancels,
    Coupled,
    Product,
    cancelling,
    coupled,
    products,
)
from crossfuse.cascade.algebra.state import State
from crossfuse.cascade.derivation import Step, left, right, value
from crossfuse.cascade.spec import SUM, Cascade, Monoid, Stage


class Progress:
    """A derivation in the making, which the rules for each kind of stage read and extend."""

    def __init__(self, cascade: Cascade) -> None:
        self.cascade = cascade
        self.elements = frozenset(cascade.elements)
        taken = {each.name for each in (*cascade.elements, *cascade.invariants)}
        taken |= {each.name for each in cascade.stages} | set(cascade.results) | set(cascade.rows)
        self.state = State(frozenset(taken))
        #: Means among the slots.
        self.centres: list[Centre] = []
        #: Results of stages over slots.
        self.known: dict[sympy.Symbol, sympy.Expr] = {}
        #: Results of choices as they are, including the -oo of an empty choice.
        self.direct: dict[sympy.Symbol, sympy.Expr] = {}
        self.places = {each.index_symbol for each in cascade.stages} - {None}
        #: How stages were derived.
        self.steps: list[Step] = []
        #: Stages whose sum became several, whose parts may cancel.
        self.split: list[str] = []
        #: Slots that are moments about a mean or an extreme.
        self.moments: set[sympy.Symbol] = set()
        #: What results have in place of the values of moments.
        self.finished: dict[sympy.Basic, sympy.Expr] = {}
        #: Other symbols of such slots, and what stands for the values themselves in results.
        self.unfinished: dict[sympy.Basic, sympy.Dummy] = {}

    def results(self, term: sympy.Expr) -> list[sympy.Symbol]:
        """The results of earlier stages that a term uses."""
        found = term.free_symbols & (self.state.symbols | self.places)
        return sorted(found, key=lambda each: str(each.name))

    def separated(self, stage: Stage, term: sympy.Expr) -> list[Product]:
        """Separate a term into products, or refuse the stage."""
        results = self.results(term)
        try:
            return products(term, self.moving(), results, near=self.distances | self.moments)
        except Cancels as found:
            raise cancelling(stage, self.spelt(found.part)) from None
        except Coupled as found:
            raise self.coupled(stage, term, found.part) from None

    def coupled(self, stage: Stage, term: sympy.Expr, part: sympy.Basic) -> Exception:
        """The refusal of a term that is not separable."""
        elements = sorted(term.free_symbols & self.moving(), key=lambda each: str(each.name))
        return coupled(stage, term, part, elements, self.results(term), self.spelt)

    @property
    def distances(self) -> frozenset[sympy.Symbol]:
        """Symbols that stand for distances from means."""
        return frozenset(each.distance for each in self.centres)

    def moving(self) -> frozenset[sympy.Symbol]:
        """What changes along the axis: elements, and their distances from means."""
        return self.elements | self.distances

    def centres_in(self, expression: sympy.Expr) -> list[Centre]:
        """Means whose distances an expression uses."""
        return [each for each in self.centres if each.distance in expression.free_symbols]

    def spelt(self, expression: sympy.Basic) -> sympy.Basic:
        """An expression over slots as messages show it, with distances as differences."""
        apart = {
            each.distance: each.element - value(self.state.of(each.symbol).name)
            for each in self.centres
        }
        return self.state.raw(expression, value).xreplace(apart)

    def keep(self, name: str, monoid: Monoid, element: sympy.Expr) -> sympy.Symbol:
        """Add the slot of a reduction that needs no correction, or reuse an equal one.

        Returns the slot's symbol. Slots with places, which go by their names, are not reused.
        """
        merge = None
        if not monoid.keeps_places:
            same = self.state.same(monoid, element)
            if same is not None:
                return same
            merge = monoid.combine(left(name), right(name))
        no_sign = monoid.name in ("sum", "prod", "max", "min") and nonnegative(element)
        return self.state.add(name, monoid, element, value(name), merge, no_sign=no_sign)

    def accumulate(
        self, name: str, rescaling: Rescaling, g: sympy.Expr, *, fresh: bool = False
    ) -> sympy.Symbol:
        """Add the slot of a sum with a rescaling, or reuse an equal one; returns its symbol.

        With `fresh`, the slot gets a new name like `name`.
        """
        brought = as_choices(rescaling.contribution(g, self.state))
        same = self.state.same(SUM, brought)
        if same is not None:
            return same
        name = self.state.fresh(name) if fresh else name
        merge = rescaling.merged((left(name), right(name)), self.state)
        carry = rescaling.moved(value(name), self.state)
        return self.state.add(name, SUM, brought, carry, merge, no_sign=nonnegative(g))

    def about_rounded(self, kept: sympy.Expr) -> sympy.Expr:
        """Slots of moments about their means as these are, rounded, in results too."""
        for each in kept.free_symbols & self.state.symbols:
            slot = self.state.of(each)
            if value(slot.name) in self.finished:
                other = self.state.alias(slot)
                self.unfinished[other] = sympy.Dummy(slot.name, **other.assumptions0)
                kept = kept.xreplace({each: other})
        return kept

    def count(self) -> sympy.Symbol:
        """The symbol of the slot that counts elements."""
        same = self.state.same(SUM, sympy.S.One)
        return same if same is not None else self.keep(self.state.fresh("n"), SUM, sympy.S.One)

    def first(self, element: sympy.Expr) -> sympy.Expr | None:
        """An expression of the first element of a row; None where that is not known."""
        firsts = self.cascade.firsts
        if not element.free_symbols & self.elements <= set(firsts):
            return None
        return element.xreplace(dict(firsts))

    def named(self, stage: Stage, number: int = 0, count: int = 1) -> str:
        """The name of one of a stage's slots."""
        return stage.name if count == 1 else self.state.fresh(f"{stage.name}_{number}")

    def names(self, parts: Sequence[sympy.Expr]) -> tuple[str, ...]:
        """Names of the slots in expressions, in the order of the state."""
        free = set().union(*(each.free_symbols for each in parts)) if parts else set()
        return tuple(each.name for each in self.state.kept if self.state.among(each, free))

    def done(self, stage: Stage, result: sympy.Expr, step: Step) -> None:
        """Record what a stage became."""
        self.known[stage.symbol] = result
        self.steps.append(step)
