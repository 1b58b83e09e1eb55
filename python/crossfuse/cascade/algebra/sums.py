"""Sums of products, and of polynomials of distances from means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import sympy

from crossfuse.cascade.algebra import gauge as gauges
from crossfuse.cascade.algebra.masks import as_choices, as_factors
from crossfuse.cascade.algebra.moments import centred, is_polynomial
from crossfuse.cascade.algebra.proof import checked, words
from crossfuse.cascade.algebra.separation import Product
from crossfuse.cascade.algebra.signs import nonnegative
from crossfuse.cascade.derivation import Factor, Step, left, right, value
from crossfuse.cascade.monoid import SUM
from crossfuse.cascade.spec import Stage

if TYPE_CHECKING:
    from crossfuse.cascade.algebra.stages import Deriver

#: Keeps a sum under a name and in a gauge, and gives it over slots.
Keep = Callable[[str, gauges.Gauge, sympy.Expr], sympy.Expr]


class Sums:
    """Derives stages that sum terms over earlier results.

    Parameters
    ----------
    deriver : Deriver
        Whose state they go to.
    """

    def __init__(self, deriver: Deriver) -> None:
        self.deriver = deriver

    def take(self, stage: Stage, term: sympy.Expr) -> None:
        """Derive a sum."""
        deriver = self.deriver
        shifted = self._shifted(term)
        if shifted is not None:
            found = deriver.separated(stage, shifted)
            proof = "depends on the mean by distances from it only, as a polynomial"
            note = "moves with the mean by the binomial formula: no large numbers cancel"
            keep: Keep = deriver.centres.moment
            self._add(stage, found, keep, "sum, shift of the mean", proof, [note])
            return
        found = deriver.separated(stage, term)
        rank = checked(stage, term, found, deriver.elements, deriver.results(term))
        self._add(stage, found, self.accumulate, "sum, *", words(rank, len(found)), [])

    def _shifted(self, term: sympy.Expr) -> sympy.Expr | None:
        """The term over distances from means, if it is a polynomial in them."""
        centres = self.deriver.centres.all
        at = {each.symbol: (each.element, each.distance) for each in centres}
        found = centred(as_factors(term), at)
        used = [] if found is None else [e for e in at.values() if e[1] in found.free_symbols]
        if not used or not all(is_polynomial(found, distance) for _, distance in used):
            return None
        return found

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
        deriver, state = self.deriver, self.deriver.state
        total, correction = sympy.S.Zero, None
        factors: list[Factor] = []
        gauged: list[sympy.Expr] = []
        hoisted: list[sympy.Expr] = []
        for number, (g, h) in enumerate(self._placed(stage, found)):
            part, rest = gauges.split(g, h, state, deriver.elements, bool(stage.cast))
            kept = keep(deriver.named(stage, number, len(found)), part, g)
            total += kept * rest
            name = state.of(kept).name if kept in state.symbols else ""
            factors.append(Factor(deriver.spelt(g), deriver.spelt(h), name))
            gauged += [part.factor, *(each.symbol for each in deriver.centres.in_(g))]
            hoisted.append(rest)
            if not part.free:
                correction = gauges.correction(part, state)
            if not part.vanishes:
                notes.append("carries use stand-ins: the sum may not be 0 where a maximum is -oo")
        names = (deriver.names(gauged), deriver.names(hoisted))
        step = Step(stage.name, pair, tuple(factors), *names, correction, proof, tuple(notes))
        deriver.done(stage, total, step)

    def _placed(self, stage: Stage, found: Iterable[Product]) -> list[Product]:
        """Products whose constant factors stand with H, so that sums of equal G are one.

        Not of what is rounded: there they are part of what is in range.
        """
        if stage.cast:
            return list(found)
        moving = self.deriver.moving()
        apart = [(g.as_independent(*moving, as_Add=False), h) for g, h in found]
        return [(element, still * h) for (still, element), h in apart]

    def accumulate(
        self, name: str, gauge: gauges.Gauge, g: sympy.Expr, *, fresh: bool = False
    ) -> sympy.Symbol:
        """Keep a sum in a gauge, under a name or a fresh one like it; gives its symbol."""
        state = self.deriver.state
        brought = as_choices(gauges.contribution(gauge, g, state))
        same = state.same(SUM, brought)
        if same is not None:
            return same
        name = state.fresh(name) if fresh else name
        merge = gauges.merged(gauge, (left(name), right(name)), state)
        carry = gauges.carry(gauge, value(name), state)
        return state.add(name, SUM, brought, carry, merge, no_sign=nonnegative(g))
