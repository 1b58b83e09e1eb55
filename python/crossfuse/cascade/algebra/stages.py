"""How each kind of stage is derived."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from crossfuse.cascade.algebra import gauge as gauges
from crossfuse.cascade.algebra.centres import Centres
from crossfuse.cascade.algebra.exponents import joined, natural
from crossfuse.cascade.algebra.masks import as_choices, as_factors
from crossfuse.cascade.algebra.moments import Mean, centred
from crossfuse.cascade.algebra.ordering import affine
from crossfuse.cascade.algebra.pairs import pair_of
from crossfuse.cascade.algebra.proof import checked, coupled
from crossfuse.cascade.algebra.refusal import refused
from crossfuse.cascade.algebra.separation import Coupled, Product, products
from crossfuse.cascade.algebra.signs import nonnegative
from crossfuse.cascade.algebra.state import State
from crossfuse.cascade.derivation import Factor, Step, left, new, right, value
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
        elif not self._results(term):
            self._plain(stage, term)
        elif stage.monoid.name == "sum":
            self._sum(stage, term)
        elif stage.monoid.name == "prod":
            self._prod(stage, term)
        else:
            self._ordered(stage, term)

    def _results(self, term: sympy.Expr) -> list[sympy.Symbol]:
        found = term.free_symbols & (self.state.symbols | self.places)
        return sorted(found, key=lambda each: str(each.name))

    def separated(self, stage: Stage, term: sympy.Expr) -> list[Product]:
        """A term as products; refuses."""
        results = self._results(term)
        try:
            return products(term, self._all(), results)
        except Coupled as found:
            raise self.coupled(stage, term, found.part) from None

    def coupled(self, stage: Stage, term: sympy.Expr, part: sympy.Basic) -> Exception:
        """The refusal of a term that is not separable."""
        elements = sorted(term.free_symbols & self._all(), key=lambda each: str(each.name))
        return coupled(stage, term, part, elements, self._results(term), self.spelt)

    def _all(self) -> frozenset[sympy.Symbol]:
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
        self._done(stage, symbol, "", (factor,), (), (), None, proof)

    def _sum(self, stage: Stage, term: sympy.Expr) -> None:
        at = {each.symbol: (each.element, each.distance) for each in self.centres.all}
        shifted = centred(as_factors(term), at) if self.centres.all else None
        if shifted is not None and shifted.free_symbols & self.centres.distances:
            self._moments(stage, term, shifted)
            return
        found = self.separated(stage, term)
        rank = checked(stage, term, found, self.elements, self._results(term))
        found = self._placed(stage, found)
        total, gauged, hoisted = sympy.S.Zero, [], []
        factors, correction, notes = [], None, []
        for number, (g, h) in enumerate(found):
            part, rest = gauges.split(g, h, self.state, self.elements, bool(stage.cast))
            symbol = self.accumulate(self.named(stage, number, len(found)), part, g)
            total += symbol * rest
            factors.append(Factor(g, self.spelt(h), self.state.of(symbol).name))
            gauged += [part.factor]
            hoisted += [rest]
            if not part.free:
                correction = gauges.correction(part, self.state)
            if not part.vanishes:
                notes.append("carries use stand-ins: the sum may not be 0 where a maximum is -oo")
        self._done(
            stage,
            total,
            "sum, *",
            tuple(factors),
            self._names(gauged),
            self._names(hoisted),
            correction,
            self._words(rank, len(found)),
            tuple(notes),
        )

    def _placed(self, stage: Stage, found: list[Product]) -> list[Product]:
        """Products whose constant factors stand with H, so that sums of equal G are one.

        Not of what is rounded: there they are part of what is in range.
        """
        if stage.cast:
            return found
        apart = [(g.as_independent(*self._all(), as_Add=False), h) for g, h in found]
        return [(moving, still * h) for (still, moving), h in apart]

    def accumulate(
        self, name: str, gauge: gauges.Gauge, g: sympy.Expr, *, fresh: bool = False
    ) -> sympy.Symbol:
        """Keep a sum in a gauge, under a name or a fresh one like it; gives its symbol."""
        brought = as_choices(gauges.contribution(gauge, g, self.state))
        same = self.state.same(SUM, brought)
        if same is not None:
            return same
        name = self.state.fresh(name) if fresh else name
        merge = gauges.merged(gauge, (left(name), right(name)), self.state)
        carry = gauges.carry(gauge, value(name), self.state)
        return self.state.add(name, SUM, brought, carry, merge, no_sign=nonnegative(g))

    def _moments(self, stage: Stage, term: sympy.Expr, shifted: sympy.Expr) -> None:
        found = self._placed(stage, self.separated(stage, shifted))
        total, gauged, hoisted, factors, correction = sympy.S.Zero, [], [], [], None
        for number, (g, h) in enumerate(found):
            part, rest = gauges.split(g, h, self.state, self.elements, bool(stage.cast))
            symbol = self.centres.moment(self.named(stage, number, len(found)), part, g)
            total += symbol * rest
            kept = self.state.of(symbol).name if symbol in self.state.symbols else ""
            factors.append(Factor(self.spelt(g), self.spelt(h), kept))
            gauged += [part.factor, *(each.symbol for each in self.centres.in_(g))]
            hoisted += [rest]
            if not part.free:
                correction = gauges.correction(part, self.state)
        note = "moves with the mean by the binomial formula: no large numbers cancel"
        proof = "depends on the mean by distances from it only, as a polynomial"
        self._done(
            stage,
            total,
            "sum, shift of the mean",
            tuple(factors),
            self._names(gauged),
            self._names(hoisted),
            correction,
            proof,
            (note,),
        )

    def _ordered(self, stage: Stage, term: sympy.Expr) -> None:
        found = affine(self, stage, term)
        always = stage.monoid.name in (*INDEXED, *RANKED)
        symbol = self.keep(stage.name, stage.monoid, found.element, always=always)
        result = found.result(symbol)
        name = self.state.of(symbol).name
        self.direct[stage.symbol] = found.result(value(name))
        factors = [Factor(found.element, self.spelt(found.factor), name)]
        hoisted = self._names([found.factor, found.addend])
        pair = pair_of(stage.monoid, found.factor == 1 and not found.exponential)
        self._done(stage, result, pair, tuple(factors), (), hoisted, None, found.proof, found.notes)

    def _prod(self, stage: Stage, term: sympy.Expr) -> None:
        found = self.separated(stage, term)
        if len(found) != 1:
            raise self.coupled(stage, term, term)
        rank = checked(stage, term, found, self.elements, self._results(term))
        ((g, h),) = found
        symbol = self.keep(stage.name, stage.monoid, g)
        count = self.count()
        factor = Factor(g, self.spelt(h), self.state.of(symbol).name)
        self._done(
            stage,
            symbol * h**count,
            "prod, *",
            (factor,),
            (),
            self._names([h]),
            None,
            self._words(rank, 1),
            ("n equal factors are a power",),
        )

    def count(self) -> sympy.Symbol:
        """The slot that counts elements."""
        same = self.state.same(SUM, sympy.S.One)
        return same if same is not None else self.keep(self.state.fresh("n"), SUM, sympy.S.One)

    def _logaddexp(self, stage: Stage, term: sympy.Expr) -> None:
        """A maximum and a sum of exponentials below it."""
        element, addend = term, sympy.S.Zero
        if self._results(term):
            found = affine(self, stage, term)
            if found.factor != 1 or found.exponential:
                raise self.coupled(stage, term, found.factor)
            element, addend = found.element, found.addend
        largest = self.keep(self.state.fresh(f"{stage.name}_max"), MAX, element)
        gauge = gauges.Gauge(exponents=-largest)
        name = self.state.fresh(f"{stage.name}_sum")
        symbol = self.accumulate(name, gauge, sympy.exp(element))
        factor = Factor(element, self.spelt(addend), self.state.of(symbol).name)
        self._done(
            stage,
            largest + sympy.log(symbol) + addend,
            "logaddexp, +",
            (factor,),
            self._names([largest]),
            self._names([addend]),
            gauges.correction(gauge, self.state),
            "log sum exp(x + d) = d + log sum exp(x)",
            ("kept as a maximum and a sum of exponentials below it",),
        )

    def _names(self, parts: list[sympy.Expr]) -> tuple[str, ...]:
        """Slots in expressions, in their order."""
        free = set().union(*(each.free_symbols for each in parts)) if parts else set()
        return tuple(each.name for each in self.state.kept if self.state.among(each, free))

    @staticmethod
    def _words(rank: int | None, count: int) -> str:
        sampled = "not sampled" if rank is None else f"rank {rank} on a 24 x 24 sample"
        products = "one product" if count == 1 else f"{count} products"
        return f"taken apart by identities into {products}; {sampled}"

    def _done(
        self,
        stage: Stage,
        result: sympy.Expr,
        pair: str,
        factors: tuple[Factor, ...],
        gauge: tuple[str, ...],
        hoisted: tuple[str, ...],
        correction: sympy.Expr | None,
        proof: str,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.known[stage.symbol] = result
        made = Step(stage.name, pair, factors, gauge, hoisted, correction, proof, notes)
        self.steps.append(made)

    def done(self, stage: Stage, result: sympy.Expr, step: Step) -> None:
        """Note what a stage became."""
        self.known[stage.symbol] = result
        self.steps.append(step)


__all__ = ["Deriver", "new"]
