"""Reuses contributions in outputs, as a thread computed them.

The softmax of an element is ``exp(x - m) / s``, and ``exp(x - m)`` was its contribution to the sum,
below the maximum of its thread. What corrects a thread's sum when maxima grow corrects each of its
terms: held in registers, they are multiplied by it, instead of computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from crossfuse.cascade.derivation import Derivation, Slot, new, old, value
from crossfuse.cascade.rewrite.cover import Cover


@dataclass(frozen=True)
class Reused:
    """A contribution that each thread holds for its elements."""

    #: The slot that it contributes to.
    slot: str
    #: Its symbol, in the place of an element.
    kept: sympy.Symbol


def reusing(derivation: Derivation) -> tuple[Derivation, tuple[Reused, ...]]:
    """Rewrite outputs over contributions that are held, where that spares an exponential.

    The `rows` of the derivation are then over what is held, and slots as a thread has them before
    states merge (`old`).
    """
    found: list[Reused] = []
    rows = dict(derivation.rows)
    for slot in derivation.slots:
        factor = _factor(slot)
        if factor is None or not slot.contribution.has(sympy.exp):
            continue
        finished = {new(each.name): value(each.name) for each in derivation.slots}
        again = slot.contribution.xreplace(finished)
        before = {value(each.name): old(each.name) for each in derivation.slots}
        kept = sympy.Symbol(f"{slot.name}_kept", real=True)
        corrected = kept * factor.xreplace(before).xreplace(finished)
        changed = {name: each.xreplace({again: corrected}) for name, each in rows.items()}
        if changed != rows:
            rows = changed
            found.append(Reused(slot.name, kept))
    return (replace(derivation, rows=rows), tuple(found)) if found else (derivation, ())


def can_reuse(cover: Cover, resident: str) -> bool:
    """Whether threads take in all of their elements at once, and hold them in registers."""
    tilings = cover.tilings
    return resident == "registers" and len(tilings) == 1 and tilings[0].count == 1


def _factor(slot: Slot) -> sympy.Expr | None:
    """The factor by which a step corrects the state; None for other corrections, or none."""
    if slot.monoid.name != "sum" or not isinstance(slot.carry, sympy.Mul):
        return None
    others = [each for each in slot.carry.args if each != slot.symbol]
    if len(others) + 1 != len(slot.carry.args) or any(
        slot.symbol in e.free_symbols for e in others
    ):
        return None
    return sympy.Mul(*others)
