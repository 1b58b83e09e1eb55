"""Turns masks into bounds of the loop over the axis, to skip elements that no row of a tile needs.

A condition of a mask bounds the axis's index where it is a comparison of whole numbers: ``l <= i``,
``i - l < w``, ``l // 64 == i // 64``, ``l < length``. The bound for the row that reaches farthest
is the bound of the tile. Other conditions bound nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import sympy
from sympy.core.relational import Relational

from crossfuse.cascade.rewrite.tiled.steps import rebuilt
from crossfuse.cascade.spec import Slot


@dataclass(frozen=True)
class Span:
    """Elements that rows of a tile may need."""

    #: No element before any of these is needed.
    lower: tuple[sympy.Expr, ...] = ()
    #: No element behind any of these is needed.
    upper: tuple[sympy.Expr, ...] = ()


#: What is masked by a number up to this counts for nothing beside what is seen: where scores differ
#: by less, it weighs zero in float32. Those of float16 end at 65504; cuDNN's attention adds -65536.
HIDES = -6e4

Box = Mapping[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]]


def span(slots: Iterable[Slot], index: sympy.Symbol | None, box: Box) -> Span:
    """Bound the elements that change a state.

    `box` has the least and the largest value that each whole number of conditions has in a tile:
    the rows' index, lengths of sequences; a condition over others bounds nothing. Bounds are over
    symbols in the values of `box`. The index is None if no term uses it.
    """
    state = tuple(slots)
    lower: list[sympy.Expr] = []
    upper: list[sympy.Expr] = []
    for condition in _conditions(state):
        if index is None or not all(
            is_silent(condition, each.contribution, each.monoid.identity) for each in state
        ):
            continue
        for side, bound in _bounds(condition, index, box):
            kept = lower if side == "lower" else upper
            if bound not in kept:
                kept.append(bound)
    return Span(tuple(lower), tuple(upper))


def _conditions(slots: tuple[Slot, ...]) -> list[sympy.Basic]:
    """Conditions of the choices in contributions, one by one."""
    choices = {each for slot in slots for each in slot.contribution.atoms(sympy.Piecewise)}
    found: set[sympy.Basic] = set()
    for choice in choices:
        condition = choice.args[0][1]
        found |= set(condition.args) if isinstance(condition, sympy.And) else {condition}
    return sorted(found - {sympy.true}, key=sympy.default_sort_key)


def masks_by(slots: Iterable[Slot], reads: Callable[[Set[sympy.Symbol]], bool]) -> bool:
    """Whether a condition masks elements for all slots, whose symbols `reads` takes.

    Masks that are large negative numbers count: whether elements are then passed by is decided
    where it is seen what they add up to (`crossfuse.lower.hopper.stream.seen_keys`).
    """
    state = tuple(slots)
    told = [(rebuilt(each.contribution, _hidden), each.monoid.identity) for each in state]
    return any(
        reads(condition.free_symbols)
        and all(is_silent(condition, contribution, identity) for contribution, identity in told)
        for condition in _conditions(state)
    )


def _hidden(expression: sympy.Basic) -> sympy.Basic | None:
    """Minus infinity in the place of an expression that a mask has made so small."""
    parts = expression.args if isinstance(expression, sympy.Add) else (expression,)
    small = any(each.is_Number and each.is_extended_real and each < HIDES for each in parts)
    return -sympy.oo if small and expression != -sympy.oo else None


def is_silent(condition: sympy.Basic, contribution: sympy.Expr, identity: sympy.Expr) -> bool:
    """Whether an element for which a condition does not hold contributes nothing."""

    def put(expression: sympy.Basic) -> sympy.Basic | None:
        if expression == condition:
            return sympy.false
        if isinstance(expression, sympy.And) and condition in expression.args:
            return sympy.false
        if isinstance(expression, sympy.Piecewise):
            sides = [(rebuilt(each, put), rebuilt(test, put)) for each, test in expression.args]
            return sympy.Piecewise(*sides)
        return None

    return bool(rebuilt(contribution, put) == identity)


def _bounds(condition: sympy.Basic, index: sympy.Symbol, box: Box) -> list[tuple[str, sympy.Expr]]:
    found = []
    for expression in _not_negative(condition):
        fixed, moving = expression.as_independent(index, as_Add=True)
        if moving.is_integer and fixed.is_integer:
            farthest = _largest(fixed, box)
            bound = None if farthest is None else _isolated(moving, index, -farthest)
            found += [] if bound is None else [bound]
    return found


def _not_negative(condition: sympy.Basic) -> list[sympy.Expr]:
    """Whole numbers that are 0 or more where a condition holds."""
    if not isinstance(condition, Relational):
        return []
    left, right = condition.args
    differences = {
        sympy.LessThan: [(right - left, 0)],
        sympy.StrictLessThan: [(right - left, 1)],
        sympy.GreaterThan: [(left - right, 0)],
        sympy.StrictGreaterThan: [(left - right, 1)],
        sympy.Eq: [(right - left, 0), (left - right, 0)],
    }
    return [_whole(each) - least for each, least in differences.get(type(condition), [])]


def _whole(expression: sympy.Expr) -> sympy.Expr:
    """A multiple without fractions in front of its terms: sympy divides sides of comparisons."""
    expanded = expression.expand()
    numbers = expanded.as_coefficients_dict().values()
    below = sympy.ilcm(1, *(each.q for each in numbers if each.is_Rational))
    return sympy.expand(below * expanded)


def _isolated(
    expression: sympy.Expr, index: sympy.Symbol, limit: sympy.Expr, side: str = "lower"
) -> tuple[str, sympy.Expr] | None:
    """Solve ``expression >= limit`` (or ``<=``, for its upper side) for the index; all whole."""
    least = side == "lower"
    if expression == index:
        return side, limit
    if isinstance(expression, sympy.Add):
        fixed, moving = expression.as_independent(index, as_Add=True)
        return _isolated(moving, index, limit - fixed, side) if fixed.is_integer else None
    number, rest = expression.as_coeff_Mul()
    if number.is_integer and number > 1:
        above = number - 1 if least else 0
        return _isolated(rest, index, sympy.floor((limit + above) / number), side)
    if least and number.is_integer and number < 0:
        return _isolated(rest, index, sympy.floor(limit / number), "upper")
    if isinstance(expression, sympy.floor):
        top, bottom = expression.args[0].as_numer_denom()
        above = 0 if least else bottom - 1
        return _isolated(top, index, bottom * limit + above, side) if bottom.is_Integer else None
    return None


def _largest(expression: sympy.Expr, box: Box, sign: int = 1) -> sympy.Expr | None:
    """The largest value in a box (the least for a negative sign), or None if it is unknown."""
    if expression.is_number:
        return expression
    if expression in box:
        return box[expression][1 if sign > 0 else 0]
    if isinstance(expression, sympy.Mul):
        number, rest = expression.as_coeff_Mul()
        if number == 1 or rest.is_Mul:
            return None
        found = _largest(rest, box, sign if number > 0 else -sign)
        return None if found is None else number * found
    if isinstance(expression, sympy.Add | sympy.floor | sympy.Max | sympy.Min):
        parts = [_largest(each, box, sign) for each in expression.args]
        return None if None in parts else expression.func(*parts)
    return None


# Masks for elements of the last tile that lie beyond the axis.


def limited(
    slots: Sequence[Slot], condition: sympy.Basic, zeros: Iterable[sympy.Symbol]
) -> tuple[Slot, ...]:
    """Mask the elements for which a condition such as ``l < N`` does not hold.

    `zeros` are elements that are 0 there: if these change no slot, all slots stay as they are. The
    term of a maximum is masked wherever it stands, so that it is computed in one way.
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
    """Replace parts of an expression, also sums among the terms of longer ones."""

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
