"""Sums of powers of standard scores: distances from a mean, divided by a deviation as it grows.

``sum ((x - mean)/s)**3`` is ``sum (x - mean)**3 / s**3`` in real arithmetic, but cubes of 1e13 are
out of range where scores are not. So distances are divided by the deviation so far, and the sum is
carried from one deviation to the next as a largest magnitude is (`rescaling`). The moments below
the third have slots without a scale already: the count, what rounding leaves of the first one, and
the sum of squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from crossfuse.cascade.algebra.exponents import positive
from crossfuse.cascade.algebra.moments import Centre
from crossfuse.cascade.algebra.progress import Progress, Rescaling
from crossfuse.cascade.algebra.shifted_moments import ShiftedMoments
from crossfuse.cascade.algebra.state import Side
from crossfuse.cascade.expressions.functions import (
    UNBOUNDED,
    Compared,
    Fence,
    Unevaluated,
    fenced_sum,
    magnitude,
)
from crossfuse.cascade.spec import SUM, left, new, right, value

#: The least power that is kept as one of scores: squares are in range where their sum is.
_LEAST = 3


@dataclass(frozen=True)
class Scores:
    """A product that is a power of scores, times a rest over slots."""

    centre: Centre
    power: int
    #: What distances are divided by, over slots: a deviation, or one with a bound added to it.
    divisor: sympy.Expr
    rest: sympy.Expr


def scores(progress: Progress, element: sympy.Expr, context: sympy.Expr) -> Scores | None:
    """Read G and H as a power of scores about a mean of equal weights; None if they are not."""
    base, power = element.as_base_exp()
    centres = progress.centres_in(element)
    if len(centres) != 1 or not (power.is_Integer and power >= _LEAST):
        return None
    (centre,) = centres
    if base != centre.distance or centre.rest is None or centre.mass is None:
        return None
    if progress.state.of(centre.mass).contribution != 1:
        return None
    for factor in sympy.Mul.make_args(context):
        base, exponent = factor.as_base_exp()
        roots = -exponent / power
        if roots in (sympy.S.Half, sympy.S.One) and base.free_symbols & progress.moments:
            return Scores(centre, int(power), base**roots, context / factor)
    return None


class ScaledMoments:
    """Adds slots of powers of scores to a derivation."""

    def __init__(self, progress: Progress, moments: ShiftedMoments) -> None:
        self.progress = progress
        self.moments = moments

    def keep(self, name: str, found: Scores) -> sympy.Expr:
        """Accumulate a power of scores; returns its sum over slots."""
        return self._slots(name, found, found.power)[found.power]

    def _slots(self, name: str, found: Scores, power: int) -> dict[int, sympy.Expr]:
        """The moments up to a power; those from the third on are of scores."""
        progress, centre = self.progress, found.centre
        state = progress.state
        if power < _LEAST:
            square = self.moments.moment(
                f"{name}_lower", Rescaling(), centre.distance**2, fresh=True
            )
            assert centre.mass is not None and centre.rest is not None
            return {0: centre.mass, 1: centre.rest, 2: square}
        lower = self._slots(name, found, power - 1)
        by = sympy.Piecewise(
            (self._by(found, new), _bounded(state.raw(found.divisor, new))), (0, True)
        )
        apart = Fence(fenced_sum(centre.element, -state.within(centre.symbol, new)))
        brought = Unevaluated(apart * by) ** power
        same = state.same(SUM, brought)
        if same is not None:
            return lower | {power: same}
        own = name if power == found.power else state.fresh(f"{name}_lower")
        sides = [self._moved(own, found, power, lower, side) for side in (value, left, right)]
        carry, one, other = sides
        symbol = state.add(own, SUM, brought, carry, one + other, no_sign=False)
        progress.finished[value(own)] = self._finished(own, found, lower)
        return lower | {power: symbol}

    def _finished(self, own: str, found: Scores, lower: Mapping[int, sympy.Expr]) -> sympy.Expr:
        """The sum when all is merged: what separate passes make of no or an infinite deviation.

        They divide 0 by 0 where all elements are equal; numbers by an infinity give 0, and what is
        infinite, or no number, none.
        """
        state, centre = self.progress.state, found.centre
        assert centre.mass is not None and centre.rest is not None
        divisor, mean = (state.raw(each, value) for each in (found.divisor, centre.symbol))
        by = self._by(found, value)
        off = -Unevaluated(state.raw(centre.rest, value) * state.usable(1 / centre.mass))
        low = {k: self._low(slot, k, value, sympy.S.One, by) for k, slot in lower.items()}
        whole = _shifted(value(own), low, off * by)
        cases = [
            (whole, _bounded(divisor)),
            (sympy.S.Zero, _bounded(magnitude(mean))),
            (Unevaluated(mean) / mean, True),
        ]
        if not positive(found.divisor):
            none = sympy.Eq(divisor, sympy.S.Zero, evaluate=False)
            cases.insert(0, (Unevaluated(divisor) / divisor, none))
        return Unevaluated(sympy.Piecewise(*cases, evaluate=False))

    def _by(self, found: Scores, side: Side) -> sympy.Expr:
        """What distances are multiplied by."""
        return self.progress.state.usable(1 / found.divisor, side)

    def _low(
        self, slot: sympy.Expr, power: int, side: Side, ratio: sympy.Expr, by: sympy.Expr
    ) -> sympy.Expr:
        """A lower moment of one side in the scale of new values."""
        raw = self.progress.state.raw(slot, side)
        if power >= _LEAST:
            return raw * ratio**power
        for _ in range(power):
            raw = Unevaluated(raw * by)
        return raw

    def _moved(
        self, own: str, found: Scores, power: int, lower: Mapping[int, sympy.Expr], side: Side
    ) -> sympy.Expr:
        """The sum of one side about the new mean, in the new deviation; 0 in an infinite one."""
        state, centre, by = self.progress.state, found.centre, self._by(found, new)
        ratio = Unevaluated(state.raw(found.divisor, side) * by)
        move = side(state.of(centre.symbol).name) - state.within(centre.symbol, new)
        low = {k: self._low(slot, k, side, ratio, by) for k, slot in lower.items()}
        whole = _shifted(side(own) * ratio**power, low, Unevaluated(move * by))
        return sympy.Piecewise(
            (whole, _bounded(state.raw(found.divisor, new))), (0, True), evaluate=False
        )


def _bounded(number: sympy.Expr) -> sympy.Basic:
    """Whether a number is neither infinite nor none."""
    return sympy.StrictLessThan(Compared(number), UNBOUNDED)


def _shifted(own: sympy.Expr, low: Mapping[int, sympy.Expr], move: sympy.Expr) -> sympy.Expr:
    """A moment about another place, by the binomial formula and Horner's rule."""
    power = len(low)
    found = sympy.S.Zero
    for times in range(power, 0, -1):
        found = move * (found + sympy.binomial(power, times) * low[power - times])
    return own + found
