"""A derivation in the making: the state so far, what stages became, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from crossfuse.cascade.algebra.exponents import (
    joined,
    nonnegative,
    positive,
    ratios,
    within_choices,
)
from crossfuse.cascade.algebra.moments import Centre
from crossfuse.cascade.algebra.separation import (
    Cancels,
    Coupled,
    Product,
    cancelling,
    coupled,
    products,
)
from crossfuse.cascade.algebra.state import Kept, Side, State, chosen
from crossfuse.cascade.expressions.functions import (
    Fence,
    Flag,
    fenced_sum,
    is_mask,
    opened,
    settled,
)
from crossfuse.cascade.spec import SUM, Cascade, Monoid, Stage, Step, left, new, right, value

# Chooses which rescalings are applied as a stream goes on, and which once, at its end.
#
# These are the two variants of FlashAttention. ``sum G(x) * H(d)`` with the final ``d`` needs no
# correction: the sum of G is accumulated, and H is applied to it once. Only by what G needs in
# order to stay in range contributions and the state are rescaled: the maximum under an
# exponential, the largest magnitude under a power, and a scale in front of a rounding. Where H
# has no inverse, what stands in for the result (`Slot.guard`) is used in the state and in
# contributions alike.

# Masks: as factors in products, as choices in code.
#
# A sum skips an element by ``Piecewise((v, condition), (0, True))``. As a factor that is 1 or 0 the
# mask takes part in products like any weight; in what is computed it is a choice again, so that
# nothing that is masked is ever multiplied by 0.


def as_factors(term: sympy.Basic) -> sympy.Basic:
    """Write ``v if condition else 0`` as ``v * (1 if condition else 0)``, outside of functions."""
    if isinstance(term, sympy.Add | sympy.Mul | Fence):
        return term.func(*(as_factors(each) for each in term.args))
    if isinstance(term, sympy.Piecewise) and len(term.args) == 2 and term.args[1][0] == 0:
        shown, condition = term.args[0]
        if shown != 1:
            return as_factors(shown) * sympy.Piecewise((1, condition), (0, True))
    return term


def as_choices(term: sympy.Basic) -> sympy.Basic:
    """Undo `as_factors`."""
    if isinstance(term, sympy.Add | Fence):
        return term.func(*(as_choices(each) for each in term.args))
    if not isinstance(term, sympy.Mul):
        return term
    masks = [each for each in term.args if is_mask(each)]
    if not masks:
        return term
    rest = sympy.Mul(*(each for each in term.args if each not in masks))
    condition = sympy.And(*(each.args[0][1] for each in masks))
    return sympy.Piecewise((rest, condition), (0, True))


def quotient(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr | None:
    """The quotient of two terms; None if the divisor has a mask that the dividend lacks.

    A mask divides a flag of the same condition, and a flag a mask: both weigh the same.
    """
    over = list(sympy.Mul.make_args(as_factors(above)))
    under = list(sympy.Mul.make_args(as_factors(below)))
    for mask in [each for each in under if is_mask(each) or isinstance(each, Flag)]:
        same = [each for each in over if _shown(each) == _shown(mask)]
        if not same:
            return None
        over.remove(same[0])
        under.remove(mask)
    return joined(sympy.Mul(*over) / sympy.Mul(*under))


def _shown(factor: sympy.Basic) -> sympy.Basic:
    return factor.args[0] if isinstance(factor, Flag) else factor


def masks_all(term: sympy.Expr, condition: sympy.Basic) -> bool:
    """Whether all products of a term, with masks as factors, are 0 where a condition is false."""
    asked = set(sympy.And.make_args(condition))
    return all(
        asked
        <= {
            part
            for each in sympy.Mul.make_args(product)
            if is_mask(each)
            for part in sympy.And.make_args(each.args[0][1])
        }
        for product in sympy.Add.make_args(term)
    )


@dataclass(frozen=True)
class Rescaling:
    """The part of H that scales the state and the contributions."""

    #: Of ``exp``.
    exponents: sympy.Expr = sympy.S.Zero
    #: Slots, or maxima of them and positive numbers, and the powers of them that are divided by.
    powers: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    #: Whether the sum so far is proved to be 0 where a slot of the rescaling has no inverse.
    vanishes: bool = True

    @property
    def free(self) -> bool:
        """Whether nothing is rescaled."""
        return self.exponents == 0 and not self.powers

    @property
    def factor(self) -> sympy.Expr:
        """The rescaling as a factor of H."""
        return sympy.Mul(sympy.exp(self.exponents), *(base**-power for base, power in self.powers))

    def contribution(self, element: sympy.Expr, state: State) -> sympy.Expr:
        """The contribution of one element: G in the scale of new values, exponents joined."""
        made = element
        for base, power in self.powers:
            below = state.usable(1 / base, new) ** -1
            made = ratios(times(made, below**-power))
        if self.exponents != 0:
            made = times(made, sympy.exp(state.within(self.exponents, new)))
            made = made.replace(sympy.exp, lambda each: sympy.exp(self._apart(each, state)))
        return made

    def _apart(self, exponent: sympy.Expr, state: State) -> sympy.Expr:
        """An exponent with each extreme subtracted from what it is of.

        Of ``exp(x - m) * exp(y - n)`` the sum of m and n is rounded as large numbers are.
        """
        addends = set(sympy.Add.make_args(opened(exponent)))
        parts = []
        for each in sympy.Add.make_args(self.exponents):
            number, symbol = each.as_coeff_Mul()
            if symbol not in state.symbols:
                continue
            of = sympy.Add.make_args(-number * state.of(symbol).contribution)
            part = {state.within(each, new), *of}
            if part <= addends:
                addends -= part
                parts.append(sympy.Add(*part))
        if not parts or (len(parts) == 1 and not addends):
            return exponent
        return fenced_sum(*parts, sympy.Add(*addends))

    def merged(self, parts: Sequence[sympy.Expr], state: State) -> sympy.Expr:
        """The sum of the values of two sides in the scale of the merged state."""
        sides = zip(parts, (left, right), strict=True)
        return sympy.Add(*(self.moved(part, state, side) for part, side in sides))

    def correction(self, state: State, side: Side = value) -> sympy.Expr:
        """The factor from the scale of a side to that of new values."""
        found = sympy.S.One
        if self.exponents != 0:
            # Each extreme by how far it moved: sums of several are rounded as large numbers are.
            moved = (
                state.within(each, new) - state.raw(each, side)
                for each in sympy.Add.make_args(self.exponents)
            )
            found *= sympy.exp(settled(fenced_sum(*moved)))
        for base, power in self.powers:
            ratio = (state.raw(base, side) * state.usable(1 / base, new)) ** power
            found *= ratios(ratio)
        return found

    def moved(self, part: sympy.Expr, state: State, side: Side = value) -> sympy.Expr:
        """Rescale a value, so far or of a side, from its own scale to that of new values."""
        if self.free:
            return part
        scaled = part * self.correction(state, side)
        if self.vanishes:
            return scaled
        # Not proved to be 0 where a maximum is of nothing: stand-ins on both sides, and 0 stays 0.
        slots = [each for each in state.kept if each.infinite]
        stood = {
            side(each.name): chosen(
                side(each.name), each.monoid.identity, sympy.S.Zero, side(each.name)
            )
            for each in slots
            if state.among(each, self.exponents.free_symbols)
        }
        return chosen(part, sympy.S.Zero, sympy.S.Zero, scaled.xreplace(stood))


def split(
    element: sympy.Expr,
    context: sympy.Expr,
    state: State,
    elements: frozenset[sympy.Symbol],
    rounded: bool,
) -> tuple[Rescaling, sympy.Expr]:
    """Split H into the rescaling, which streams, and the rest, which is applied once at the end.

    G and H are `element` and `context`, H over slots of `state`; `elements` change along the axis.
    Terms that are `rounded` to a narrow type must be scaled before that.
    """
    exponents: list[sympy.Expr] = []
    powers: list[tuple[sympy.Expr, sympy.Expr]] = []
    rest: list[sympy.Expr] = []
    grown = bool(_exponents(element, elements))
    vanishes = True
    for factor in sympy.Mul.make_args(context):
        base, power = factor.as_base_exp()
        slots = [state.of(each) for each in factor.free_symbols & state.symbols]
        if isinstance(factor, sympy.exp) and grown and slots:
            exponent = opened(factor.args[0])
            exponents.append(exponent)
            vanishes &= all(
                _added(e, exponent, state) and _bounded(e, element, elements)
                for e in slots
                if e.infinite
            )
            continue
        scaling = _scaling(base, -power, element, state) if rounded or power != -1 else 0
        powers += [(base, scaling)] if scaling != 0 else []
        rest.append(factor * base**scaling)
    whole = within_choices(sympy.Add(*exponents))
    bounds: list[sympy.Expr] = []
    loose: list[sympy.Expr] = []
    for each in sympy.Add.make_args(whole):
        slots = [state.of(symbol) for symbol in each.free_symbols & state.symbols]
        (bounds if all(slot.monoid.ordered for slot in slots) else loose).append(each)
    if any(each.free_symbols & state.symbols for each in bounds):
        # Sums so far bound nothing: what is below an extreme already is multiplied at the end.
        whole = sympy.Add(*bounds)
        rest.append(sympy.exp(sympy.Add(*loose)))
    return Rescaling(whole, tuple(powers), vanishes), sympy.Mul(*rest)


def _scaling(base: sympy.Expr, power: sympy.Expr, element: sympy.Expr, state: State) -> sympy.Expr:
    """The largest power of a divisor, of those there are, that keeps an element in range; or 0.

    Of ``x**2/a**3`` that is ``a**2``: once more the sum of ``(x/a)**2`` is divided at the end.
    """
    if not _divides(-power):
        return sympy.S.Zero
    fewer = range(int(power) - 1, 1, -1) if power.is_Integer else ()
    tried = (power, *map(sympy.Integer, fewer))
    return next((each for each in tried if _scales(base, element, each, state)), sympy.S.Zero)


def _divides(power: sympy.Expr) -> bool:
    return bool(power.could_extract_minus_sign())


def times(element: sympy.Expr, factor: sympy.Expr) -> sympy.Expr:
    """Multiply by an exponential, pairing it with the exponentials that it makes small."""
    if isinstance(element, sympy.Piecewise):
        sides = [(times(each, factor) if each != 0 else each, test) for each, test in element.args]
        return sympy.Piecewise(*sides)
    if not element.has(sympy.exp):
        # A distance is added up first: of large numbers times a scale little would be left.
        return joined(element * factor)
    if isinstance(element, Fence):
        return times(element.args[0], factor)
    if isinstance(element, sympy.Add):
        return sympy.Add(*(times(each, factor) for each in element.args))
    if isinstance(element, sympy.Mul):
        for each in element.args:
            inside = isinstance(each, sympy.Piecewise | sympy.Add | Fence)
            if (
                inside
                and each.has(sympy.exp)
                and not element.func(*_others(element, each)).has(sympy.exp)
            ):
                return sympy.Mul(times(each, factor), *_others(element, each))
    return joined(element * factor)


def _others(product: sympy.Mul, one: sympy.Expr) -> list[sympy.Expr]:
    return [each for each in product.args if each != one]


def _added(kept: Kept, exponent: sympy.Expr, state: State) -> bool:
    """Whether corrections are 0 where a slot so far is infinite, or finite as in a maximum.

    The largest is subtracted and the least is added, not times another slot.
    """
    for addend in sympy.Add.make_args(exponent):
        slots = [each for each in addend.free_symbols & state.symbols if state.of(each) is kept]
        for symbol in slots:
            factor = -addend / symbol if kept.monoid.name == "max" else addend / symbol
            alone = bool(factor.is_positive) and not factor.free_symbols & state.symbols
            if not alone and not isinstance(addend.as_coeff_Mul()[1], sympy.Max | sympy.Min):
                return False
    return True


def _bounded(kept: Kept, element: sympy.Expr, elements: frozenset[sympy.Symbol]) -> bool:
    """Whether exponentials are 0 wherever the slot is infinite.

    Their exponents must be positive multiples of its terms, under the same mask.
    """
    bound, shown = kept.contribution, None
    if isinstance(bound, sympy.Piecewise) and bound.args[-1][0] == -sympy.oo:
        (bound, shown), *more = bound.args
        if len(more) > 1:
            return False
    for exponent, test in _exponents(as_choices(element), elements):
        branches = [(exponent, test)]
        if isinstance(exponent, sympy.Piecewise):
            branches = [each for each in exponent.args if each[0] != -sympy.oo]
        for each, condition in branches:
            # A largest element is -oo where exponents are; of a least one they are its negatives.
            ratio = each / bound if kept.monoid.name == "max" else -each / bound
            alike = not ratio.free_symbols & elements and bool(ratio.is_positive)
            if not alike or (shown is not None and condition != shown):
                return False
    return True


def _exponents(
    element: sympy.Expr, elements: frozenset[sympy.Symbol], test: sympy.Basic = sympy.true
) -> list[tuple[sympy.Expr, sympy.Basic]]:
    """Exponents over elements, each with the condition under which it is used."""
    if isinstance(element, sympy.exp):
        return [(element.args[0], test)] if element.free_symbols & elements else []
    if isinstance(element, sympy.Piecewise):
        return [e for each, inner in element.args for e in _exponents(each, elements, inner)]
    return [e for each in element.args for e in _exponents(each, elements, test)]


def _scales(base: sympy.Expr, element: sympy.Expr, power: sympy.Expr, state: State) -> bool:
    """Whether a divisor keeps an element in range, and can be taken back where it is 0."""
    if base in state.symbols:
        return _is_largest(state.of(base)) and _vanishes(element, state.of(base), power)
    # Such as max(a, epsilon) and a + epsilon: never 0, so that it can always be taken back. A norm
    # in the place of a largest magnitude may be infinite, which cannot.
    inside = [state.of(each) for each in base.free_symbols & state.symbols]
    if len(inside) != 1 or not positive(base):
        return False
    return isinstance(base, sympy.Max | sympy.Add) and _is_largest(*inside)


def _is_largest(kept: Kept) -> bool:
    return not kept.signed and kept.monoid.name == "max"


def _vanishes(element: sympy.Expr, kept: Kept, power: sympy.Expr) -> bool:
    """Whether an element has the slot's own term as a factor, so that both are 0 together."""
    known = sympy.Mul.make_args(kept.contribution)
    inside = sympy.Mul(*(each.args[0] if isinstance(each, sympy.Abs) else each for each in known))
    for candidate in (kept.contribution, inside):
        below = sympy.fraction(element)[1]
        rest = sympy.fraction(element / candidate**power)[1]
        grown = rest.free_symbols & candidate.free_symbols
        if not grown - below.free_symbols:
            return True
    return False


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
