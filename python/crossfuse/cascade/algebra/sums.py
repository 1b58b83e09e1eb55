"""Derives sums of products, and of polynomials of distances from means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import sympy

from crossfuse.cascade.algebra.exponents import has_one_sign
from crossfuse.cascade.algebra.moments import Centre, centred, is_polynomial
from crossfuse.cascade.algebra.progress import Progress
from crossfuse.cascade.algebra.proof import checked, words
from crossfuse.cascade.algebra.rescaling import Rescaling, as_factors, split
from crossfuse.cascade.algebra.separation import Product
from crossfuse.cascade.algebra.shifted_moments import ShiftedMoments
from crossfuse.cascade.derivation import Factor, Step
from crossfuse.cascade.expressions.functions import Fence, unopened
from crossfuse.cascade.spec import Stage

#: Accumulates a sum under a name and with a rescaling; returns it over slots.
Keep = Callable[[str, Rescaling, sympy.Expr], sympy.Expr]
#: Proofs of sums over distances: from means alone, and from extremes.
_PROOFS = (
    "depends on the mean by distances from it only, as a polynomial",
    "depends on it by exponentials and by distances from it, as a polynomial",
)


class Sums:
    """Derives stages that sum terms over earlier results."""

    def __init__(self, progress: Progress, moments: ShiftedMoments) -> None:
        self.progress = progress
        self.moments = moments

    def take(self, stage: Stage, term: sympy.Expr) -> None:
        """Derive a sum: over distances from means and extremes if possible, else as products."""
        progress = self.progress
        near = self._near(term)
        if near is None:
            found = progress.separated(stage, term)
            rank = checked(stage, term, found, progress.elements, progress.results(term))
            self._add(stage, found, progress.accumulate, "sum, *", words(rank, len(found)), [])
            return
        kinds = {each.kind for each in progress.centres_in(near)}
        what = " and ".join(kind for kind in ("the mean", "an extreme") if kind in kinds)
        self._add(
            stage,
            progress.separated(stage, near),
            self.moments.moment,
            f"sum, shift of {what}",
            _PROOFS[len(kinds) > 1 or "the mean" not in kinds],
            [f"moves with {what} by the binomial formula: no large numbers cancel"],
        )

    def _near(self, term: sympy.Expr) -> sympy.Expr | None:
        """The term over distances from means and extremes; None if it has none.

        Any number of references may stand in it, each with distances of its own. Exponentials are
        left out: a rescaling keeps them in range.
        """
        progress, state = self.progress, self.progress.state
        spelt = as_factors(term)
        held = {
            each: sympy.Dummy(f"power{number}", positive=True)
            for number, each in enumerate(sorted(spelt.atoms(sympy.exp), key=str))
            if any(state.of(symbol).extreme for symbol in each.free_symbols & state.symbols)
        }
        found = spelt.xreplace(held)
        kept = []
        for centre in self._references(found):
            apart = centred(found, centre.symbol, centre.element, centre.distance)
            if apart is not None and is_polynomial(apart, centre.distance):
                found = apart
                kept.append(centre)
        if not kept:
            return None
        progress.centres += [each for each in kept if each not in progress.centres]
        return found.xreplace({dummy: each for each, dummy in held.items()})

    def _references(self, term: sympy.Expr) -> list[Centre]:
        """The centres that a term may take distances from: means, then extremes."""
        state, free = self.progress.state, term.free_symbols
        means = [each for each in self.progress.centres if each.mass is not None]
        extremes = [each for each in free & state.symbols if state.of(each).extreme]
        extremes.sort(key=lambda each: str(each.name))
        found = [each for each in means if each.symbol in free]
        places = [self.moments.extreme(each, term) for each in extremes]
        return found + [each for each in places if each is not None]

    def _add(
        self,
        stage: Stage,
        found: Sequence[Product],
        keep: Keep,
        pair: str,
        proof: str,
        notes: list[str],
    ) -> None:
        """Add a slot for each product; the stage is the sum of these times their H."""
        progress, state = self.progress, self.progress.state
        total, correction = sympy.S.Zero, None
        if len(found) > 1 and not has_one_sign([self._signed(g * h) for g, h in found]):
            progress.split.append(stage.name)
        factors: list[Factor] = []
        eager: list[sympy.Expr] = []
        hoisted: list[sympy.Expr] = []
        for number, (g, h) in enumerate(self._placed(stage, found)):
            part, rest = split(g, h, state, progress.elements, bool(stage.cast))
            kept = keep(progress.named(stage, number, len(found)), part, g)
            total += kept * rest
            name = state.of(kept).name if kept in state.symbols else ""
            factors.append(Factor(progress.spelt(g), progress.spelt(h), name))
            eager += [part.factor, *(each.symbol for each in progress.centres_in(g))]
            hoisted.append(rest)
            if not part.free:
                correction = part.correction(state)
            if not part.vanishes:
                notes.append("carries use stand-ins: the sum may not be 0 where a maximum is -oo")
        names = (progress.names(eager), progress.names(hoisted))
        step = Step(stage.name, pair, tuple(factors), *names, correction, proof, tuple(notes))
        progress.done(stage, Fence(total), step)

    def _signed(self, product: sympy.Expr) -> sympy.Expr:
        """A product with the known signs of distances from extremes."""
        state = self.progress.state
        images = {}
        for each in self.progress.centres:
            if each.mass is None:
                below = sympy.Dummy("distance", nonnegative=True)
                least = state.of(each.symbol).monoid.name == "min"
                images[each.distance] = below if least else -below
        return product.xreplace(images)

    def _placed(self, stage: Stage, found: Iterable[Product]) -> list[Product]:
        """Products whose constant factors stand with H, so that sums of equal G share a slot.

        Not for rounded terms: there the factors are part of what is in range.
        """
        if stage.cast:
            return list(found)
        moving = self.progress.moving()
        apart = [(g.as_independent(*moving, as_Add=False), h) for g, h in found]
        return [(element, unopened(still, h)) for (still, element), h in apart]
