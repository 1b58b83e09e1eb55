"""Stages that choose among elements: increasing functions of a number come out of the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from crossfuse.cascade.algebra.progress import Progress
from crossfuse.cascade.algebra.refusal import refused
from crossfuse.cascade.algebra.separation import Product
from crossfuse.cascade.algebra.signs import nonnegative
from crossfuse.cascade.algebra.writing import written
from crossfuse.cascade.spec import Stage


@dataclass(frozen=True)
class Affine:
    """``factor * element + addend``, or ``factor * exp(element) + addend``; the factor is >= 0.

    Attributes
    ----------
    element : sympy.Expr
        What is chosen among.
    factor, addend : sympy.Expr
        Over results and invariants.
    exponential : bool
        Whether the element stands in an exponent.
    proof : str
        In words.
    notes : tuple[str, ...]
        What else to know.
    term : sympy.Expr | None
        The whole, if the element stands in it as it is and nothing else changes along the axis.
    """

    element: sympy.Expr
    factor: sympy.Expr
    addend: sympy.Expr
    exponential: bool
    proof: str
    notes: tuple[str, ...] = ()
    term: sympy.Expr | None = None

    def result(self, chosen: sympy.Expr) -> sympy.Expr:
        """The stage's result: the term of the chosen element, added up in its order."""
        if self.term is not None:
            return self.term.xreplace({self.element: chosen})
        return self.factor * (sympy.exp(chosen) if self.exponential else chosen) + self.addend


def affine(progress: Progress, stage: Stage, term: sympy.Expr) -> Affine:
    """Write a term as an increasing function of what changes along the axis.

    Parameters
    ----------
    progress : Progress
        Whose elements and results the term is over.
    stage : Stage
        A maximum, a minimum, a top-k, or a log of a sum of exponentials.
    term : sympy.Expr
        Its term.

    Returns
    -------
    Affine
        Its parts.

    Raises
    ------
    CascadeRefused
        If it is no such function, or the factor's sign is not proved.
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
    """The term and its mask, if what is masked is the identity."""
    if not isinstance(term, sympy.Piecewise) or len(term.args) != 2:
        return None
    (inner, test), (other, _) = term.args
    if other == stage.monoid.identity:
        return inner, test
    return (other, sympy.Not(test)) if inner == stage.monoid.identity else None


_ADDED = "an addend is the same for all elements: it does not change the order"
_SCALED = "a factor is proved not to be negative: it does not change the order"
