"""What merging two states computes, statement by statement; pure algebra.

`left` is the state that is merged into, `right` the other one; `new` and `guarded` are of the
merged state, `kept` is what a slot was before where it has changed already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from crossfuse.cascade.derivation import Slot, guarded, left, new, right
from crossfuse.cascade.rewrite.phases import share
from crossfuse.cascade.rewrite.tiled.base_two import rebuilt
from crossfuse.cascade.rewrite.tiled.steps import Factor, Guard, Keep, kept


@dataclass(frozen=True)
class Combine:
    """A slot of the merged state; no expression for one that takes in elements one by one."""

    slot: Slot
    expression: sympy.Expr | None


def merge_steps(slots: Sequence[Slot]) -> tuple[Keep | Guard | Factor | Combine, ...]:
    """Write what merging does.

    Parameters
    ----------
    slots : Sequence[Slot]
        The state, in the order of updates.

    Returns
    -------
    tuple
        Statements, in order. Numbers that do not depend on a slot itself are computed before it,
        so that slots and columns share them.
    """
    found: list[Keep | Guard | Factor | Combine] = []
    known: dict[sympy.Symbol, sympy.Symbol] = {
        guarded(each.name): new(each.name) for each in slots if each.guard is None
    }
    factors: dict[sympy.Expr, sympy.Symbol] = {}
    for place, slot in enumerate(slots):
        after = [each.merge for each in slots[place + 1 :] if each.merge is not None]
        if any(left(slot.name) in each.free_symbols for each in after):
            found.append(Keep(slot))
        if slot.merge is None:
            found.append(Combine(slot, None))
        else:
            merge = _put(slot.merge, known)
            found.append(Combine(slot, _once(merge, slot, slots, factors, found)))
        known[left(slot.name)] = kept(slot.name)
        if slot.guard is not None and any(
            guarded(slot.name) in each.free_symbols for each in after
        ):
            found.append(Guard(slot))
    return tuple(found)


def _once(
    merge: sympy.Expr,
    slot: Slot,
    slots: Sequence[Slot],
    factors: dict[sympy.Expr, sympy.Symbol],
    found: list[Keep | Guard | Factor | Combine],
) -> sympy.Expr:
    """The merge over numbers that are computed before."""
    parts = share([merge], [left(slot.name), right(slot.name)], slots)
    (expression,) = parts.expressions
    for symbol, each in reversed(parts.definitions):
        expression = expression.xreplace({symbol: each})
    named: dict[sympy.Symbol, sympy.Symbol] = {}
    for symbol, fixed in parts.fixed:
        each = fixed.xreplace(named)
        if each not in factors:
            factors[each] = sympy.Symbol(f"merge{len(factors)}", real=True)
            found.append(Factor(factors[each], each))
        named[symbol] = factors[each]
        expression = expression.xreplace({symbol: factors[each]})
    return expression


def _put(expression: sympy.Expr, images: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    return rebuilt(expression, lambda each: images.get(each) if each.is_Symbol else None)
