"""How each kind of stage is derived."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from crossfuse.cascade.algebra import gauge as gauges
from crossfuse.cascade.algebra.centres import Centres
from crossfuse.cascade.algebra.exponents import joined, natural, unlogged
from crossfuse.cascade.algebra.moments import Mean
from crossfuse.cascade.algebra.ordering import affine
from crossfuse.cascade.algebra.pairs import pair_of
from crossfuse.cascade.algebra.progress import Progress
from crossfuse.cascade.algebra.proof import checked, words
from crossfuse.cascade.algebra.refusal import refused
from crossfuse.cascade.algebra.sums import Sums
from crossfuse.cascade.derivation import Factor, Step, value
from crossfuse.cascade.monoid import INDEXED, MAX, RANKED
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
        self.progress = Progress(cascade)
        self.means = means
        self.centres = Centres(self.progress)
        self.sums = Sums(self.progress, self.centres)

    def take(self, stage: Stage) -> None:
        """Derive a stage; those that it uses are derived."""
        progress = self.progress
        ranked = {each.symbol for each in progress.cascade.stages if each.monoid.name in RANKED}
        if stage.term.free_symbols & ranked:
            raise refused(
                "cascade-form",
                stage.name,
                found="a term over the k results of a top-k",
                limit="results that are one number",
                instead="compute it from the k numbers after the cascade, as a result",
            )
        term = unlogged(natural(joined(stage.term.xreplace(progress.known))))
        if stage.monoid.name == "logaddexp":
            self._logaddexp(stage, term)
        elif stage.name in self.means:
            self.centres.take(stage, self.means[stage.name])
        elif not progress.results(term):
            self._plain(stage, term)
        elif stage.monoid.name == "sum":
            self.sums.take(stage, term)
        elif stage.monoid.name == "prod":
            self._prod(stage, term)
        else:
            self._ordered(stage, term)

    def _plain(self, stage: Stage, term: sympy.Expr) -> None:
        """A stage that uses no results."""
        progress = self.progress
        always = stage.monoid.name in (*INDEXED, *RANKED)
        symbol = progress.keep(stage.name, stage.monoid, term, always=always)
        factor = Factor(term, sympy.S.One, progress.state.of(symbol).name)
        proof = "uses no earlier result"
        progress.done(stage, symbol, Step(stage.name, "", (factor,), (), (), None, proof))

    def _ordered(self, stage: Stage, term: sympy.Expr) -> None:
        progress = self.progress
        found = affine(progress, stage, term)
        always = stage.monoid.name in (*INDEXED, *RANKED)
        symbol = progress.keep(stage.name, stage.monoid, found.element, always=always)
        result = found.result(symbol)
        name = progress.state.of(symbol).name
        progress.direct[stage.symbol] = found.result(value(name))
        factor = Factor(found.element, progress.spelt(found.factor), name)
        hoisted = progress.names([found.factor, found.addend])
        pair = pair_of(stage.monoid, found.factor == 1 and not found.exponential)
        step = Step(stage.name, pair, (factor,), (), hoisted, None, found.proof, found.notes)
        progress.done(stage, result, step)

    def _prod(self, stage: Stage, term: sympy.Expr) -> None:
        progress = self.progress
        found = progress.separated(stage, term)
        if len(found) != 1:
            raise progress.coupled(stage, term, term)
        rank = checked(stage, term, found, progress.elements, progress.results(term))
        ((g, h),) = found
        symbol = progress.keep(stage.name, stage.monoid, g)
        count = progress.count()
        factor = Factor(g, progress.spelt(h), progress.state.of(symbol).name)
        note = "n equal factors are a power"
        step = Step(
            stage.name, "prod, *", (factor,), (), progress.names([h]), None, words(rank, 1), (note,)
        )
        progress.done(stage, symbol * h**count, step)

    def _logaddexp(self, stage: Stage, term: sympy.Expr) -> None:
        """A maximum and a sum of exponentials below it."""
        progress = self.progress
        element, addend = term, sympy.S.Zero
        if progress.results(term):
            found = affine(progress, stage, term)
            if found.factor != 1 or found.exponential:
                raise progress.coupled(stage, term, found.factor)
            element, addend = found.element, found.addend
        largest = progress.keep(progress.state.fresh(f"{stage.name}_max"), MAX, element)
        gauge = gauges.Gauge(exponents=-largest)
        name = progress.state.fresh(f"{stage.name}_sum")
        symbol = progress.accumulate(name, gauge, sympy.exp(element))
        factor = Factor(element, progress.spelt(addend), progress.state.of(symbol).name)
        step = Step(
            stage.name,
            pair_of(stage.monoid, True),
            (factor,),
            progress.names([largest]),
            progress.names([addend]),
            gauges.correction(gauge, progress.state),
            "log sum exp(x + d) = d + log sum exp(x)",
            ("kept as a maximum and a sum of exponentials below it",),
        )
        progress.done(stage, largest + sympy.log(symbol) + addend, step)
