"""States of segments become one: blocks that reduce tuples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot, guarded, left, new, right
from crossfuse.cascade.rewrite.arithmetic import written
from crossfuse.cascade.rewrite.choosing import merged
from crossfuse.cascade.rewrite.numbers import flat, is_chosen, nothing, numbers, pairs
from crossfuse.cascade.rewrite.refusal import refused
from crossfuse.cascade.rewrite.scripting import Scratch, named

#: Numbers that a slot keeps at most; each pair of threads exchanges all of them.
MOST = 32


def check_merges(slots: Sequence[Slot]) -> None:
    """Refuse slots that keep too many numbers, or correct those that they chose.

    Raises
    ------
    CascadeRefused
        Naming the slot.
    """
    for slot in slots:
        if slot.monoid.k > MOST:
            limit, instead = f"{MOST} numbers", "leave it out of the cascade"
            found = f"the {slot.monoid.k} largest"
            raise refused(f"slot {slot.name}", found, limit, instead)
        if is_chosen(slot) and slot.corrected:
            limit, instead = "values that stay as they are", "leave it out of the cascade"
            raise refused(f"slot {slot.name}", f"a carry {slot.carry}", limit, instead)


def merge(
    slots: Sequence[Slot],
    into: Mapping[str, Any],
    into_place: Sequence[Any],
    of: Mapping[str, Any],
    of_place: Sequence[Any],
    invariants: Mapping[sympy.Symbol, Any],
    dtype: str,
) -> None:
    """Statements of a block that reduces states; the block's iterators are written already.

    The form is one that `crossfuse.lower.lower_merges` reads: first the right state is bound,
    number by number, then what merging computes, and the stores come last.

    Parameters
    ----------
    slots : Sequence[Slot]
        The state.
    into, of : Mapping[str, tvm.tirx.Buffer]
        The merged state and those of segments, by number.
    into_place, of_place : Sequence[tvm.ir.PrimExpr]
        Their indices.
    invariants : Mapping[sympy.Symbol, tvm.ir.PrimExpr]
        What else expressions of merging use.
    dtype : str
        Type of the arithmetic.
    """
    kept = [(slot, each) for slot in slots for each in numbers(slot, dtype)]
    with ir.script.init():
        for slot, number in kept:
            start = nothing(number, slot, written(slot.init, invariants, dtype))
            ir.script.buffer_store(into[number.name], start, list(into_place))
    ours = {each.name: into[each.name][tuple(into_place)] for _, each in kept}
    theirs = {
        each.name: _bound(f"{each.name}_b", of[each.name][tuple(of_place)]) for _, each in kept
    }
    values = dict(invariants)
    for slot in slots:
        # Of all slots before any is merged: a mean moves by what a later slot has kept.
        first = numbers(slot, dtype)[0].name
        values[left(slot.name)], values[right(slot.name)] = ours[first], theirs[first]
    results: list[Any] = []
    for slot in slots:
        found = _merged(slot, values, ours, theirs, dtype)
        results += found
        values[new(slot.name)] = values[guarded(slot.name)] = found[0]
        if slot.guard is not None and _is_used(guarded(slot.name), slots):
            values[guarded(slot.name)] = _bound(
                f"{slot.name}_guard", written(slot.guard, values, dtype)
            )
    for (_, number), result in zip(kept, results, strict=True):
        ir.script.buffer_store(into[number.name], result, list(into_place))


def _merged(
    slot: Slot,
    values: Mapping[sympy.Symbol, Any],
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    dtype: str,
) -> list[Any]:
    """A slot's merged numbers, bound; for those of the two sides see `values`."""
    if is_chosen(slot):
        one, other = pairs(slot, ours, dtype), pairs(slot, theirs, dtype)
        return flat(merged(slot.monoid, one, other, f"{slot.name}_new", _stored))
    return [_bound(f"{slot.name}_new", written(slot.merge, values, dtype))]


def _is_used(symbol: sympy.Symbol, slots: Sequence[Slot]) -> bool:
    return any(each.merge is not None and symbol in each.merge.free_symbols for each in slots)


def _stored(name: str, what: Any) -> Any:
    """A number of its own: TVM puts what is bound in the place of its name, and choices nest."""
    return Scratch(name, str(what.ty), what).value


def _bound(name: str, value: Any) -> Any:
    return named(name, ir.script.bind(value))
