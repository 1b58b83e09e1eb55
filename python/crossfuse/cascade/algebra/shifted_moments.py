"""Means as slots of the state, and sums of polynomials of distances from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sympy

from crossfuse.cascade.algebra.moments import Centre, Mean, expanded
from crossfuse.cascade.algebra.progress import (
    Progress,
    Rescaling,
    as_choices,
    as_factors,
    masks_all,
    quotient,
)
from crossfuse.cascade.algebra.separation import refused
from crossfuse.cascade.algebra.state import Kept, Side, chosen
from crossfuse.cascade.algebra.writing import written
from crossfuse.cascade.expressions.functions import (
    UNBOUNDED,
    Abs,
    Compared,
    Fence,
    Unevaluated,
    fenced_sum,
    magnitude,
    opened,
    settled,
    with_flags,
)
from crossfuse.cascade.spec import SUM, Factor, Stage, Step, left, new, right, value

_PAIR = "sum, shift of the mean"
_PROOF = "later stages use it by distances from the mean"
#: Lower moments and their factors, by the exponents of the centres' moves that multiply them.
Lower = dict[tuple[int, ...], list[tuple[sympy.Expr, sympy.Expr]]]


@dataclass(frozen=True)
class _Moment:
    """A sum of a polynomial of distances that becomes a slot."""

    #: Of its slot.
    name: str
    #: What its distances are from.
    centres: tuple[Centre, ...]
    rescaling: Rescaling
    #: Lower moments, which add to this one when the centres move.
    lower: Lower
    #: Whether it is never negative.
    even: bool


class ShiftedMoments:
    """Turns means, and moments about them, into slots of a derivation."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def _name(self, centre: Centre) -> str:
        return self.progress.state.of(centre.symbol).name

    def take(self, stage: Stage, mean: Mean) -> None:
        """Derive a stage whose sum becomes a mean in the state."""
        if mean.signed:
            self._take_signed(stage, mean)
            return
        progress, state = self.progress, self.progress.state
        mass = self._mass(mean)
        whole = progress.known[progress.cascade.stage(mean.weight).symbol] if mean.weight else None
        weight = progress.cascade.length if whole is None else whole
        scale = mean.scale.xreplace(progress.known) * weight
        centre = self._known(mean, mass) or self._mean(
            mean, mass, stage.name if scale == 1 else state.fresh(f"{stage.name}_mean")
        )
        kept, name = state.of(mass).name, state.of(centre.symbol).name
        factor = Factor(mean.element, progress.spelt(scale), name)
        notes = (
            f"kept as a mean, weighed by {kept}, that each tile moves",
            f"{state.of(centre.rest).name} is what rounding leaves of the first moment about the "
            "mean: 0 in real arithmetic",
        )
        step = Step(stage.name, _PAIR, (factor,), (kept,), (), None, _PROOF, notes)
        progress.done(stage, scale * centre.symbol, step)

    def _known(self, mean: Mean, mass: sympy.Symbol) -> Centre | None:
        """The same mean of an earlier stage."""
        state = self.progress.state
        found = [each for each in self.progress.centres if each.rest and each.mass]
        for each in found:
            if each.element == mean.element and state.of(each.mass) is state.of(mass):
                return each
        return None

    def _take_signed(self, stage: Stage, mean: Mean) -> None:
        """Derive a mean of signed weights, whose sum may cross 0.

        Distances are from the mean by the weights' magnitudes instead.
        """
        progress, state = self.progress, self.progress.state
        weights = progress.cascade.stage(mean.weight)
        size = progress.keep(state.fresh(f"{weights.name}_size"), SUM, Abs(weights.term))
        found = [
            each
            for each in progress.centres
            if each.mass is not None
            and each.element == mean.element
            and state.of(each.mass) is state.of(size)
        ]
        name = f"{stage.name}_reference"
        centre = found[0] if found else self._reference(mean.element, size, state.fresh(name))
        weight = progress.known[weights.symbol]
        first = self.moment(stage.name, Rescaling(), weights.term * centre.distance)
        kept = state.of(centre.symbol).name
        factor = Factor(progress.spelt(weights.term * centre.distance), sympy.S.One, stage.name)
        note = (
            f"weights may be negative, so distances are from {kept}, the mean by their magnitudes"
        )
        step = Step(stage.name, _PAIR, (factor,), (kept,), (), None, _PROOF, (note,))
        result = mean.scale.xreplace(progress.known) * weight * (centre.symbol + first / weight)
        progress.done(stage, result, step)

    def _mean(self, wanted: Mean, mass: sympy.Symbol, name: str) -> Centre:
        """Add the slots of a mean and of the first moment about it, which is what rounding leaves.

        A mean that is large against the deviation is rounded to some part of it, and higher moments
        move by that times how far the mean moves: so much is known instead of lost. The sum of
        weights says how sums are carried and merged; both slots put theirs in its place. An
        infinite mean that is visible stays as it is: the first moment about it is no number.

        A mean begins at the row's first element, if that is known, and each tile moves it by
        distances from where it was: of equal elements all of them are 0, however large they are.
        """
        state, element = self.progress.state, wanted.element
        kept, rest = state.of(mass), state.fresh(f"{name}_rest")
        below = state.usable(1 / mass, new) ** -1
        weight = as_factors(kept.contribution)
        weight = with_flags(weight) if wanted.flagged else weight
        first = self.progress.first(element) if kept.contribution == 1 else None
        if first is None:
            # Elements as they are: a place for the mean to be at is all that is wanted here.
            near = sympy.S.Zero
            so_far = _carried(kept, value(kept.name) * value(name) + value(rest)) / below
        else:
            near = value(name)
            if wanted.visible:
                near = chosen(magnitude(near), sympy.oo, sympy.S.Zero, near)
            so_far = near + _carried(kept, value(rest)) / below
        brought = as_choices(weight * fenced_sum(element, -near) / below)
        if kept.contribution == 1:
            moved = right(kept.name) * (right(name) - left(name)) + right(rest)
            merge = left(name) + _merged(kept, left(rest), moved) / below
        else:
            # From the heavier side: the mean of the other may be large, and its weight as good as
            # none; the way from there is rounded as far as it is from 0.
            own, other = left(kept.name), right(kept.name)
            lighter = Compared(_merged(kept, own, sympy.S.Zero)) < Compared(
                _merged(kept, sympy.S.Zero, other)
            )
            start = sympy.Piecewise((right(name), lighter), (left(name), True), evaluate=False)
            moved = (
                own * (left(name) - start) + left(rest),
                other * (right(name) - start) + right(rest),
            )
            merge = start + _merged(kept, *moved) / below
        if wanted.visible:
            so_far = _unless_infinite([value(name)], so_far)
            merge = _unless_infinite([left(name), right(name)], merge)
        mean = state.add(name, SUM, brought, so_far, merge, no_sign=False)
        if first is not None:
            state.of(mean).begun = chosen(magnitude(first), sympy.oo, sympy.S.Zero, first)
        about = [
            side(rest) + side(kept.name) * (side(name) - new(name)) for side in (value, left, right)
        ]
        apart = as_choices(weight * fenced_sum(element, -new(name)))
        carry, merge = _carried(kept, about[0]), _merged(kept, *about[1:])
        first = state.add(rest, SUM, apart, carry, merge, no_sign=False)
        return self._centre(element, mean, mass, first)

    def _reference(self, element: sympy.Expr, mass: sympy.Symbol, name: str) -> Centre:
        """Add the slot of a mean that is only a reference point: any place near it would do."""
        state = self.progress.state
        kept = state.of(mass)
        below = state.usable(1 / mass, new) ** -1
        apart = fenced_sum(element, -value(name))
        brought = as_choices(as_factors(kept.contribution) * apart / below)
        share = _merged(kept, sympy.S.Zero, right(kept.name)) / below
        merge = left(name) + (right(name) - left(name)) * share
        symbol = state.add(name, SUM, brought, value(name), merge, no_sign=False)
        return self._centre(element, symbol, mass)

    def _centre(
        self,
        element: sympy.Expr,
        symbol: sympy.Symbol,
        mass: sympy.Symbol,
        rest: sympy.Symbol | None = None,
    ) -> Centre:
        name = self.progress.state.of(symbol).name
        centre = Centre(element, symbol, mass, sympy.Dummy(f"{name}_distance", real=True), rest)
        self.progress.centres.append(centre)
        return centre

    def extreme(self, symbol: sympy.Symbol, term: sympy.Expr) -> Centre | None:
        """The largest or least element as a reference point for the distances of a term.

        None where the term counts elements that the extreme leaves out: a tile that has no others
        knows no reference point, and what is far from 0 would cancel.
        """
        kept = self.progress.state.of(symbol)
        element = kept.contribution
        if isinstance(element, sympy.Piecewise) and not term.has(element):
            element, condition = element.args[0]
            # What is masked in the term is not masked a second time within it.
            if not masks_all(term, condition):
                return None
        for each in self.progress.centres:
            if (each.symbol, each.element) == (symbol, element):
                return each
        return Centre(element, symbol, None, sympy.Dummy(f"{kept.name}_distance", real=True))

    def _mass(self, mean: Mean) -> sympy.Symbol:
        """The slot that sums the weights of a mean, or counts its elements."""
        if not mean.weight:
            return self.progress.count()
        result = self.progress.known[self.progress.cascade.stage(mean.weight).symbol]
        state = self.progress.state
        slots = [e for e in result.free_symbols & state.symbols if state.of(e).monoid == SUM]
        assert len(slots) == 1, f"weights of {mean.stage} are kept in {len(slots)} sums"
        return slots[0]

    def moment(
        self,
        name: str,
        rescaling: Rescaling,
        element: sympy.Expr,
        *,
        fresh: bool = False,
    ) -> sympy.Expr:
        """Accumulate a sum of a polynomial in distances; returns it over slots.

        That is 0, a slot's symbol, or a multiple of it; factors of `element` may be over elements.
        `name` is that of the slot, if it needs one. A lower moment is `fresh`: its slot gets a new
        name like that. A first moment is what it is in floating point, not 0 as in real arithmetic:
        rounding leaves some of it, and of infinite elements it is no number.
        """
        state = self.progress.state
        centres = self.progress.centres_in(element)
        if not centres:
            number, rest = element.as_independent(*self.progress.elements, as_Add=False)
            return number * self.progress.accumulate(name, rescaling, rest, fresh=fresh)
        own = self._own(rescaling, element, centres)
        if own is not None and own[0].rest is None and not fresh:
            return sympy.S.Zero
        if own is not None and own[0].rest is not None and (own[1].is_number or not fresh):
            return own[1] * own[0].rest
        here = {each.distance: self._spelt(each) for each in centres}
        brought = rescaling.contribution(element.xreplace(here), state)
        brought = settled(as_choices(brought))
        same = state.same(SUM, brought)
        if same is not None:
            return same
        name = state.fresh(name) if fresh else name
        # What is never negative stays so where rounding leaves less than nothing of it.
        lower = self._lower(name, rescaling, element, centres)
        made = _Moment(name, tuple(centres), rescaling, lower, even=_is_square(element))
        if any(each.mass is None for each in centres):
            carry, *parts = (self._scaled(made, side) for side in (value, left, right))
            merge = sympy.Add(*parts)
        else:
            so_far, *parts = (self._at(made, side) for side in (value, left, right))
            carry = rescaling.moved(so_far, state)
            merge = rescaling.merged(parts, state)
        symbol = state.add(name, SUM, brought, carry, merge, no_sign=made.even)
        self.progress.moments.add(symbol)
        if all(each.rest is not None for each in centres) and not self._is_seen(made):
            self.progress.finished[value(name)] = self._finished(made)
        return symbol

    def _is_seen(self, made: _Moment) -> bool:
        """Whether rows or results have distances that a sum changes with, as their mean moves.

        These are from means as they are rounded, and so is the sum: of a softmax's gradient, which
        has both, what rounding adds to one is what it takes from the other. A sum of squares about
        its own mean changes by the square of that.
        """
        rests = {each.rest for each in made.centres}
        first = [each for powers, parts in made.lower.items() if sum(powers) == 1 for each in parts]
        if all(slot.free_symbols <= rests for _, slot in first):
            return False
        cascade, means = self.progress.cascade, {each.symbol for each in made.centres}
        shown = set().union(
            *(e.free_symbols for e in (*cascade.rows.values(), *cascade.results.values()))
        )
        found = (self.progress.known[each] for each in shown & self.progress.known.keys())
        return any(each.free_symbols & means for each in found)

    def _finished(self, made: _Moment) -> sympy.Expr:
        """A moment when all is merged: about means that are not rounded, in results alone.

        What rounding leaves of a first moment says how far its mean is off. A sum of squares is
        infinite where it is no number, but the means are: squares of distances from a mean that is
        rounded by 1e23 are infinite, and so is what they move by, which may cancel to NaN. That no
        element was NaN is what finite means say.
        """
        state = self.progress.state
        # Not a square: that of a rest may be out of range.
        off = (
            Unevaluated(state.raw(each.rest, value) * state.usable(1 / each.mass))
            for each in made.centres
            if each.mass is not None
        )
        powers = self._lower_moments(made, value)
        found = value(made.name) + _horner(powers, [-each for each in off])
        if not made.even:
            return found
        means = (magnitude(value(self._name(each))) for each in made.centres)
        # Sympy knows that a magnitude is not negative, and of no NaN.
        a_number = sympy.Ge(Compared(magnitude(found)), sympy.S.Zero)
        infinite = sympy.Add(UNBOUNDED, *(-each for each in means), evaluate=False)
        made = sympy.Piecewise((magnitude(found), a_number), (infinite, True), evaluate=False)
        # What it divides is divided: sympy would take the reciprocal, which may be out of range.
        return Unevaluated(made)

    def _spelt(self, centre: Centre) -> sympy.Expr:
        """The distance of an element, computed before anything is added to it.

        The element is added up first, as it was where the reference point comes from: what rounding
        took there of the least one would else be missing in every distance.
        """
        return Fence(fenced_sum(centre.element, -self.progress.state.within(centre.symbol, new)))

    def _own(
        self, rescaling: Rescaling, element: sympy.Expr, centres: list[Centre]
    ) -> tuple[Centre, sympy.Expr] | None:
        """The mean whose first moment a sum is a multiple of, and the multiple; or None."""
        if len(centres) != 1 or centres[0].mass is None:
            return None
        weight = sympy.cancel(element / centres[0].distance)
        if weight.free_symbols & self.progress.distances:
            return None
        own = self.progress.state.of(centres[0].mass).contribution
        ratio = quotient(rescaling.contribution(weight, self.progress.state), own)
        if ratio is None or ratio.free_symbols & self.progress.elements:
            return None
        return centres[0], ratio

    def _lower(
        self, name: str, rescaling: Rescaling, element: sympy.Expr, centres: list[Centre]
    ) -> Lower:
        """The lower moments that a moment needs when its centres move, by the binomial formula."""
        moves = {each.distance: each.move for each in centres}
        # A weight is not multiplied out: infinity times 0 may be what becomes of
        # 1/((1 + exp(-u))*(1 + exp(-v))).
        weight, flat = opened(element, moves).as_independent(*moves, as_Add=False)
        scale, weight = weight.as_coeff_Mul()
        self._check_choices(name, flat, moves)
        shifted = flat.xreplace({each: each + moves[each] for each in moves})
        found: Lower = {}
        for exponents, coefficient in _powers(shifted, list(moves.values())):
            if not any(exponents):
                continue
            for part in sympy.Add.make_args(expanded(coefficient, self.progress.distances)):
                number, rest = part.as_coeff_Mul()
                slot = self.moment(f"{name}_lower", rescaling, weight * rest, fresh=True)
                if slot != 0:
                    found.setdefault(exponents, []).append((scale * number, slot))
        return found

    def _check_choices(
        self, name: str, term: sympy.Expr, distances: Collection[sympy.Symbol]
    ) -> None:
        """Refuse choices among polynomials; between one and 0 the condition is a factor by now."""
        for each in sorted(term.atoms(sympy.Piecewise), key=str):
            if each.free_symbols & set(distances):
                raise refused(
                    "cascade-form",
                    name,
                    found=f"{written(self.progress.spelt(each))}, a choice among distances",
                    limit="a polynomial of distances where one condition holds, and 0 elsewhere",
                    instead="sum each case in a stage of its own, with 0 elsewhere",
                )

    def _at(self, made: _Moment, side: Side) -> sympy.Expr:
        """The moment of one side about the new mean, in the side's own scale."""
        return self._shifted(made, side, side(made.name), self._lower_moments(made, side))

    def _lower_moments(self, made: _Moment, side: Side) -> dict[tuple[int, ...], sympy.Expr]:
        """Lower moments of one side in the side's own scale, by what multiplies them."""
        state = self.progress.state
        return {
            exponents: sympy.Add(*(number * state.raw(slot, side) for number, slot in parts))
            for exponents, parts in made.lower.items()
        }

    def _scaled(self, made: _Moment, side: Side) -> sympy.Expr:
        """The moment of one side about the new centres, in the scale of new values.

        Unlike in `_at`, sums are rescaled before they meet how far an extreme moved: from the least
        number of a type, which masks, that is too far for any sum but one that is 0 by then.
        """
        state, rescaling = self.progress.state, made.rescaling

        def kept(number: sympy.Expr, slot: sympy.Expr) -> sympy.Expr:
            more, rest = state.raw(slot, side).as_coeff_Mul()
            return number * more * Unevaluated(rescaling.moved(rest, state, side))

        powers = {
            exponents: sympy.Add(*(kept(*each) for each in parts))
            for exponents, parts in made.lower.items()
        }
        own = rescaling.moved(side(made.name), state, side)
        return self._shifted(made, side, own, powers)

    def _shifted(
        self,
        made: _Moment,
        side: Side,
        own: sympy.Expr,
        powers: Mapping[tuple[int, ...], sympy.Expr],
    ) -> sympy.Expr:
        """A moment plus what the moves of its centres add to it.

        What is infinite stays so: infinite lower moments would make NaN of it. Counts, and what
        rounding leaves of a mean, are finite where the mean is.
        """
        state = self.progress.state
        found = own + _horner(powers, [self._moved(each, side) for each in made.centres])
        found = magnitude(found) if made.even else found
        finite = [state.of(each.rest) for each in self.progress.centres if each.rest is not None]
        used = {e for parts in made.lower.values() for _, slot in parts for e in slot.free_symbols}
        if all(
            state.of(each) in finite
            or not state.of(each).contribution.free_symbols & self.progress.elements
            for each in used & state.symbols
        ):
            return found
        return _unless_infinite([side(made.name)], found)

    def _moved(self, centre: Centre, side: Side) -> sympy.Expr:
        """How far a centre moves; from nothing to a first element, any distance will do."""
        state = self.progress.state
        kept = state.of(centre.symbol)
        before = side(kept.name)
        if kept.infinite:
            before = chosen(before, kept.monoid.identity, sympy.S.Zero, before)
        return before - state.within(centre.symbol, new)


def _unless_infinite(sides: Sequence[sympy.Expr], found: sympy.Expr) -> sympy.Expr:
    """An expression, but the plain sum of sides where one of them is infinite."""
    largest = sympy.Max(*(magnitude(each) for each in sides))
    return chosen(largest, sympy.oo, sympy.Add(*sides), found)


def _carried(mass: Kept, instead: sympy.Expr) -> sympy.Expr:
    """The carry of a sum of weights, with another sum of the same weights in its place."""
    return mass.carry.xreplace({value(mass.name): instead})


def _merged(mass: Kept, one: sympy.Expr, other: sympy.Expr) -> sympy.Expr:
    """The merge of two sums of weights, with other sums of the same weights in their places."""
    assert mass.merge is not None
    return mass.merge.xreplace({left(mass.name): one, right(mass.name): other})


def _horner(
    powers: Mapping[tuple[int, ...], sympy.Expr], moves: Sequence[sympy.Expr]
) -> sympy.Expr:
    """A polynomial in moves by Horner's rule: a power computed alone may be out of range."""
    if not moves:
        return sympy.Add(*powers.values())
    move, *others = moves
    by_degree: dict[int, dict[tuple[int, ...], sympy.Expr]] = {}
    for (degree, *rest), factor in powers.items():
        by_degree.setdefault(degree, {})[tuple(rest)] = factor
    found = sympy.S.Zero
    for degree in range(max(by_degree, default=0), 0, -1):
        found = move * (found + _horner(by_degree.get(degree, {}), others))
    return found + _horner(by_degree.get(0, {}), others)


def _powers(
    term: sympy.Expr, variables: Sequence[sympy.Symbol]
) -> list[tuple[tuple[int, ...], sympy.Expr]]:
    """Coefficients of a polynomial by exponents, the highest first, as they are written.

    `sympy.Poly` would make ``exp(y)/(exp(y) + 1)`` of the weight ``1/(1 + exp(-y))``: infinity
    divided by itself.
    """
    found: dict[tuple[int, ...], sympy.Expr] = {}
    for part in sympy.Add.make_args(expanded(term, variables)):
        coefficient, power = part.as_independent(*variables, as_Add=False)
        powers = sympy.Poly(power, *variables).monoms()[0]
        found[powers] = found.get(powers, sympy.S.Zero) + coefficient
    return sorted(found.items(), key=lambda item: item[0], reverse=True)


def _is_square(element: sympy.Expr) -> bool:
    return bool(element.is_nonnegative)
