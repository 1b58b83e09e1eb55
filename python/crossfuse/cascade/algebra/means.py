"""Which sums of a cascade are means that later stages, or rows, take distances from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import sympy
from sympy.core.relational import Relational

from crossfuse.cascade.algebra.exponents import joined, nonnegative
from crossfuse.cascade.algebra.moments import Mean, centred, is_polynomial
from crossfuse.cascade.algebra.progress import as_factors, quotient
from crossfuse.cascade.expressions.functions import Flag
from crossfuse.cascade.spec import Cascade, Stage


def means(cascade: Cascade) -> dict[str, Mean]:
    """Find the sums that distances are taken from, by stage.

    A later stage depends on each by ``element - mean`` only, or rows take such distances: of equal
    elements these are 0, where a sum divided by its length is rounded.
    """
    found: dict[str, Mean] = {}
    for stage in cascade.stages:
        if stage.monoid.name != "sum":
            continue
        for mean in _candidates(cascade, stage):
            about = [each for each in cascade.stages if _is_used(cascade, each, stage, mean)]
            if about or _is_subtracted(cascade, stage, mean):
                found[stage.name] = replace(mean, visible=_is_visible(cascade, stage, about))
                break
    return found | _again(cascade, found)


def _again(cascade: Cascade, found: Mapping[str, Mean]) -> dict[str, Mean]:
    """Sums that are made a second time, as by torch for a mean and for its variance.

    They are the same slot, so that all see one mean.
    """
    known = {cascade.stage(name).term: mean for name, mean in found.items() if not mean.signed}
    again = [
        each
        for each in cascade.stages
        if each.name not in found and each.monoid.name == "sum" and each.term in known
    ]
    shown = {each.term for each in again}
    made = {each.name: replace(known[each.term], stage=each.name, visible=True) for each in again}
    twins = {name: mean for name, mean in found.items() if cascade.stage(name).term in shown}
    return made | {name: replace(mean, visible=True) for name, mean in twins.items()}


def ordered(cascade: Cascade, found: dict[str, Mean]) -> list[Stage]:
    """Sort stages so that weights come before the means that they weigh."""
    waiting, done = list(cascade.stages), []
    symbols = {each.symbol: each.name for each in cascade.stages}
    names: set[str] = set()
    while waiting:
        for stage in waiting:
            needed = {symbols[each] for each in stage.term.free_symbols if each in symbols}
            if stage.name in found and found[stage.name].weight:
                needed.add(found[stage.name].weight)
            if needed <= names:
                break
        waiting.remove(stage)
        done.append(stage)
        names.add(stage.name)
    return done


def _candidates(cascade: Cascade, stage: Stage) -> Iterable[Mean]:
    elements = set(cascade.elements)
    results = {each.symbol for each in cascade.stages}
    for weight in (None, *cascade.stages):
        if weight is None and cascade.length is None:
            continue
        if weight is not None and (weight.name == stage.name or weight.monoid.name != "sum"):
            continue
        if weight is not None and stage.symbol in weight.term.free_symbols:
            continue
        by = sympy.S.One if weight is None else weight.term
        signed = not nonnegative(by)
        if by == 0 or (signed and by.free_symbols & results):
            continue
        ratio = quotient(stage.term, by)
        if ratio is None:
            continue
        scale, element = ratio.as_independent(*elements, as_Add=False)
        if element == 1 or element.free_symbols & results:
            continue
        flagged = stage.term.has(Flag)
        yield Mean(
            stage.name,
            "" if weight is None else weight.name,
            element,
            scale,
            signed,
            flagged=flagged,
        )


def _is_used(cascade: Cascade, later: Stage, stage: Stage, mean: Mean) -> bool:
    if later.monoid.name != "sum" or stage.symbol not in later.term.free_symbols:
        return False
    symbol, distance = sympy.Dummy("mean", real=True), sympy.Dummy("distance", real=True)
    mass = cascade.stage(mean.weight).symbol if mean.weight else cascade.length
    term = later.term.xreplace({stage.symbol: mean.scale * mass * symbol})
    found = centred(as_factors(term), symbol, mean.element, distance)
    return found is not None and is_polynomial(found, distance)


def _is_subtracted(cascade: Cascade, stage: Stage, mean: Mean) -> bool:
    """Whether rows take distances from a mean, or compare elements with it."""
    if mean.signed or stage.monoid.name != "sum":
        return False
    symbol, distance = sympy.Dummy("mean", real=True), sympy.Dummy("distance", real=True)
    mass = cascade.stage(mean.weight).symbol if mean.weight else cascade.length
    rows = [each for each in cascade.rows.values() if stage.symbol in each.free_symbols]
    tests = set().union(*(each.atoms(Relational) for each in rows))
    rows += [one - other for one, other in (each.args for each in tests)]
    terms = (joined(each.xreplace({stage.symbol: mean.scale * mass * symbol})) for each in rows)
    return any(centred(each, symbol, mean.element, distance) is not None for each in terms)


def _is_visible(cascade: Cascade, stage: Stage, about: Sequence[Stage]) -> bool:
    """Whether a mean shows up anywhere but in sums about it; see `Mean.visible`."""
    sums = {each.symbol for each in about}
    terms = [each.term for each in cascade.stages if each not in about]
    shown = [each.free_symbols for each in (*terms, *cascade.results.values())]
    shown += [each.free_symbols for each in cascade.rows.values()]
    return any(stage.symbol in free and not free & sums for free in shown)
