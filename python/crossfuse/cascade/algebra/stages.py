"""Derives each kind of stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from crossfuse.cascade.algebra.exponents import joined, natural, nonnegative, unlogged
from crossfuse.cascade.algebra.moments import Mean
from crossfuse.cascade.algebra.progress import Progress
from crossfuse.cascade.algebra.proof import checked, refused, words
from crossfuse.cascade.algebra.rescaling import Rescaling
from crossfuse.cascade.algebra.separation import Product
from crossfuse.cascade.algebra.shifted_moments import ShiftedMoments
from crossfuse.cascade.algebra.sums import Sums
from crossfuse.cascade.algebra.writing import written
from crossfuse.cascade.derivation import Factor, Step, value
from crossfuse.cascade.spec import INDEXED, MAX, RANKED, Cascade, Monoid, Stage

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
        return Affine(element * factor, sympy.S.One, addend, False, _ADDED)
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


@dataclass(frozen=True)
class Pair:
    """A distributive pair: an operator that can be pulled out of a reduction."""

    #: Name of the monoid.
    reduction: str
    #: ``"+"``, ``"*"`` or ``"increasing"``.
    operator: str
    law: str
    #: What must be proved of the operand; empty if nothing.
    condition: str = ""

    @property
    def text(self) -> str:
        """The pair as steps name it."""
        return f"{self.reduction}, {self.operator}"


#: Every law that derivations use.
PAIRS = (
    Pair("sum", "*", "a*c + b*c = (a + b)*c"),
    Pair("max", "+", "max(a + c, b + c) = max(a, b) + c"),
    Pair("min", "+", "min(a + c, b + c) = min(a, b) + c"),
    Pair("topk", "+", "the k largest of a + c are the k largest of a, plus c"),
    Pair("argmax", "+", "where a + c is largest, a is"),
    Pair("argmin", "+", "where a + c is least, a is"),
    Pair("max", "*", "max(a*c, b*c) = max(a, b)*c", "c >= 0"),
    Pair("min", "*", "min(a*c, b*c) = min(a, b)*c", "c >= 0"),
    Pair("topk", "*", "the k largest of a*c are the k largest of a, times c", "c >= 0"),
    Pair("argmax", "*", "where a*c is largest, a is", "c >= 0"),
    Pair("argmin", "*", "where a*c is least, a is", "c >= 0"),
    Pair("logaddexp", "+", "log(exp(a + c) + exp(b + c)) = log(exp(a) + exp(b)) + c"),
    Pair("prod", "*", "prod(a*c) over n elements = prod(a) * c**n"),
)


def pair_of(monoid: Monoid, added: bool) -> str:
    """The name of a pair: its operator is an addition, or a multiplication by a number >= 0."""
    operator = "+" if added else "*"
    found = next(p for p in PAIRS if (p.reduction, p.operator) == (monoid.name, operator))
    return found.text + (f" ({found.condition})" if found.condition else "")


class Deriver:
    """Derives stages in order, by the rule for their kind; `means` are sums that become means."""

    def __init__(self, cascade: Cascade, means: Mapping[str, Mean]) -> None:
        self.progress = Progress(cascade)
        self.means = means
        self.moments = ShiftedMoments(self.progress)
        self.sums = Sums(self.progress, self.moments)

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
        """Derive a stage that uses no results."""
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
            pair_of(stage.monoid, True),
            (factor,),
            progress.names([largest]),
            progress.names([addend]),
            rescaling.correction(progress.state),
            "log sum exp(x + d) = d + log sum exp(x)",
            ("kept as a maximum and a sum of exponentials below it",),
        )
        progress.done(stage, largest + sympy.log(symbol) + addend, step)
