"""How each kind of stage is derived."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from crossfuse.cascade.algebra import gauge as gauges
from crossfuse.cascade.algebra.centres import Centres
from crossfuse.cascade.algebra.exponents import joined, natural
from crossfuse.cascade.algebra.moments import Mean
from crossfuse.cascade.algebra.ordering import affine
from crossfuse.cascade.algebra.pairs import pair_of
from crossfuse.cascade.algebra.proof import checked, coupled, words
from crossfuse.cascade.algebra.refusal import refused
from crossfuse.cascade.algebra.separation import Coupled, Product, products
from crossfuse.cascade.algebra.signs import nonnegative
from crossfuse.cascade.algebra.state import State
from crossfuse.cascade.algebra.sums import Sums
from crossfuse.cascade.derivation import Factor, Step, left, right, value
from crossfuse.cascade.monoid import INDEXED, MAX, RANKED, SUM, Monoid
from crossfuse.cascade.spec import Cascade, Stage


class Deriver:
    """Derives stages in order; holds the state so far.

    Parameters
    ----------
    cascade : Cascade
        The definition.
    means : Mapping[str, Mean]
        Sums that are kept as means.
    """

    def __init__(self, cascade: Cascade, means: Mapping[str, Mean]) -> None:
        self.cascade = cascade
        self.means = means
        self.elements = frozenset(cascade.elements)
        taken = {each.name for each in (*cascade.elements, *cascade.invariants)}
        taken |= {each.name for each in cascade.stages} | set(cascade.results) | set(cascade.rows)
        self.state = State(frozenset(taken))
        self.known: dict[sympy.Symbol, sympy.Expr] = {}
        # Results of choices as they are, -oo of nothing too.
        self.direct: dict[sympy.Symbol, sympy.Expr] = {}
        self.places = {each.index_symbol for each in cascade.stages} - {None}
        self.centres = Centres(self)
        self.sums = Sums(self)
        self.steps: list[Step] = []

    def take(self, stage: Stage) -> None:
        """Derive a stage; those that it uses are derived."""
        ranked = {each.symbol for each in self.cascade.stages if each.monoid.name in RANKED}
        if stage.term.free_symbols & ranked:
            raise refused(
                "cascade-form",
                stage.name,
                found="a term over the k results of a top-k",
                limit="results that are one number",
                instead="compute it from the k numbers after the cascade, as a result",
            )
        term = natural(joined(stage.term.xreplace(self.known)))
        if stage.monoid.name == "logaddexp":
            self._logaddexp(stage, term)
        elif stage.name in self.means:
            self.centres.take(stage, self.means[stage.name])
        elif not self.results(term):
            self._plain(stage, term)
        elif stage.monoid.name == "sum":
            self.sums.take(stage, term)
        elif stage.monoid.name == "prod":
            self._prod(stage, term)
        else:
            self._ordered(stage, term)

    def results(self, term: sympy.Expr) -> list[sympy.Symbol]:
        """What a term uses of earlier stages."""
        found = term.free_symbols & (self.state.symbols | self.places)
        return sorted(found, key=lambda each: str(each.name))

    def separated(self, stage: Stage, term: sympy.Expr) -> list[Product]:
        """A term as products; refuses."""
        results = self.results(term)
        try:
            return products(term, self.moving(), results)
        except Coupled as found:
            raise self.coupled(stage, term, found.part) from None

    def coupled(self, stage: Stage, term: sympy.Expr, part: sympy.Basic) -> Exception:
        """The refusal of a term that is not separable."""
        elements = sorted(term.free_symbols & self.moving(), key=lambda each: str(each.name))
        return coupled(stage, term, part, elements, self.results(term), self.spelt)

    def moving(self) -> frozenset[sympy.Symbol]:
        """Elements, and distances of elements from means."""
        return self.elements | self.centres.distances

    def spelt(self, expression: sympy.Basic) -> sympy.Basic:
        """An expression over slots as messages show it."""
        return self.centres.spelt(self.state.raw(expression, value))

    def keep(
        self, name: str, monoid: Monoid, element: sympy.Expr, *, always: bool = False
    ) -> sympy.Symbol:
        """Keep a reduction that needs no correction; gives its symbol."""
        same = None if always else self.state.same(monoid, element)
        if same is not None:
            return same
        merge = None
        if monoid.name not in (*INDEXED, *RANKED):
            merge = monoid.combine(left(name), right(name))
        no_sign = monoid.name in ("sum", "prod", "max", "min") and nonnegative(element)
        return self.state.add(name, monoid, element, value(name), merge, no_sign=no_sign)

    def named(self, stage: Stage, number: int = 0, count: int = 1) -> str:
        """The name of one of a stage's slots."""
        return stage.name if count == 1 else self.state.fresh(f"{stage.name}_{number}")

    def _plain(self, stage: Stage, term: sympy.Expr) -> None:
        """A stage that uses no results."""
        always = stage.monoid.name in (*INDEXED, *RANKED)
        symbol = self.keep(stage.name, stage.monoid, term, always=always)
        factor = Factor(term, sympy.S.One, self.state.of(symbol).name)
        proof = "uses no earlier result"
        self.done(stage, symbol, Step(stage.name, "", (factor,), (), (), None, proof))

    def _ordered(self, stage: Stage, term: sympy.Expr) -> None:
        found = affine(self, stage, term)
        always = stage.monoid.name in (*INDEXED, *RANKED)
        symbol = self.keep(stage.name, stage.monoid, found.element, always=always)
        result = found.result(symbol)
        name = self.state.of(symbol).name
        self.direct[stage.symbol] = found.result(value(name))
        factor = Factor(found.element, self.spelt(found.factor), name)
        hoisted = self.names([found.factor, found.addend])
        pair = pair_of(stage.monoid, found.factor == 1 and not found.exponential)
        step = Step(stage.name, pair, (factor,), (), hoisted, None, found.proof, found.notes)
        self.done(stage, result, step)

    def _prod(self, stage: Stage, term: sympy.Expr) -> None:
        found = self.separated(stage, term)
        if len(found) != 1:
            raise self.coupled(stage, term, term)
        rank = checked(stage, term, found, self.elements, self.results(term))
        ((g, h),) = found
        symbol = self.keep(stage.name, stage.monoid, g)
        count = self.count()
        factor = Factor(g, self.spelt(h), self.state.of(symbol).name)
        note = "n equal factors are a power"
        step = Step(
            stage.name, "prod, *", (factor,), (), self.names([h]), None, words(rank, 1), (note,)
        )
        self.done(stage, symbol * h**count, step)

    def count(self) -> sympy.Symbol:
        """The slot that counts elements."""
        same = self.state.same(SUM, sympy.S.One)
        return same if same is not None else self.keep(self.state.fresh("n"), SUM, sympy.S.One)

    def _logaddexp(self, stage: Stage, term: sympy.Expr) -> None:
        """A maximum and a sum of exponentials below it."""
        element, addend = term, sympy.S.Zero
        if self.results(term):
            found = affine(self, stage, term)
            if found.factor != 1 or found.exponential:
                raise self.coupled(stage, term, found.factor)
            element, addend = found.element, found.addend
        largest = self.keep(self.state.fresh(f"{stage.name}_max"), MAX, element)
        gauge = gauges.Gauge(exponents=-largest)
        name = self.state.fresh(f"{stage.name}_sum")
        symbol = self.sums.accumulate(name, gauge, sympy.exp(element))
        factor = Factor(element, self.spelt(addend), self.state.of(symbol).name)
        step = Step(
            stage.name,
            pair_of(stage.monoid, True),
            (factor,),
            self.names([largest]),
            self.names([addend]),
            gauges.correction(gauge, self.state),
            "log sum exp(x + d) = d + log sum exp(x)",
            ("kept as a maximum and a sum of exponentials below it",),
        )
        self.done(stage, largest + sympy.log(symbol) + addend, step)

    def names(self, parts: list[sympy.Expr]) -> tuple[str, ...]:
        """Slots in expressions, in their order."""
        free = set().union(*(each.free_symbols for each in parts)) if parts else set()
        return tuple(each.name for each in self.state.kept if self.state.among(each, free))

    def done(self, stage: Stage, result: sympy.Expr, step: Step) -> None:
        """Note what a stage became."""
        self.known[stage.symbol] = result
        self.steps.append(step)
