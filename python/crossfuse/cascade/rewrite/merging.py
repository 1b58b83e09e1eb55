"""Merges the states of segments to one, by blocks that reduce tuples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot, guarded, left, new, right
from crossfuse.cascade.rewrite.phases import written
from crossfuse.cascade.rewrite.scripting import (
    PLACE,
    Pair,
    Scratch,
    best_of,
    flat,
    named,
    nothing,
    numbers,
    pairs,
    stands_before,
    worst_of,
)
from crossfuse.cascade.rewrite.tiles import refused
from crossfuse.cascade.spec import Monoid

# Sorted lists of the best elements of a row: insertion, and the merge of two lists.

#: Binds a value to a name.
Bind = Callable[[str, Any], Any]


def insert(monoid: Monoid, kept: list[tuple[Scratch, Scratch]], new: Pair, dtype: str) -> None:
    """Statements: insert an element into a sorted list, whose last one falls off.

    The list is values and places, the best first.
    """
    if len(kept) == 1:
        ((value, place),) = kept
        before = stands_before(monoid, new, (value.value, place.value))
        with ir.script.If(before), ir.script.Then():
            value.set(new[0])
            place.set(new[1])
        return
    last = (kept[-1][0].value, kept[-1][1].value)
    # Most elements of a long row are not among the best.
    with ir.script.If(stands_before(monoid, new, last)), ir.script.Then():
        kept[-1][0].set(new[0])
        kept[-1][1].set(new[1])
        for upper, lower in zip(reversed(kept[:-1]), reversed(kept[1:]), strict=True):
            _exchange(monoid, upper, lower, dtype)


def _exchange(
    monoid: Monoid, upper: tuple[Scratch, Scratch], lower: tuple[Scratch, Scratch], dtype: str
) -> None:
    """Statements: swap two neighbours of a list if the lower one is better."""
    low = (lower[0].value, lower[1].value)
    before = stands_before(monoid, low, (upper[0].value, upper[1].value))
    with ir.script.If(before), ir.script.Then():
        value, place = Scratch("value_", dtype, low[0]), Scratch("place_", PLACE, low[1])
        for mine, other in zip(lower, upper, strict=True):
            mine.set(other.value)
        upper[0].set(value.value)
        upper[1].set(place.value)


def merged(
    monoid: Monoid, left: list[Pair], right: list[Pair], name: str, bind: Bind
) -> list[Pair]:
    """The best of two sorted lists of equal length, sorted, by bitonic merging (Batcher, 1968).

    The better of the i-th best of one and the i-th from the end of the other are the best of both;
    they fall and then rise, so that they are sorted in logarithmically many steps. Lists have the
    best first; `bind` names intermediate values.
    """
    count = len(left)
    size = 1 << (count - 1).bit_length()
    found: list[Pair | None] = []
    for i in range(size):
        one = left[i] if i < count else None
        other = right[size - 1 - i] if size - 1 - i < count else None
        both = best_of(monoid, one, other) if one and other else one or other
        found.append(_named(both, f"{name}_{i}", bind))
    step = size // 2
    while step:
        for i in range(size):
            upper, lower = found[i], found[i ^ step]
            if i & step or (upper is None and lower is None):
                continue
            label = f"{name}_{step}_{i}"
            if upper is None or lower is None:
                found[i], found[i + step] = upper or lower, None
            else:
                found[i] = _named(best_of(monoid, upper, lower), label, bind)
                found[i + step] = _named(worst_of(monoid, upper, lower), f"{label}_low", bind)
        step //= 2
    return [each for each in found[:count] if each is not None]


def _named(pair: Pair | None, name: str, bind: Bind) -> Pair | None:
    return None if pair is None else (bind(name, pair[0]), bind(f"{name}_place", pair[1]))


#: Most numbers of a slot; each pair of threads exchanges all of them.
MOST = 32


def check_merges(slots: Sequence[Slot]) -> None:
    """Refuse slots that keep too many numbers, or correct the numbers that they chose."""
    for slot in slots:
        if slot.monoid.k > MOST:
            limit, instead = f"{MOST} numbers", "leave it out of the cascade"
            found = f"the {slot.monoid.k} largest"
            raise refused(f"slot {slot.name}", found, limit, instead)
        if slot.monoid.keeps_places and slot.corrected:
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
    number by number, then what merging computes, and the stores come last. Buffers of the merged
    state (`into`) and of segments (`of`) are by the names of numbers.
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
    """Merge a slot's numbers of two sides, and bind them, over the values of the expressions."""
    if slot.monoid.keeps_places:
        one, other = pairs(slot, ours, dtype), pairs(slot, theirs, dtype)
        return flat(merged(slot.monoid, one, other, f"{slot.name}_new", _stored))
    return [_bound(f"{slot.name}_new", written(slot.merge, values, dtype))]


def _is_used(symbol: sympy.Symbol, slots: Sequence[Slot]) -> bool:
    return any(each.merge is not None and symbol in each.merge.free_symbols for each in slots)


def _stored(name: str, what: Any) -> Any:
    """Store a number: TVM substitutes bound values for their names, and choices would nest."""
    return Scratch(name, str(what.ty), what).value


def _bound(name: str, value: Any) -> Any:
    return named(name, ir.script.bind(value))
