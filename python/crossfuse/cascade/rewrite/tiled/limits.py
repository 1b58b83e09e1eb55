"""Elements of the last tile that lie beyond the axis: they change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import sympy

from crossfuse.cascade.derivation import Slot
from crossfuse.cascade.rewrite.tiled.base_two import rebuilt
from crossfuse.cascade.rewrite.tiled.skipping import is_silent


def limited(
    slots: Sequence[Slot], condition: sympy.Basic, zeros: Iterable[sympy.Symbol]
) -> tuple[Slot, ...]:
    """Take in only those elements for which a condition holds.

    Parameters
    ----------
    slots : Sequence[Slot]
        The state.
    condition : sympy.Basic
        Such as ``l < N``.
    zeros : Iterable[sympy.Symbol]
        Elements that are 0 where it does not hold.

    Returns
    -------
    tuple[Slot, ...]
        The same slots where zeros change nothing; else with masks. What a maximum is taken of is
        masked wherever it stands, so that it is computed in one way.
    """
    at_zero = dict.fromkeys(zeros, sympy.S.Zero)

    def is_neutral(slot: Slot) -> bool:
        return _put(slot.contribution, at_zero) == slot.monoid.identity

    if all(map(is_neutral, slots)):
        return tuple(slots)
    masked: dict[sympy.Basic, sympy.Basic] = {}
    found = []
    for slot in slots:
        contribution = _put(slot.contribution, masked)
        if slot.monoid.ordered and slot.contribution not in masked:
            contribution = _masked(contribution, condition, slot.monoid.identity)
            masked[slot.contribution] = contribution
        if not is_silent(condition, contribution, slot.monoid.identity):
            contribution = _masked(contribution, condition, slot.monoid.identity)
        found.append(replace(slot, contribution=contribution))
    return tuple(found)


def _put(expression: sympy.Basic, images: dict[sympy.Basic, sympy.Basic]) -> sympy.Basic:
    """An expression with parts replaced, sums among the terms of longer ones too."""

    def change(part: sympy.Basic) -> sympy.Basic | None:
        if part in images or not isinstance(part, sympy.Add):
            return images.get(part)
        for old, image in images.items():
            if isinstance(old, sympy.Add) and set(old.args) < set(part.args):
                return sympy.Add(image, *(each for each in part.args if each not in old.args))
        return None

    return rebuilt(expression, change)


def _masked(expression: sympy.Basic, condition: sympy.Basic, otherwise: sympy.Expr) -> sympy.Basic:
    if isinstance(expression, sympy.Piecewise) and len(expression.args) == 2:
        (inside, test), (outside, _) = expression.args
        if outside == otherwise:
            both = sympy.And(test, condition)
            return sympy.Piecewise((inside, both), (otherwise, True), evaluate=False)
    return sympy.Piecewise((expression, condition), (otherwise, True), evaluate=False)
