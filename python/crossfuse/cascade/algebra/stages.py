"""Derives a cascade stage by stage: what each kind of stage adds to the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from crossfuse.calls import checked
from crossfuse.cascade.algebra import cancellation
from crossfuse.cascade.algebra.exponents import (
    averages,
    has_one_sign,
    joined,
    natural,
    nonnegative,
    powers_of_products,
    ratios,
    rescaled,
    squares_of_quotients,
    unlogged,
)
from crossfuse.cascade.algebra.means import means, ordered
from crossfuse.cascade.algebra.moments import Centre, Mean, centred, is_polynomial
from crossfuse.cascade.algebra.progress import Progress, Rescaling, as_factors, split
from crossfuse.cascade.algebra.scaled_moments import ScaledMoments, scores
from crossfuse.cascade.algebra.separation import Product, refused, shared_out, verified, words
from crossfuse.cascade.algebra.shifted_moments import ShiftedMoments
from crossfuse.cascade.algebra.writing import written
from crossfuse.cascade.expressions.functions import Fence, cancelled, unopened
from crossfuse.cascade.spec import MAX, RANKED, Cascade, Derivation, Factor, Stage, Step, value

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
        self.scaled = ScaledMoments(progress, moments)

    def take(self, stage: Stage, term: sympy.Expr) -> None:
        """Derive a sum: over distances from means and extremes if possible, else as products."""
        progress = self.progress
        near = self._near(term)
        if near is None:
            found = progress.separated(stage, term)
            rank = verified(stage, term, found, progress.elements, progress.results(term))
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
        rounded = self._corrects(found)
        for number, (g, h) in enumerate(self._placed(stage, found)):
            known = None if stage.cast else scores(progress, g, h)
            if known is not None:
                kept = self.scaled.keep(progress.named(stage, number, len(found)), known)
                total += kept * known.rest
                name = state.of(kept).name if kept in state.symbols else ""
                factors.append(Factor(progress.spelt(g), progress.spelt(h), name))
                eager += [known.divisor, known.centre.symbol]
                hoisted.append(known.rest)
                notes.append("kept as a power of scores, by the deviation so far")
                continue
            part, rest = split(g, h, state, progress.elements, bool(stage.cast))
            self._check_bounds(stage, part)
            kept = keep(progress.named(stage, number, len(found)), part, g)
            kept = progress.about_rounded(kept) if rounded else kept
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

    def _check_bounds(self, stage: Stage, part: Rescaling) -> None:
        """Refuse exponentials below what does not bound them.

        The mean of a tile may be far below the mean of the row: of ``exp(x - mean)`` a thread that
        has one large element has an infinity, which no correction takes back.
        """
        state = self.progress.state
        free = part.exponents.free_symbols & state.symbols
        loose = sorted((each for each in free if not state.of(each).monoid.ordered), key=str)
        if loose:
            raise refused(
                "cascade-range",
                stage.name,
                found=f"exponentials less {written(self.progress.spelt(loose[0]))}, which elements "
                "of a part of the axis may exceed by any number",
                limit="exponents that a largest or least element bounds",
                instead="subtract the maximum, or cut the cascade before this stage",
            )

    def _corrects(self, found: Iterable[Product]) -> bool:
        """Whether a sum says itself how far a mean is off, as the variance of a layer norm does.

        Moments that are about the exact mean already would be corrected twice.
        """
        state = self.progress.state
        rests = [state.of(each.rest) for each in self.progress.centres if each.rest is not None]
        free = set().union(*(h.free_symbols for _, h in found)) & state.symbols
        return any(state.of(each) in rests for each in free)

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


# Stages that choose among elements: an increasing function commutes with the choice.


@dataclass(frozen=True)
class Affine:
    """``factor * element + addend``, or ``factor * exp(element) + addend``; the factor is >= 0."""

    #: The compared expression.
    element: sympy.Expr
    #: Over results and invariants, as the addend.
    factor: sympy.Expr
    addend: sympy.Expr
    #: Whether the element stands in an exponent.
    exponential: bool
    #: In words.
    proof: str
    notes: tuple[str, ...] = ()
    #: The whole, if the element stands in it as it is and nothing else changes along the axis.
    term: sympy.Expr | None = None

    def result(self, chosen: sympy.Expr) -> sympy.Expr:
        """The stage's result: the term of the chosen element, added up in its order."""
        if self.term is not None:
            return self.term.xreplace({self.element: chosen})
        return self.factor * (sympy.exp(chosen) if self.exponential else chosen) + self.addend


def affine(progress: Progress, stage: Stage, term: sympy.Expr) -> Affine:
    """Write a stage's term as an increasing function of an element of the axis.

    The stage is a maximum, a minimum, a top-k, or a log of a sum of exponentials. It is refused if
    its term is no such function, or the factor's sign is not proved.
    """
    masked = _unmasked(stage, term)
    if masked is not None:
        inner, test = masked
        found = affine(progress, stage, inner)
        nothing = stage.monoid.identity
        if found.exponential and nothing == sympy.oo:
            raise progress.coupled(stage, term, term)
        element = sympy.Piecewise((found.element, test), (nothing, True))
        return Affine(
            element, found.factor, found.addend, found.exponential, found.proof, found.notes
        )
    parts = progress.separated(stage, term)
    moving = [(g, h) for g, h in parts if g.free_symbols & progress.elements]
    addend = sympy.Add(*(g * h for g, h in parts if not g.free_symbols & progress.elements))
    if len(moving) != 1:
        raise progress.coupled(stage, term, sympy.Add(*(g * h for g, h in moving)))
    found = _signed(stage, moving[0], addend, progress)
    one = sympy.Dummy(real=True)
    alone = not term.xreplace({found.element: one}).free_symbols & progress.elements
    return replace(found, term=term) if alone and term.has(found.element) else found


def _signed(stage: Stage, product: Product, addend: sympy.Expr, progress: Progress) -> Affine:
    element, factor = product
    if not factor.free_symbols & progress.state.symbols:
        # Of `(x - m)/0.07` the largest x is found, not the largest x/0.07: x/0.07 - m/0.07 has the
        # rounding of large numbers, the difference has none.
        number, moving = (element * factor).as_coeff_Mul()
        if addend == 0 or number.is_negative:
            number, moving = sympy.S.One, element * factor
        return Affine(moving, number, addend, False, _ADDED)
    if not nonnegative(factor):
        raise refused(
            "cascade-sign",
            stage.name,
            found=f"a {stage.monoid.name} of elements times {written(progress.spelt(factor))}, "
            "whose sign is not proved",
            limit="a factor that is proved not to be negative",
            instead="reduce the elements, maximum and minimum, and multiply afterwards; or declare "
            "the elements that make the factor nonnegative",
        )
    powers = [each for each in sympy.Mul.make_args(element) if isinstance(each, sympy.exp)]
    rest = sympy.Mul(*(each for each in sympy.Mul.make_args(element) if each not in powers))
    if len(powers) == 1 and nonnegative(rest) and not rest.free_symbols & progress.elements:
        note = "exp and positive factors do not change the order, so exponents are compared"
        exponent = powers[0].args[0]
        return Affine(exponent, rest * factor, addend, True, _SCALED, (note,))
    return Affine(element, factor, addend, False, _SCALED)


def _unmasked(stage: Stage, term: sympy.Expr) -> tuple[sympy.Expr, sympy.Basic] | None:
    """A term and its mask, if masked elements are the identity of the reduction; else None."""
    if not isinstance(term, sympy.Piecewise) or len(term.args) != 2:
        return None
    (inner, test), (other, _) = term.args
    if other == stage.monoid.identity:
        return inner, test
    return (other, sympy.Not(test)) if inner == stage.monoid.identity else None


_ADDED = "an addend is the same for all elements: it does not change the order"
_SCALED = "a factor is proved not to be negative: it does not change the order"


# Distributive laws.


#: Every law that derivations use, by the reduction and the operator that is pulled out of it.
LAWS = {
    "sum, *": "a*c + b*c = (a + b)*c",
    "max, +": "max(a + c, b + c) = max(a, b) + c",
    "min, +": "min(a + c, b + c) = min(a, b) + c",
    "topk, +": "the k largest of a + c are the k largest of a, plus c",
    "argmax, +": "where a + c is largest, a is",
    "argmin, +": "where a + c is least, a is",
    "max, *": "max(a*c, b*c) = max(a, b)*c",
    "min, *": "min(a*c, b*c) = min(a, b)*c",
    "topk, *": "the k largest of a*c are the k largest of a, times c",
    "argmax, *": "where a*c is largest, a is",
    "argmin, *": "where a*c is least, a is",
    "logaddexp, +": "log(exp(a + c) + exp(b + c)) = log(exp(a) + exp(b)) + c",
    "prod, *": "prod(a*c) over n elements = prod(a) * c**n",
}


class Deriver:
    """Derives stages in order, by the rule for their kind; `means` are sums that become means."""

    def __init__(self, cascade: Cascade, means: Mapping[str, Mean]) -> None:
        self.progress = Progress(cascade)
        self.means = means
        self.moments = ShiftedMoments(self.progress)
        self.sums = Sums(self.progress, self.moments)
        #: Extremes whose elements lack an addend: in place of `(x - m)*w` the largest `x*w` is
        #: found, which is rounded as far as x is from 0. What is about them may cancel.
        self.rounded: set[sympy.Symbol] = set()

    def take(self, stage: Stage) -> None:
        """Derive a stage; those that it uses are derived already."""
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
        if stage.term.free_symbols & self.rounded:
            progress.split.append(stage.name)
        if stage.monoid.name == "logaddexp":
            self._logaddexp(stage, term)
        elif stage.name in self.means:
            self.moments.take(stage, self.means[stage.name])
        elif not progress.results(term):
            self._plain(stage, term)
        elif stage.monoid.name == "sum":
            self.sums.take(stage, term)
        elif stage.monoid.name == "prod":
            self._prod(stage, term)
        else:
            self._ordered(stage, term)

    def _plain(self, stage: Stage, term: sympy.Expr) -> None:
        progress = self.progress
        symbol = progress.keep(stage.name, stage.monoid, term)
        factor = Factor(term, sympy.S.One, progress.state.of(symbol).name)
        proof = "uses no earlier result"
        progress.done(stage, symbol, Step(stage.name, "", (factor,), (), (), None, proof))

    def _ordered(self, stage: Stage, term: sympy.Expr) -> None:
        progress = self.progress
        found = affine(progress, stage, term)
        symbol = progress.keep(stage.name, stage.monoid, found.element)
        result = found.result(symbol)
        name = progress.state.of(symbol).name
        if found.addend != 0 and not found.element.as_coeff_Mul()[1].is_Symbol:
            self.rounded.add(stage.symbol)
            progress.split.append(stage.name)
        progress.direct[stage.symbol] = found.result(value(name))
        factor = Factor(found.element, progress.spelt(found.factor), name)
        hoisted = progress.names([found.factor, found.addend])
        added = found.factor == 1 and not found.exponential
        pair = f"{stage.monoid.name}, {'+' if added else '* (c >= 0)'}"
        step = Step(stage.name, pair, (factor,), (), hoisted, None, found.proof, found.notes)
        progress.done(stage, result, step)

    def _prod(self, stage: Stage, term: sympy.Expr) -> None:
        progress = self.progress
        found = progress.separated(stage, term)
        if len(found) != 1:
            raise progress.coupled(stage, term, term)
        rank = verified(stage, term, found, progress.elements, progress.results(term))
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
        """Derive a log of a sum of exponentials: a maximum, and a sum of exponentials below it."""
        progress = self.progress
        element, addend = term, sympy.S.Zero
        if progress.results(term):
            found = affine(progress, stage, term)
            if found.factor != 1 or found.exponential:
                raise progress.coupled(stage, term, found.factor)
            element, addend = found.element, found.addend
        largest = progress.keep(progress.state.fresh(f"{stage.name}_max"), MAX, element)
        rescaling = Rescaling(exponents=-largest)
        name = progress.state.fresh(f"{stage.name}_sum")
        symbol = progress.accumulate(name, rescaling, sympy.exp(element))
        factor = Factor(element, progress.spelt(addend), progress.state.of(symbol).name)
        step = Step(
            stage.name,
            "logaddexp, +",
            (factor,),
            progress.names([largest]),
            progress.names([addend]),
            rescaling.correction(progress.state),
            "log sum exp(x + d) = d + log sum exp(x)",
            ("kept as a maximum and a sum of exponentials below it",),
        )
        progress.done(stage, largest + sympy.log(symbol) + addend, step)


# Derives a cascade stage by stage.


_KNOWN: dict[tuple[object, ...], Derivation] = {}
_MOST_KNOWN = 512


@checked
def derive(cascade: Cascade) -> Derivation:
    """Derive how a cascade streams.

    Derivations are cached by what a cascade is made of.

    Parameters
    ----------
    cascade : Cascade
        Reductions over one axis, from `crossfuse.cascade.detect.detect` or written by hand.

    Returns
    -------
    Derivation
        What is kept from element to element, how it is corrected, and how two states merge.

    Raises
    ------
    CascadeRefused
        If a stage's term is no finite sum of products, or a sign cannot be proved; with the stage.

    Examples
    --------
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> func = cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=64"))
    >>> [each.name for each in derive(detect(func)[0].cascade).slots]
    ['m', 's']
    """
    key = _key(cascade)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _derive(cascade)
    return _KNOWN[key]


def _key(cascade: Cascade) -> tuple[object, ...]:
    parts = (cascade.results, cascade.rows, cascade.firsts)
    named = tuple(tuple(each.items()) for each in parts)
    head = (cascade.stages, cascade.elements, cascade.invariants, cascade.index, cascade.length)
    return (*head, *named)


def _derive(cascade: Cascade) -> Derivation:
    found = means(cascade)
    deriver = Deriver(cascade, found)
    for stage in ordered(cascade, found):
        deriver.take(stage)
    progress = deriver.progress
    state, known = progress.state, progress.known
    elements, invariants = set(cascade.elements), set(cascade.invariants)
    sums = {value(each.name) for each in state.kept if each.monoid.name == "sum"}
    unfinished = {each: value(state.of(of).name) for of, each in progress.unfinished.items()}

    def over_slots(
        wanted: Mapping[str, sympy.Expr], *, as_rows: bool = False
    ) -> dict[str, sympy.Expr]:
        found = {}
        for name, each in wanted.items():
            whole = progress.direct.get(each, cancelled(sympy.sympify(each).xreplace(known)))
            whole = whole.xreplace(progress.unfinished)
            made = rescaled(joined(state.finished(joined(whole))))
            # Powers of quotients stay such: squares of elements or a divisor may be out of range.
            if as_rows:
                made = squares_of_quotients(ratios(shared_out(made, elements, invariants)))
            else:
                made = ratios(averages(made, sums, cascade.length))
            found[name] = powers_of_products(made).xreplace(progress.finished).xreplace(unfinished)
        return found

    stages = over_slots({each.name: each.symbol for each in cascade.stages})
    results = over_slots(cascade.results)
    rows = over_slots(cascade.rows, as_rows=True)
    order = {each.name: i for i, each in enumerate(cascade.stages)}
    steps = sorted(progress.steps, key=lambda each: order[each.stage])
    rounded = [each for each in cascade.stages if each.cast]
    reason = "; ".join(
        f"stage {each.name} rounds its term to {each.cast}: partial results are rounded before "
        "the final scale is known"
        for each in rounded
    )
    slots = tuple(each.slot() for each in state.kept)
    made = Derivation(cascade, slots, stages, results, rows, tuple(steps), not rounded, reason)
    cancellation.check(made, progress.split)
    return made
