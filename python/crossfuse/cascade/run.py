"""Runs cascades on numpy arrays: the two-pass definition, the stream, and the tree of merges.

Arrays of elements have the shape (rows, length), those of invariants (rows,) or none. Results have
the shape (rows,), of a top-k (rows, k); rows have that of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import sympy

from crossfuse.calls import AtLeastOne, checked
from crossfuse.cascade.algebra.exponents import nonnegative, ratios
from crossfuse.cascade.algebra.state import State
from crossfuse.cascade.expressions.functions import function
from crossfuse.cascade.spec import (
    Cascade,
    Derivation,
    Monoid,
    Slot,
    guarded,
    left,
    new,
    position,
    right,
    value,
)

# Reductions of numpy arrays. One that keeps positions is a pair of arrays: values and positions.


_OPERATORS = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "logaddexp": np.logaddexp,
}


def reduced(monoid: Monoid, brought: Any, positions: Any) -> Any:
    """Reduce elements, (rows, count), along rows.

    The result is (rows, 1), of ``topk`` (rows, k); a pair with positions of the same shape where
    the reduction keeps these.
    """
    if monoid.keeps_places:
        return chosen(monoid, brought, positions)
    operator: Any = _OPERATORS[monoid.name]
    if monoid.name in ("sum", "prod"):
        return operator.reduce(brought, axis=1, keepdims=True)
    nothing = brought.dtype.type(float(monoid.identity))
    return operator.reduce(brought, axis=1, keepdims=True, initial=nothing)


def combined(monoid: Monoid, one: Any, other: Any) -> Any:
    """Combine two reductions; see `reduced`. Positions are kept of both, if `one` has any."""
    if not monoid.keeps_places:
        return _OPERATORS[monoid.name](np.asarray(one, dtype=other.dtype), other)
    if not isinstance(one, tuple):
        return other
    both = [np.concatenate(pair, axis=1) for pair in zip(one, other, strict=True)]
    return chosen(monoid, *both)


def chosen(monoid: Monoid, brought: Any, positions: Any) -> tuple[Any, Any]:
    """The best elements and their positions, of equals the first; where there are too few, none.

    Both are (rows, k), where k is 1 for an argmax; the inputs are (rows, count), where count may be
    0.
    """
    count = monoid.count
    nothing = float(monoid.identity)
    empty = np.full((len(brought), count), nothing, brought.dtype)
    brought = np.concatenate([brought, empty], axis=1)
    last = np.full(empty.shape, np.iinfo(np.int64).max)
    positions = np.concatenate([positions.astype(np.int64), last], axis=1)
    key = brought if monoid.name == "argmin" else -brought
    order = np.lexsort((positions, key), axis=1)[:, :count]
    places = np.take_along_axis(positions, order, axis=1)
    return np.take_along_axis(brought, order, axis=1), places


# The two-pass definition, completed for masked and zero rows.


def plain(cascade: Cascade) -> Derivation:
    """Define a cascade where a maximum is -oo or a divisor 0: each slot takes in one stage's term.

    The rules are those of derivations (`State.term`, `State.finished`): a maximum of nothing
    counts as 0 within terms, and within exponents of results; a sum of exponentials below it and a
    largest magnitude count as 1 where they divide and are 0.
    """
    state = State(frozenset())
    known: dict[sympy.Symbol, sympy.Expr] = {}
    terms = {}
    for stage in cascade.stages:
        term = stage.term.xreplace(known)
        terms[stage.name] = ratios(state.term(term))
        scalar = stage.monoid.name in ("sum", "prod", "max", "min")
        known[stage.symbol] = state.add(
            stage.name,
            stage.monoid,
            term,
            value(stage.name),
            None,
            no_sign=scalar and nonnegative(term),
        )
    results = {k: state.finished(each.xreplace(known)) for k, each in cascade.results.items()}
    rows = {k: state.finished(each.xreplace(known)) for k, each in cascade.rows.items()}
    slots = (replace(each.slot(), contribution=terms[each.name]) for each in state.kept)
    return Derivation(cascade, tuple(slots), {}, results, rows)


#: Arrays by the names of elements and invariants. The length and the index are known.
Data = Mapping[str, Any]
#: Values of symbols: arrays of the shape (rows, 1), (rows, k) or (rows, length).
Values = dict[sympy.Symbol, Any]


def two_pass(cascade: Cascade, data: Data) -> dict[str, Any]:
    """Run a cascade as it is defined, one pass over the elements for each stage.

    Returns stages, results and rows by name. A maximum of nothing counts as 0 within expressions; a
    sum of exponentials below it, and a largest magnitude, count as 1 where they divide and are 0.
    """
    known, defined = _Inputs(cascade, data), plain(cascade)
    made, values = {}, known.whole()
    for slot in defined.slots:
        with np.errstate(all="ignore"):
            brought = known.evaluated(slot.contribution, values, known.length)
            found = reduced(slot.monoid, brought, known.positions(0, known.length))
            found = combined(slot.monoid, float(slot.init), found)
        _note(values, known, slot, found)
        made[slot.name] = _first(found)
    return _finished(defined, known, values, made)


@checked
def stream(derivation: Derivation, data: Data, tile: AtLeastOne) -> dict[str, Any]:
    """Run a derivation tile by tile.

    Parameters
    ----------
    derivation : Derivation
        How the cascade streams.
    data : Mapping[str, numpy.ndarray]
        Elements and invariants.
    tile : int
        Elements taken in at a time.

    Returns
    -------
    dict[str, numpy.ndarray]
        As `two_pass`.

    Examples
    --------
    >>> import numpy as np
    >>> import sympy
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.spec import MAX, SUM
    >>> from crossfuse.cascade.spec import Cascade, Stage
    >>> x = sympy.Symbol("x", real=True)
    >>> m = Stage("m", MAX, x)
    >>> softmax = Cascade((m, Stage("s", SUM, sympy.exp(x - m.symbol))), (x,))
    >>> found = stream(derive(softmax), {"x": np.array([[0.0, 1.0, 2.0, 3.0]])}, tile=2)
    >>> float(found["m"][0]), round(float(found["s"][0]), 4)
    (3.0, 1.553)
    """
    known = _Inputs(derivation.cascade, data)
    return _finish(derivation, known, _streamed(derivation, known, 0, known.length, tile))


def merge_tree(
    derivation: Derivation, data: Data, segments: Sequence[int], tile: int = 64
) -> dict[str, Any]:
    """Run a derivation on segments, and merge their states pair by pair.

    Segments are lengths, 0 too, that must sum to all elements (else a ValueError); a tile is the
    number of elements that a step takes in. The result is as of `two_pass`.
    """
    known = _Inputs(derivation.cascade, data)
    if sum(segments) != known.length:
        raise ValueError(f"segments of {sum(segments)} elements for rows of {known.length}")
    states, start = [], 0
    for size in segments:
        states.append(_streamed(derivation, known, start, start + size, tile))
        start += size
    while len(states) > 1:
        pairs = [states[i : i + 2] for i in range(0, len(states), 2)]
        states = [
            _merged(derivation, known, *pair) if len(pair) == 2 else pair[0] for pair in pairs
        ]
    return _finish(derivation, known, states[0])


class _Inputs:
    """Data as arrays of one type, their rows first."""

    def __init__(self, cascade: Cascade, data: Data) -> None:
        given = {name: np.asarray(each) for name, each in data.items()}
        floats = [each.dtype for each in given.values() if each.dtype.kind not in "iub"]
        self.dtype = np.result_type(*floats) if floats else np.dtype(np.float64)
        self.cascade = cascade
        shapes = [given[each.name].shape for each in cascade.elements if each != cascade.index]
        self.length = max((each[-1] for each in shapes), default=0)
        self.rows = max((each[0] for each in shapes if len(each) > 1), default=1)
        self.elements, self.invariants = {}, {}
        for symbol in cascade.elements:
            found = np.arange(self.length) if symbol == cascade.index else given[symbol.name]
            self.elements[symbol] = np.atleast_2d(found).astype(self.dtype)
        for symbol in cascade.invariants:
            found = np.asarray(self.length) if symbol == cascade.length else given[symbol.name]
            self.invariants[symbol] = found.reshape(-1, 1).astype(self.dtype)
        for symbol, first in cascade.firsts.items():
            self.invariants[first] = self.elements[symbol][:, :1]

    def whole(self) -> Values:
        return {**self.elements, **self.invariants}

    def tile(self, start: int, end: int) -> Values:
        return {each: array[:, start:end] for each, array in self.elements.items()}

    def positions(self, start: int, end: int) -> Any:
        return np.broadcast_to(np.arange(start, end), (self.rows, end - start))

    def evaluated(self, expression: sympy.Expr, values: Values, width: int | None = None) -> Any:
        """Values of an expression, of the inputs' type; broadcast to a width if given."""
        needed = sorted(expression.free_symbols, key=lambda each: str(each.name))
        found = function(needed, expression)(*(values[each] for each in needed))
        found = np.asarray(found, dtype=self.dtype)
        if width is None:
            return np.broadcast_to(found, np.broadcast_shapes(found.shape, (self.rows, 1)))
        return np.broadcast_to(found, (self.rows, width))


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def _note(values: Values, known: _Inputs, slot: Slot, found: Any, side: Any = value) -> None:
    """Register a reduction's value, and what stands in for it."""
    first = _first(found)
    if isinstance(found, tuple):
        values[position(slot.name)] = found[1]
    values[side(slot.name)] = values[guarded(slot.name)] = first
    if slot.guard is not None:
        values[guarded(slot.name)] = known.evaluated(slot.guard, {new(slot.name): first})


def _empty(derivation: Derivation, known: _Inputs) -> dict[str, Any]:
    state = {}
    for slot in derivation.slots:
        found: Any = known.evaluated(slot.init, known.invariants)
        if slot.merge is None:
            nothing = np.empty((known.rows, 0), known.dtype)
            found = chosen(slot.monoid, nothing, nothing)
        state[slot.name] = found
    return state


def _streamed(
    derivation: Derivation, known: _Inputs, start: int, end: int, tile: int
) -> dict[str, Any]:
    state = _empty(derivation, known)
    for first in range(start, end, tile):
        state = _step(derivation, known, state, first, min(first + tile, end))
    return state


def _step(
    derivation: Derivation, known: _Inputs, state: Mapping[str, Any], start: int, end: int
) -> dict[str, Any]:
    values = {**known.tile(start, end), **known.invariants}
    values |= {value(name): _first(each) for name, each in state.items()}
    following = {}
    for slot in derivation.slots:
        with np.errstate(all="ignore"):
            brought = known.evaluated(slot.contribution, values, end - start)
            found = reduced(slot.monoid, brought, known.positions(start, end))
            found = combined(slot.monoid, _carried(slot, known, state, values), found)
        following[slot.name] = found
        _note(values, known, slot, found, new)
    return following


def _carried(slot: Slot, known: _Inputs, state: Mapping[str, Any], values: Values) -> Any:
    return state[slot.name] if slot.merge is None else known.evaluated(slot.carry, values)


def _merged(
    derivation: Derivation, known: _Inputs, one: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, Any]:
    values: Values = dict(known.invariants)
    values |= {left(name): _first(each) for name, each in one.items()}
    values |= {right(name): _first(each) for name, each in other.items()}
    following = {}
    for slot in derivation.slots:
        with np.errstate(all="ignore"):
            if slot.merge is None:
                found = combined(slot.monoid, one[slot.name], other[slot.name])
            else:
                found = known.evaluated(slot.merge, values)
        following[slot.name] = found
        _note(values, known, slot, found, new)
    return following


def _finish(derivation: Derivation, known: _Inputs, state: Mapping[str, Any]) -> dict[str, Any]:
    values = known.whole()
    for slot in derivation.slots:
        _note(values, known, slot, state[slot.name])
    made = {}
    for name, each in derivation.stages.items():
        with np.errstate(all="ignore"):
            made[name] = known.evaluated(each, values)
    return _finished(derivation, known, values, made)


def _finished(
    derivation: Derivation, known: _Inputs, values: Values, made: dict[str, Any]
) -> dict[str, Any]:
    """Add results and rows to the stages that are made."""
    with np.errstate(all="ignore"):
        for name, each in derivation.results.items():
            made[name] = known.evaluated(each, values)
        for name, each in derivation.rows.items():
            made[name] = known.evaluated(each, values, known.length)
    narrow = [e for e in made if e not in derivation.rows and made[e].shape[1] == 1]
    return {name: each[:, 0] if name in narrow else each for name, each in made.items()}
