"""Means in the state, and sums of polynomials of distances from them."""

from __future__ import annotations

import sympy

from crossfuse.cascade.algebra import gauge as gauges
from crossfuse.cascade.algebra.masks import as_choices, as_factors, quotient
from crossfuse.cascade.algebra.moments import Centre, Mean
from crossfuse.cascade.algebra.progress import Progress
from crossfuse.cascade.algebra.state import Side
from crossfuse.cascade.derivation import Factor, Step, left, new, right, value
from crossfuse.cascade.monoid import SUM
from crossfuse.cascade.spec import Stage

_PAIR = "sum, shift of the mean"
_PROOF = "later stages use it by distances from the mean"
#: What a lower moment is times: powers of how far the mean moved.
Lower = tuple[sympy.Expr, sympy.Expr]


class Centres:
    """Keeps means, and moments about them.

    Parameters
    ----------
    progress : Progress
        Where they go to.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def _name(self, centre: Centre) -> str:
        return self.progress.state.of(centre.symbol).name

    def take(self, stage: Stage, mean: Mean) -> None:
        """Derive a stage that is kept as a mean."""
        if mean.signed:
            self._take_signed(stage, mean)
            return
        progress, state = self.progress, self.progress.state
        mass = self._mass(mean)
        whole = progress.known[progress.cascade.stage(mean.weight).symbol] if mean.weight else None
        weight = progress.cascade.length if whole is None else whole
        scale = (mean.scale.xreplace(progress.known) * weight).cancel()
        name = stage.name if scale == 1 else state.fresh(f"{stage.name}_mean")
        centre = self._centre(mean.element, mass, name)
        kept = state.of(mass).name
        factor = Factor(mean.element, progress.spelt(scale), name)
        note = f"kept as a mean, weighed by {kept}, that each tile moves"
        step = Step(stage.name, _PAIR, (factor,), (kept,), (), None, _PROOF, (note,))
        progress.done(stage, scale * centre.symbol, step)

    def _take_signed(self, stage: Stage, mean: Mean) -> None:
        """Keep distances from the mean of all elements: of signed weights, sums may cross 0."""
        progress, state = self.progress, self.progress.state
        count = progress.count()
        found = [
            e
            for e in self.progress.centres
            if e.element == mean.element and state.of(e.mass) is state.of(count)
        ]
        name = f"{stage.name}_reference"
        centre = found[0] if found else self._centre(mean.element, count, state.fresh(name))
        weights = progress.cascade.stage(mean.weight)
        weight = progress.known[weights.symbol]
        first = self.moment(stage.name, gauges.Gauge(), weights.term * centre.distance)
        kept = state.of(centre.symbol).name
        factor = Factor(progress.spelt(weights.term * centre.distance), sympy.S.One, stage.name)
        note = f"weights may be negative, so distances are from {kept}, the mean of all elements"
        step = Step(stage.name, _PAIR, (factor,), (kept,), (), None, _PROOF, (note,))
        result = mean.scale.xreplace(progress.known) * weight * (centre.symbol + first / weight)
        progress.done(stage, result, step)

    def _centre(self, element: sympy.Expr, mass: sympy.Symbol, name: str) -> Centre:
        """Keep a mean."""
        state = self.progress.state
        kept = state.of(mass)
        below = state.usable(1 / mass, new) ** -1
        brought = as_choices(as_factors(kept.contribution) * (element - value(name)) / below)
        share = self._of_right(kept.merge, kept.name) / below
        merge = left(name) + (right(name) - left(name)) * share
        symbol = state.add(name, SUM, brought, value(name), merge, no_sign=False)
        centre = Centre(element, symbol, mass, sympy.Dummy(f"{name}_distance", real=True))
        self.progress.centres.append(centre)
        return centre

    def _mass(self, mean: Mean) -> sympy.Symbol:
        """The slot of weights."""
        if not mean.weight:
            return self.progress.count()
        result = self.progress.known[self.progress.cascade.stage(mean.weight).symbol]
        state = self.progress.state
        slots = [e for e in result.free_symbols & state.symbols if state.of(e).monoid == SUM]
        assert len(slots) == 1, f"weights of {mean.stage} are kept in {len(slots)} sums"
        return slots[0]

    @staticmethod
    def _of_right(merge: sympy.Expr | None, name: str) -> sympy.Expr:
        """What the second state adds to a merged sum."""
        assert merge is not None
        return merge.xreplace({left(name): sympy.S.Zero})

    def moment(
        self, name: str, gauge: gauges.Gauge, element: sympy.Expr, *, fresh: bool = False
    ) -> sympy.Expr:
        """Keep a sum of elements and distances; gives it over slots.

        Parameters
        ----------
        name : str
            Of the slot, if it needs one.
        gauge : Gauge
            What its weight is kept in.
        element : sympy.Expr
            A polynomial in distances, with factors over elements.
        fresh : bool
            Whether the slot is to have a fresh name like that.

        Returns
        -------
        sympy.Expr
            0, a slot's symbol, or a multiple of it.
        """
        state = self.progress.state
        centres = self.progress.centres_in(element)
        if not centres:
            number, rest = element.as_independent(*self.progress.elements, as_Add=False)
            return number * self.progress.accumulate(name, gauge, rest, fresh=fresh)
        if self._vanishes(gauge, element, centres):
            return sympy.S.Zero
        here = {each.distance: each.element - new(self._name(each)) for each in centres}
        brought = as_choices(gauges.contribution(gauge, element.xreplace(here), state))
        same = state.same(SUM, brought)
        if same is not None:
            return same
        name = state.fresh(name) if fresh else name
        lower = self._lower(name, gauge, element, centres)
        carry = gauges.carry(gauge, self._at(name, lower, centres, value), state)
        parts = [self._at(name, lower, centres, side) for side in (left, right)]
        merge = gauges.merged(gauge, parts, state)
        even = _is_square(element)
        return state.add(name, SUM, brought, carry, merge, no_sign=even)

    def _vanishes(self, gauge: gauges.Gauge, element: sympy.Expr, centres: list[Centre]) -> bool:
        """Whether it is a mean's own first moment."""
        if len(centres) != 1:
            return False
        weight = sympy.cancel(element / centres[0].distance)
        if weight.free_symbols & self.progress.distances:
            return False
        own = self.progress.state.of(centres[0].mass).contribution
        ratio = quotient(gauges.contribution(gauge, weight, self.progress.state), own)
        return ratio is not None and not ratio.free_symbols & self.progress.elements

    def _lower(
        self, name: str, gauge: gauges.Gauge, element: sympy.Expr, centres: list[Centre]
    ) -> list[Lower]:
        """Lower moments, with what each is times when the mean moves."""
        moves = {each.distance: _move(each) for each in centres}
        shifted = element.xreplace({each: each + moves[each] for each in moves})
        powers = sympy.Poly(sympy.expand(shifted), *moves.values()).terms()
        found: list[Lower] = []
        for exponents, coefficient in powers:
            if not any(exponents):
                continue
            moved = sympy.Mul(*(m**e for m, e in zip(moves.values(), exponents, strict=True)))
            for part in sympy.Add.make_args(sympy.expand(coefficient)):
                number, rest = part.as_coeff_Mul()
                slot = self.moment(f"{name}_lower", gauge, rest, fresh=True)
                if slot != 0:
                    found.append((number * moved, slot))
        return found

    def _at(self, name: str, lower: list[Lower], centres: list[Centre], side: Side) -> sympy.Expr:
        """The moment of a side about the new mean, in the side's own gauge."""
        state = self.progress.state
        moved = {_move(each): side(self._name(each)) - new(self._name(each)) for each in centres}
        parts = [factor.xreplace(moved) * state.raw(slot, side) for factor, slot in lower]
        return side(name) + sympy.Add(*parts)


def _move(centre: Centre) -> sympy.Symbol:
    """Stands for how far a mean moves."""
    return sympy.Symbol(f"{centre.symbol.name} moves", real=True)


def _is_square(element: sympy.Expr) -> bool:
    return bool(element.is_nonnegative)
