"""Derives a cascade stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import sympy

from crossfuse.calls import checked
from crossfuse.cascade.algebra import cancellation
from crossfuse.cascade.algebra.common_factors import shared_out
from crossfuse.cascade.algebra.exponents import averages, joined, nonnegative, ratios, rescaled
from crossfuse.cascade.algebra.moments import Mean, centred, is_polynomial
from crossfuse.cascade.algebra.rescaling import as_factors, quotient
from crossfuse.cascade.algebra.stages import Deriver
from crossfuse.cascade.derivation import Derivation, value
from crossfuse.cascade.expressions.functions import cancelled
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
        yield Mean(stage.name, "" if weight is None else weight.name, element, scale, signed)


def _is_used(cascade: Cascade, later: Stage, stage: Stage, mean: Mean) -> bool:
    if later.monoid.name != "sum" or stage.symbol not in later.term.free_symbols:
        return False
    symbol, distance = sympy.Dummy("mean", real=True), sympy.Dummy("distance", real=True)
    mass = cascade.stage(mean.weight).symbol if mean.weight else cascade.length
    term = later.term.xreplace({stage.symbol: mean.scale * mass * symbol})
    found = centred(as_factors(term), symbol, mean.element, distance)
    return found is not None and is_polynomial(found, distance)


def _is_subtracted(cascade: Cascade, stage: Stage, mean: Mean) -> bool:
    """Whether rows take distances from a mean."""
    if mean.signed or stage.monoid.name != "sum":
        return False
    symbol, distance = sympy.Dummy("mean", real=True), sympy.Dummy("distance", real=True)
    mass = cascade.stage(mean.weight).symbol if mean.weight else cascade.length
    rows = [each for each in cascade.rows.values() if stage.symbol in each.free_symbols]
    terms = (joined(each.xreplace({stage.symbol: mean.scale * mass * symbol})) for each in rows)
    return any(centred(each, symbol, mean.element, distance) is not None for each in terms)


def _is_visible(cascade: Cascade, stage: Stage, about: Sequence[Stage]) -> bool:
    """Whether a mean shows up anywhere but in sums about it; see `Mean.visible`."""
    sums = {each.symbol for each in about}
    terms = [each.term for each in cascade.stages if each not in about]
    shown = [each.free_symbols for each in (*terms, *cascade.results.values())]
    shown += [each.free_symbols for each in cascade.rows.values()]
    return any(stage.symbol in free and not free & sums for free in shown)


_KNOWN: dict[tuple[object, ...], Derivation] = {}
_MOST_KNOWN = 512


@checked
def derive(cascade: Cascade) -> Derivation:
    """Derive how a cascade streams in one loop; the work behind `crossfuse.cascade.algebra.derive`.

    Derivations are cached by what a cascade is made of. A refusal names the stage, and what couples
    elements and results there.
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
                made = ratios(shared_out(made, elements, invariants))
            else:
                made = averages(made, sums, cascade.length)
            found[name] = made.xreplace(progress.finished).xreplace(unfinished)
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
