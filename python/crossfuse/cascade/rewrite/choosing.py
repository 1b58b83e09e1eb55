"""The best elements of a row: how one element is taken in, and two sorted lists become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.monoid import Monoid
from crossfuse.cascade.rewrite.numbers import PLACE, Pair, best_of, stands_before, worst_of
from crossfuse.cascade.rewrite.scripting import Scratch

#: Gives a value a name.
Bind = Callable[[str, Any], Any]


def insert(monoid: Monoid, kept: list[tuple[Scratch, Scratch]], new: Pair, dtype: str) -> None:
    """Statements: an element finds its place in a sorted list, whose last one falls off.

    Parameters
    ----------
    monoid : Monoid
        What is kept.
    kept : list[tuple[Scratch, Scratch]]
        Values and places, the best first.
    new : Pair
        Value and place of the element.
    dtype : str
        Type of values.
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
    """Statements: the lower one moves up if it is the better one."""
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
    """The best of two sorted lists, sorted.

    The better of the i-th best of one and the i-th from the end of the other are the best of both;
    they fall and then rise, so that they are sorted in logarithmically many steps (Batcher, 1968).

    Parameters
    ----------
    monoid : Monoid
        What is kept.
    left, right : list[Pair]
        The best first.
    name : str
        For what is bound.
    bind : Callable
        Names a value.

    Returns
    -------
    list[Pair]
        As many as there are in each.
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
