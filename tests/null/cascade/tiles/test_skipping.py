"""Bounds of the stream's loop hold all elements that a tile of rows needs, and few others."""

from __future__ import annotations

from itertools import product
from math import gcd

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from crossfuse.cascade.rewrite.tiled.skipping import Span, span
from crossfuse.cascade.spec import MAX, SUM, Slot, guarded, value

key, i = sympy.symbols("key i", integer=True, nonnegative=True)
first, last = sympy.symbols("first last", integer=True)
x, bias = sympy.symbols("x bias", real=True)
length = sympy.Symbol("length", integer=True)
BOX = {i: (first, last), length: (length, length)}


def softmax(condition: sympy.Basic) -> tuple[Slot, ...]:
    """The slots of a masked softmax."""
    element = sympy.Piecewise((x, condition), (-sympy.oo, True))
    m, s = value("m"), value("s")
    term = sympy.exp(element - guarded("m"))
    return (
        Slot("m", MAX, element, m, sympy.Max(m, m), -sympy.oo),
        Slot("s", SUM, term, s * sympy.exp(m - guarded("m")), s, sympy.S.Zero),
    )


def test_causal() -> None:
    assert span(softmax(key <= i + 7), key, BOX) == Span((), (last + 7,))


def test_window() -> None:
    found = span(softmax(sympy.And(key <= i, i - key < 5)), key, BOX)
    assert found == Span((first - 4,), (last,))


def test_lengths_are_bounds_where_they_are_known() -> None:
    assert span(softmax(key < length), key, BOX) == Span((), (length - 1,))
    assert span(softmax(key < length), key, {i: (first, last)}) == Span()


def test_blocks() -> None:
    block = sympy.Eq(sympy.floor(key / 64), sympy.floor(i / 64))
    found = span(softmax(block), key, BOX)
    assert found == Span((64 * sympy.floor(first / 64),), (64 * sympy.floor(last / 64) + 63,))


@pytest.mark.parametrize(
    "condition",
    [
        key <= bias,
        sympy.Eq(sympy.Mod(key, 2), 0),
        sympy.Or(key <= i, key < 4),
        key * i < 8,
        sympy.Ne(key, i),
    ],
)
def test_what_is_not_provable_bounds_nothing(condition: sympy.Basic) -> None:
    assert span(softmax(condition), key, BOX) == Span()


def test_masked_elements_that_change_a_slot_are_not_skipped() -> None:
    count = Slot("n", SUM, sympy.S.One, value("n"), value("n"), sympy.S.Zero)
    assert span((*softmax(key <= i), count), key, BOX) == Span()
    other = Slot(
        "n", SUM, sympy.Piecewise((1, key <= i), (0, True)), value("n"), None, sympy.S.Zero
    )
    assert span((*softmax(key <= i), other), key, BOX) == Span((), (last,))


def test_without_an_index_nothing_is_bounded() -> None:
    assert span(softmax(sympy.S.true), None, {}) == Span()


NUMBERS = st.integers(-6, 6)
FACTORS = st.sampled_from([-3, -2, -1, 1, 2, 3])
SIDES = st.sampled_from([sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt, sympy.Eq])


@given(NUMBERS, NUMBERS, FACTORS, FACTORS, st.integers(1, 4), SIDES, st.booleans())
def test_no_needed_element_is_left_out(
    a: int, b: int, down: int, along: int, size: int, side: type, divided: bool
) -> None:
    position = sympy.floor((key + 1) / size) if divided else key
    condition = side(along * position + a, down * sympy.floor(i / size) + b)
    if condition in (sympy.true, sympy.false):
        return
    found = span(softmax(condition), key, BOX)
    low, high = 3, 8
    places = {first: low, last: high}
    needed = [
        at
        for at, row in product(range(20), range(low, high + 1))
        if condition.subs({key: at, i: row}) == sympy.true
    ]
    for bound in found.lower:
        assert all(at >= bound.subs(places) for at in needed)
    for bound in found.upper:
        assert all(at <= bound.subs(places) for at in needed)
    # Of two sides that no whole numbers make equal (3 l = 3 i + 1) nothing needs to be known.
    unsolvable = side is sympy.Eq and (b - a) % gcd(along, down) != 0
    assert unsolvable or found.lower or found.upper
