"""The two-pass definition, made to say what masked and zero rows give."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from crossfuse.cascade.algebra.exponents import ratios
from crossfuse.cascade.algebra.signs import nonnegative
from crossfuse.cascade.algebra.state import State
from crossfuse.cascade.derivation import value
from crossfuse.cascade.spec import Cascade


@dataclass(frozen=True)
class Plain:
    """A cascade whose expressions use `value` and `guarded` of stages.

    Attributes
    ----------
    terms, results, rows : dict[str, sympy.Expr]
        As in `Cascade`, by name.
    guards : dict[str, sympy.Expr | None]
        What stands in for each stage's result, as `Slot.guard`.
    inits : dict[str, sympy.Expr]
        The result of no elements.
    """

    terms: dict[str, sympy.Expr]
    results: dict[str, sympy.Expr]
    rows: dict[str, sympy.Expr]
    guards: dict[str, sympy.Expr | None]
    inits: dict[str, sympy.Expr]


def plain(cascade: Cascade) -> Plain:
    """Give a definition its values where a maximum is -oo or a divisor 0.

    The rules are those of derivations (`State.usable`, `State.finished`): a maximum of nothing
    counts as 0 within terms, and within exponents of results; a divisor that is proved not to be
    negative counts as 1 where it is 0.
    """
    state = State(frozenset())
    known: dict[sympy.Symbol, sympy.Expr] = {}
    terms = {}
    for stage in cascade.stages:
        term = stage.term.xreplace(known)
        terms[stage.name] = ratios(state.usable(term))
        scalar = stage.monoid.name in ("sum", "prod", "max", "min")
        known[stage.symbol] = state.add(
            stage.name,
            stage.monoid,
            term,
            value(stage.name),
            None,
            no_sign=scalar and nonnegative(term),
        )
    results = {k: state.finished(each.xreplace(known)) for k, each in cascade.results.items()}
    rows = {k: state.finished(each.xreplace(known)) for k, each in cascade.rows.items()}
    slots = [each.slot() for each in state.kept]
    guards = {each.name: each.guard for each in slots}
    return Plain(terms, results, rows, guards, {each.name: each.init for each in slots})
