"""From a cascade to its derivation, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from crossfuse.calls import checked
from crossfuse.cascade.algebra import cancellation
from crossfuse.cascade.algebra.exponents import joined, rescaled
from crossfuse.cascade.algebra.means import means, ordered
from crossfuse.cascade.algebra.stages import Deriver
from crossfuse.cascade.derivation import Derivation
from crossfuse.cascade.spec import Cascade

_KNOWN: dict[tuple[object, ...], Derivation] = {}
_MOST_KNOWN = 512


@checked
def derive(cascade: Cascade) -> Derivation:
    """Derive how a cascade streams in one loop.

    Parameters
    ----------
    cascade : Cascade
        The plain definition.

    Returns
    -------
    Derivation
        State, updates, merge and results, with the proofs' words.

    Raises
    ------
    CascadeRefused
        Naming the stage, and what couples elements and results there.
    """
    key = _key(cascade)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _derive(cascade)
    return _KNOWN[key]


def _key(cascade: Cascade) -> tuple[object, ...]:
    named = (tuple(cascade.results.items()), tuple(cascade.rows.items()))
    head = (cascade.stages, cascade.elements, cascade.invariants, cascade.index, cascade.length)
    return (*head, *named)


def _derive(cascade: Cascade) -> Derivation:
    found = means(cascade)
    deriver = Deriver(cascade, found)
    for stage in ordered(cascade, found):
        deriver.take(stage)
    progress = deriver.progress
    state, known = progress.state, progress.known

    def over_slots(wanted: Mapping[str, sympy.Expr]) -> dict[str, sympy.Expr]:
        found = {}
        for name, each in wanted.items():
            whole = progress.direct.get(each, sympy.sympify(each).xreplace(known))
            found[name] = rescaled(joined(state.finished(joined(whole))))
        return found

    stages = over_slots({each.name: each.symbol for each in cascade.stages})
    results, rows = over_slots(cascade.results), over_slots(cascade.rows)
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
