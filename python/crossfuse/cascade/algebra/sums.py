"""Sums of products, and of polynomials of distances from means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import sympy

from crossfuse.cascade.algebra import gauge as gauges
from crossfuse.cascade.algebra.centres import Centres
from crossfuse.cascade.algebra.masks import as_factors
from crossfuse.cascade.algebra.moments import centred, is_polynomial
from crossfuse.cascade.algebra.progress import Progress
from crossfuse.cascade.algebra.proof import checked, words
from crossfuse.cascade.algebra.separation import Product
from crossfuse.cascade.derivation import Factor, Step
from crossfuse.cascade.spec import Stage

#: Keeps a sum under a name and in a gauge, and gives it over slots.
Keep = Callable[[str, gauges.Gauge, sympy.Expr], sympy.Expr]


class Sums:
    """Derives stages that sum terms over earlier results.

    Parameters
    ----------
    progress : Progress
        Where they go to.
    centres : Centres
        What keeps sums of distances from means.
    """

    def __init__(self, progress: Progress, centres: Centres) -> None:
        self.progress = progress
        self.centres = centres

    def take(self, stage: Stage, term: sympy.Expr) -> None:
        """Derive a sum."""
        progress = self.progress
        shifted = self._shifted(term)
        if shifted is not None:
            found = progress.separated(stage, shifted)
            proof = "depends on the mean by distances from it only, as a polynomial"
            note = "moves with the mean by the binomial formula: no large numbers cancel"
            keep: Keep = self.centres.moment
            self._add(stage, found, keep, "sum, shift of the mean", proof, [note])
            return
        below = self._below(term)
        if below is not None:
            found = progress.separated(stage, below)
            proof = "depends on it by exponentials and by distances from it, as a polynomial"
            note = "moves with the extreme by the binomial formula: no large numbers cancel"
            self._add(stage, found, self.centres.moment, "sum, shift of an extreme", proof, [note])
            return
        found = progress.separated(stage, term)
        rank = checked(stage, term, found, progress.elements, progress.results(term))
        self._add(stage, found, progress.accumulate, "sum, *", words(rank, len(found)), [])

    def _shifted(self, term: sympy.Expr) -> sympy.Expr | None:
        """The term over distances from means, if it is a polynomial in them."""
        centres = [each for each in self.progress.centres if each.mass is not None]
        at = {each.symbol: (each.element, each.distance) for each in centres}
        found = centred(as_factors(term), at)
        used = [] if found is None else [e for e in at.values() if e[1] in found.free_symbols]
        if not used or not all(is_polynomial(found, distance) for _, distance in used):
            return None
        return found

    def _below(self, term: sympy.Expr) -> sympy.Expr | None:
        """The term over distances from extremes, exponentials left out, if it has such."""
        progress, state = self.progress, self.progress.state
        spelt = as_factors(term)
        used = {each for each in spelt.free_symbols & state.symbols if state.of(each).extreme}
        held = {
            each: sympy.Dummy(f"power{number}", positive=True)
            for number, each in enumerate(sorted(spelt.atoms(sympy.exp), key=str))
            if each.free_symbols & used
        }
        found = spelt.xreplace(held)
        centres = []
        for symbol in sorted(used & found.free_symbols, key=lambda each: str(each.name)):
            centre = self.centres.extreme(symbol, found)
            apart = centred(found, {symbol: (centre.element, centre.distance)})
            if apart is not None and is_polynomial(apart, centre.distance):
                found = apart
                centres.append(centre)
        if not centres:
            return None
        progress.centres += [each for each in centres if each not in progress.centres]
        return found.xreplace({dummy: each for each, dummy in held.items()})

    def _add(
        self,
        stage: Stage,
        found: Sequence[Product],
        keep: Keep,
        pair: str,
        proof: str,
        notes: list[str],
    ) -> None:
        """Keep a sum for each product; the stage is what they come to with their H."""
        progress, state = self.progress, self.progress.state
        total, correction = sympy.S.Zero, None
        factors: list[Factor] = []
        gauged: list[sympy.Expr] = []
        hoisted: list[sympy.Expr] = []
        for number, (g, h) in enumerate(self._placed(stage, found)):
            part, rest = gauges.split(g, h, state, progress.elements, bool(stage.cast))
            kept = keep(progress.named(stage, number, len(found)), part, g)
            total += kept * rest
            name = state.of(kept).name if kept in state.symbols else ""
            factors.append(Factor(progress.spelt(g), progress.spelt(h), name))
            gauged += [part.factor, *(each.symbol for each in progress.centres_in(g))]
            hoisted.append(rest)
            if not part.free:
                correction = gauges.correction(part, state)
            if not part.vanishes:
                notes.append("carries use stand-ins: the sum may not be 0 where a maximum is -oo")
        names = (progress.names(gauged), progress.names(hoisted))
        step = Step(stage.name, pair, tuple(factors), *names, correction, proof, tuple(notes))
        progress.done(stage, total, step)

    def _placed(self, stage: Stage, found: Iterable[Product]) -> list[Product]:
        """Products whose constant factors stand with H, so that sums of equal G are one.

        Not of what is rounded: there they are part of what is in range.
        """
        if stage.cast:
            return list(found)
        moving = self.progress.moving()
        apart = [(g.as_independent(*moving, as_Add=False), h) for g, h in found]
        return [(element, still * h) for (still, element), h in apart]
