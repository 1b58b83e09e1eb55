"""Tests split and hoisted sums numerically, on rows where their parts cancel or leave the range.

``sum (x - s)`` is ``sum x - n s`` in real arithmetic; in float32 the two may leave nothing of a
small difference of large numbers. Distances avoid that where ``s`` is a mean or an extreme of x.
``sum (x/s)**2`` is ``sum x**2 / s**2``, but squares of large numbers are none. Where no identity
bounds the error, the derivation is run on rows far from zero, with very large and with very small
numbers, and refused if two passes are more exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from crossfuse.cascade.algebra.exponents import squares_of_quotients
from crossfuse.cascade.algebra.separation import refused
from crossfuse.cascade.expressions.functions import Abs
from crossfuse.cascade.spec import Cascade, Derivation, Stage, Step, value

#: Makes a refusal of the stage, the kind of rows, the error there and that of separate passes.
_Refusal = Callable[[str, str, float, float], Exception]
#: Where the numbers of a row lie, and how far apart they are.
_PLACES = ((0.0, 1.0), (1.0, 1e-3), (100.0, 1.0), (1e4, 1.0), (1e4, 1e-2), (-1e3, 1.0))
#: The one element of a row that is an outlier.
_OUTLIER = 1e6
#: Pairs (`Step.pair`) that hoist a factor out of a sum that is not of distances, or of a product.
_DISTRIBUTED = ("sum, *", "prod, *")
#: An outlier whose square is out of range, and scales of rows whose powers are.
_HUGE, _SCALES = 1e37, (1e13, 1e30, 1e-13, 1e-30)
#: What rows of equal elements are of.
_CONSTANTS = (0.0, 3.7)
#: Rows of each kind, and elements of a row.
_ROWS, _LENGTH = 3, 96
#: How trials stream: segments of three threads, tiles of 16 elements.
_SEGMENTS, _TILE = (32, 32, 32), 16
#: Multiple of the error of separate passes that counts as cancellation, which costs digits: other
#: differences of rounding, in three rows, stay within this.
_FACTOR = 3
#: The same of outputs that are made of such sums, in which the luck of several roundings meets.
_OF_OUTPUTS = 12
#: Error of separate passes, relative to the summed magnitudes, at which they have no digit to lose:
#: a maximum of 1e13 is subtracted from elements that were rounded otherwise.
_DIGIT = 0.3
#: Units of rounding by which sums of this many elements may differ when only their order does.
_UNITS = 4
#: By how much of it a result is moved to see what moves with it.
_STEP = 1e-7


def check(derivation: Derivation, split: Sequence[str]) -> None:
    """Refuse a derivation that loses digits which two passes keep.

    The refusal names the first stage of `split` that loses digits, or the first hoisted sum that is
    out of range where dividing its elements first is not.
    """
    cascade = derivation.cascade
    # No positions, no integers: elements whose values a trial may choose.
    free = [e for e in cascade.elements if e != cascade.index and not e.is_integer]
    if split:
        kinds = _kinds(free, _given(cascade)) + _balanced_kinds(cascade, split, free)
        _try(derivation, split, kinds, _cancels)
        signs = [_Kind(*place, tuple(free), alternating=True) for place in _PLACES[1:4]]
        _try(derivation, split, signs, _cancels)
    hoisted = [e.stage for e in derivation.steps if e.hoisted and e.pair in _DISTRIBUTED]
    if hoisted and derivation.exact:
        _try(derivation, hoisted, _far_kinds(free), _overflows)
    if derivation.exact and any(each.rescaling or each.hoisted for each in derivation.steps):
        _try_constant(derivation, [_Kind(place, 0.0, tuple(free)) for place in _CONSTANTS])
    if derivation.exact:
        _try_scales(derivation, free)


def _try(
    derivation: Derivation, names: Sequence[str], kinds: Sequence[_Kind], refusal: _Refusal
) -> None:
    """Compare stages with separate passes on rows of each kind.

    Where digits may be lost, what is made of stages is compared too. Not where numbers leave the
    range: there a gradient divides by what is infinite before it meets what is not.
    """
    import numpy as np

    from crossfuse.cascade.run import merge_tree, two_pass

    cascade = derivation.cascade
    single, double = _data(cascade, kinds)
    limits = np.finfo(np.float32)
    with np.errstate(all="ignore"):
        exact = two_pass(cascade, double)
        apart = two_pass(cascade, single)
        streamed = merge_tree(derivation, single, _SEGMENTS, _TILE)
        made = (*cascade.results, *cascade.rows) if refusal is _cancels else ()
        outputs = [each for each in made if each not in names]
        for name in (*names, *outputs):
            # What a sum is rounded to is relative to its addends; what is made of sums, to itself.
            size = np.abs(exact[name])
            if name in names:
                size = size + two_pass(_magnitudes(cascade, name), double)[name]
            else:
                size = size if size.ndim == 1 else size.max(axis=1, keepdims=True)
            known = np.isfinite(exact[name]) & (np.abs(apart[name] - exact[name]) <= _DIGIT * size)
            unfused, fused = (
                _worst(np.where(known, np.abs(each[name] - exact[name]), 0))
                for each in (apart, streamed)
            )
            rounding = _UNITS * (limits.eps * _worst(np.where(known, size, 0)) + limits.tiny)
            factor = _FACTOR if name in names else _OF_OUTPUTS
            allowed = factor * unfused + rounding * factor / _FACTOR
            lost = ~(fused <= allowed)
            if lost.any():
                which = int(np.argmax(lost))
                raise refusal(name, kinds[which].text, float(fused[which]), float(unfused[which]))
            again = _again(cascade, name) if name in names else None
            if again is not None:
                # Of each row by itself: one in which a part is chosen is no measure for another.
                of = two_pass(again, {**streamed, **single})[name]
                unlike = np.where(known, np.abs(streamed[name] - of), 0)
                moved = np.where(known, _moved(again, {**exact, **double}), 0)
                unit = _UNITS * (limits.eps * np.where(known, size, 0) + limits.tiny)
                lost = ~(unlike <= _OF_OUTPUTS / _FACTOR * unit) & (moved > unit)
                if lost.any():
                    which = int(np.argmax(lost))
                    raise _unlike(name, kinds[which // _ROWS].text, float(unlike.flat[which]))


def _try_scales(derivation: Derivation, free: Sequence[sympy.Symbol]) -> None:
    """Refuse a derivation whose sums are no numbers where separate passes make some.

    A norm of 1e30 is infinite, what it divides is 0, and so is the sum of squares of that. If the
    squares are summed first, they are an infinity that an infinity divides. What is given of a row
    may be its norm, or its deviation.
    """
    import numpy as np

    from crossfuse.cascade.run import merge_tree, two_pass

    cascade = derivation.cascade
    norms = {each.symbol for each in cascade.stages if _is_norm(each)}
    steps = [each for each in derivation.steps if each.pair and not _divides_itself(each)]
    names = [
        each.stage
        for each in steps
        if each.hoisted and _divides(cascade.stage(each.stage).term, norms)
    ]
    given = {each.stage: _divisors(each) & set(_given(cascade)) for each in steps}
    names += [name for name, found in given.items() if found and name not in names]
    kinds = [_Kind(0.0, scale, (each,)) for each in free for scale in _SCALES]
    divisors = sorted(set().union(*given.values()), key=str)
    kinds += [replace(each, given=(one, *each.moved)) for one in divisors for each in kinds]
    if not names or not kinds:
        return
    single, _ = _data(cascade, kinds)
    scaled = [replace(each, term=squares_of_quotients(each.term)) for each in cascade.stages]
    with np.errstate(all="ignore"):
        apart = two_pass(replace(cascade, stages=tuple(scaled), results={}, rows={}), single)
        streamed = merge_tree(derivation, single, _SEGMENTS, _TILE)
    for name in names:
        none = np.isfinite(apart[name]) & ~np.isfinite(streamed[name])
        gone = none.reshape(len(kinds), -1).any(axis=1)
        if gone.any():
            raise refused(
                "cascade-range",
                name,
                found="a sum that is divided when it is complete, and is no number of "
                + kinds[int(np.argmax(gone))].text,
                limit="a number, which separate passes make of them: they scale each element",
                instead="cut the cascade before this stage",
            )


def _divisors(step: Step) -> set[sympy.Basic]:
    """What a sum is divided by when it is complete."""
    factors = (each for one in step.factors for each in sympy.Mul.make_args(one.context))
    powers = (each for each in factors if isinstance(each, sympy.Pow))
    below = (each.args[0] for each in powers if each.args[1].could_extract_minus_sign())
    return {symbol for each in below for symbol in each.free_symbols}


def _is_norm(stage: Stage) -> bool:
    """Whether a stage sums squares."""
    squares = (each.args[1].is_even for each in stage.term.atoms(sympy.Pow))
    return stage.monoid.name == "sum" and any(squares)


def _divides_itself(step: Step) -> bool:
    """Whether the slot of a sum divides it too, as in a layer norm of a layer norm."""
    own = {value(each.slot) for each in step.factors}
    return any(each.context.free_symbols & own for each in step.factors)


def _divides(term: sympy.Expr, sums: Collection[sympy.Basic]) -> bool:
    """Whether a term is divided by what is made of sums."""
    powers = (each for each in term.atoms(sympy.Pow) if each.free_symbols & set(sums))
    return any(each.args[1].could_extract_minus_sign() for each in powers)


def _try_constant(derivation: Derivation, kinds: Sequence[_Kind]) -> None:
    """Refuse a derivation that makes no number of rows without deviations, where passes make one.

    A deviation divides by what keeps it from 0 before it meets another, and their product is 0.
    """
    import numpy as np

    from crossfuse.cascade.run import merge_tree, two_pass

    cascade = derivation.cascade
    single, double = _data(cascade, kinds)
    with np.errstate(all="ignore"):
        exact, apart = two_pass(cascade, double), two_pass(cascade, single)
        streamed = merge_tree(derivation, single, _SEGMENTS, _TILE)
    for name in {**cascade.results, **cascade.rows}:
        known = np.isfinite(exact[name]) & np.isfinite(apart[name])
        none = (known & ~np.isfinite(streamed[name])).reshape(len(kinds), -1).any(axis=1)
        if none.any():
            raise refused(
                "cascade-range",
                name,
                found=f"no number of {kinds[int(np.argmax(none))].text}",
                limit="a number, which separate passes make of them in float32",
                instead="cut the cascade before what divides by a deviation",
            )


def _again(cascade: Cascade, name: str) -> Cascade | None:
    """A sum over results that are given, if results or rows show all of these; else None.

    Separate passes sum what they make of a rounded mean, and rows take back what its rounding adds.
    """
    stage, results = cascade.stage(name), {each.symbol for each in cascade.stages}
    used = stage.term.free_symbols & results
    shown = [each.free_symbols for each in (*cascade.results.values(), *cascade.rows.values())]
    if stage.monoid.name != "sum" or not used or used - set().union(*shown):
        return None
    given = (*cascade.invariants, *sorted(used, key=str))
    return replace(cascade, stages=(stage,), invariants=given, results={}, rows={})


def _moved(again: Cascade, data: Mapping[str, Any]) -> Any:
    """How far a unit of rounding of given results moves a stage, to first order.

    A sum of squares does not move with its own mean, but by the square of that.
    """
    import numpy as np

    from crossfuse.cascade.run import two_pass

    (stage,), found = again.stages, np.float64(0)
    used = stage.term.free_symbols & set(again.invariants) - {again.length}
    for name in sorted(str(each.name) for each in used):
        above, below = (
            two_pass(again, {**data, name: data[name] * (1 + step)})[stage.name]
            for step in (_STEP, -_STEP)
        )
        found = found + np.abs(above - below) / (2 * _STEP) * np.finfo(np.float32).eps
    return found


def _worst(rows: Any) -> Any:
    """Of each kind the largest number; elements of rows are held to the largest of all."""
    return rows.reshape(-1, _ROWS * (1 if rows.ndim == 1 else rows.shape[1])).max(axis=1)


def _cancels(name: str, where: str, error: float, apart: float) -> Exception:
    return refused(
        "cascade-cancels",
        name,
        found=f"parts that are added up at the end, and cancel: of {where} it is {error:.2g} off "
        "in float32",
        limit=f"about {_FACTOR} times the error of separate passes, which is {apart:.2g} there",
        instead="take distances from a mean or an extreme of the same elements, or cut the cascade "
        "before this stage",
    )


def _unlike(name: str, where: str, error: float) -> Exception:
    return refused(
        "cascade-cancels",
        name,
        found="a sum of exact distances beside results, or rows, that have them rounded: of "
        f"{where} it is {error:.2g} off from what these sum to in float32",
        limit="a sum that takes back what rounding adds to them",
        instead="cut the cascade before this stage",
    )


def _overflows(name: str, where: str, error: float, apart: float) -> Exception:
    return refused(
        "cascade-range",
        name,
        found="a sum that is divided, or multiplied, when it is complete: of "
        f"{where} it is {error:.2g} off in float32",
        limit=f"about {_FACTOR} times the error of separate passes, which scale each element, "
        f"{apart:.2g} there",
        instead="divide by a largest magnitude of the same elements, or cut the cascade before "
        "this stage",
    )


def _magnitudes(cascade: Cascade, name: str) -> Cascade:
    """The cascade up to one stage, which sums magnitudes: what rounding is relative to."""

    def changed(stage: Stage) -> Stage:
        return replace(stage, term=Abs(stage.term)) if stage.name == name else stage

    end = 1 + [each.name for each in cascade.stages].index(name)
    stages = tuple(map(changed, cascade.stages[:end]))
    return replace(cascade, stages=stages, results={}, rows={})


@dataclass(frozen=True)
class _Kind:
    """Rows of one kind, for a trial in float32."""

    #: Where the elements of `moved` lie.
    about: float
    #: How far apart they are.
    spread: float
    moved: tuple[sympy.Symbol, ...]
    #: Whether all elements are nearly equal to each other.
    alike: bool = False
    #: Whether every other element is negative: squares are nearly equal, and elements are not.
    alternating: bool = False
    #: One element of a row is this instead; 0: none.
    outlier: float = 0.0
    #: An invariant that is the mean of an element instead, or the sum of one that is positive.
    given: tuple[sympy.Symbol, sympy.Symbol] | None = None
    #: An invariant that makes a stage 0, and the name of that; other elements are positive.
    balanced: tuple[sympy.Symbol, str] | None = None

    @property
    def text(self) -> str:
        names = ", ".join(str(each.name) for each in self.moved)
        nearly = " nearly equal" if self.alike else ""
        but = ", of alternating signs" if self.alternating else ""
        but += f", but one of {self.outlier:g}" if self.outlier else ""
        if self.given is not None:
            one, of = self.given
            but += f", where {one} is the {'mean' if of in self.moved else 'sum'} of {of}"
        if self.balanced is not None:
            but += f", where {self.balanced[0]} makes {self.balanced[1]} 0"
        return f"rows of{nearly} {names} about {self.about:g}, {self.spread:g} apart{but}"


def _given(cascade: Cascade) -> list[sympy.Symbol]:
    """Invariants whose values a trial may choose."""
    fixed = (cascade.index, cascade.length)
    return [each for each in cascade.invariants if each not in fixed and not each.is_integer]


def _kinds(free: Sequence[sympy.Symbol], given: Sequence[sympy.Symbol]) -> list[_Kind]:
    """Kinds of rows in which a split sum may cancel: far from 0, with outliers, or nearly equal.

    What is given of a row may have been reduced elsewhere: by the sum of weights that all rows
    share a sum is divided to be their mean.
    """
    found = [_Kind(*place, tuple(free)) for place in _PLACES]
    found += [_Kind(0.0, 1.0, (each,), outlier=_OUTLIER) for each in free]
    if len(free) > 1:
        found += [_Kind(*place, tuple(free), alike=True) for place in _PLACES]
        found += [_Kind(*place, (each,)) for each in free for place in _PLACES[3:]]
    place = _PLACES[3]
    for one in given:
        found += [_Kind(*place, tuple(free), given=(one, each)) for each in free]
        for each in free if len(free) > 1 else ():
            moved = tuple(other for other in free if other != each)
            found.append(_Kind(*place, moved, given=(one, each)))
    return found


def _balanced_kinds(
    cascade: Cascade, split: Sequence[str], free: Sequence[sympy.Symbol]
) -> list[_Kind]:
    """Kinds of rows in which what is given of a row makes a split sum 0, whatever it is of it.

    Of ``sum w (x - total/count)`` the total is no mean, but what it becomes may be one.
    """
    place = _PLACES[3]
    return [
        _Kind(*place, (each,), balanced=(one, name))
        for name in split
        for one in _given(cascade)
        for each in free
        if _meet(cascade.stage(name).term, one, each)
    ]


def _meet(term: sympy.Expr, invariant: sympy.Symbol, element: sympy.Symbol) -> bool:
    """Whether a part of a term adds what is made of an invariant to what is made of an element."""
    return any(
        invariant in (total - each).free_symbols
        for total in term.atoms(sympy.Add)
        for each in total.args
        if element in each.free_symbols
    )


def _balance(cascade: Cascade, kind: _Kind, some: slice, single: dict[str, Any]) -> None:
    """Set an invariant so that a stage that is linear in it is 0, in these rows."""
    import numpy as np

    from crossfuse.cascade.run import two_pass

    assert kind.balanced is not None
    invariant, stage = kind.balanced
    double = {name: each[some].astype(np.float64) for name, each in single.items()}
    at = [np.full(_ROWS, place) for place in (0.0, 1.0)]
    with np.errstate(all="ignore"):
        none, one = (two_pass(cascade, {**double, str(invariant.name): e})[stage] for e in at)
        found = none / (none - one)
    single[str(invariant.name)][some] = np.where(np.isfinite(found), found, 0)


def _far_kinds(free: Sequence[sympy.Symbol]) -> list[_Kind]:
    """Kinds of rows whose powers are out of range."""
    found = [_Kind(0.0, 1.0, (each,), outlier=_HUGE) for each in free]
    return found + [_Kind(0.0, scale, (each,)) for each in free for scale in _SCALES]


def _data(cascade: Cascade, kinds: Sequence[_Kind]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw rows of each kind in float32, and give the same numbers in float64."""
    import numpy as np

    rng = np.random.default_rng(7)
    shape = (len(kinds), _ROWS, _LENGTH)
    common = rng.standard_normal(shape)
    single: dict[str, Any] = {}
    for symbol in (*cascade.elements, *cascade.invariants):
        if symbol in (cascade.index, cascade.length):
            continue
        if symbol.is_integer:
            found = rng.integers(0, _LENGTH, shape).astype(np.float64)
            # What is given of a row is a position too, and a term may be chosen by its being 0.
            found[:, ::2] *= symbol in cascade.elements
        else:
            found = rng.standard_normal(shape)
            for number, kind in enumerate(kinds):
                if kind.given is not None and symbol == kind.given[1] and symbol not in kind.moved:
                    found[number] = np.abs(found[number])
                if kind.balanced is not None and symbol not in kind.moved:
                    found[number] = np.abs(found[number])
                if kind.alike:
                    found[number] = common[number] + 1e-3 * found[number]
                if symbol in kind.moved:
                    found[number] = kind.about + kind.spread * found[number]
                if symbol in kind.moved and kind.alternating:
                    found[number, :, 1::2] *= -1
                if symbol in kind.moved and kind.outlier:
                    found[number, :, _LENGTH // 2] = kind.outlier
            found = np.abs(found) if symbol.is_nonnegative else found
        rows = found.reshape(-1, _LENGTH)
        rows = rows if symbol in cascade.elements else rows[:, 0]
        single[str(symbol.name)] = rows.astype(np.float32)
    for number, kind in enumerate(kinds):
        if kind.given is not None:
            invariant, of = kind.given
            some = slice(number * _ROWS, (number + 1) * _ROWS)
            total = single[str(of.name)][some].sum(axis=1)
            single[str(invariant.name)][some] = total / (_LENGTH if of in kind.moved else 1)
        if kind.balanced is not None:
            _balance(cascade, kind, slice(number * _ROWS, (number + 1) * _ROWS), single)
    double = {name: each.astype(np.float64) for name, each in single.items()}
    return single, double
