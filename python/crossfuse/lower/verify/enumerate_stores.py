"""Decides by enumeration whether two parallel iterations store to one element.

TVM's affine analysis proves most stores distinct and gives up on some that are. Extents are
constant, so what it cannot prove is counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir

if TYPE_CHECKING:
    import numpy as np

#: Iterations that are enumerated at most.
MAX_ITERATIONS = 1 << 22


def stores_are_distinct(
    indices: Sequence[Any], parallel: Sequence[Any], serial: Sequence[Any], predicate: Any
) -> bool:
    """Whether no element is stored by two different parallel iterations.

    Parameters
    ----------
    indices : Sequence
        Index expressions of the store.
    parallel, serial : Sequence
        Loops of constant extent, bound to CTAs or threads, and others.
    predicate : Any
        Condition under which the store is executed.

    Returns
    -------
    bool
        False also where there are too many iterations, or an expression has a node that this
        does not evaluate.
    """
    import numpy as np

    loops = (*parallel, *serial)
    bounds = [(ir.constant(loop.min), ir.constant(loop.extent)) for loop in loops]
    known = [(start, extent) for start, extent in bounds if start is not None and extent]
    if len(known) < len(bounds):
        return False
    shape = tuple(extent for _, extent in known)
    if np.prod(shape, dtype=np.int64) > MAX_ITERATIONS:
        return False
    counters = np.indices(shape, dtype=np.int64, sparse=True)
    values = {
        loop.loop_var: counter + start
        for loop, counter, (start, _) in zip(loops, counters, known, strict=True)
    }
    try:
        executed = np.broadcast_to(_value(predicate, values), shape).astype(bool).ravel()
        columns = [np.broadcast_to(_value(each, values), shape).ravel() for each in indices]
    except _Unknown:
        return False
    width = int(np.prod(shape[: len(parallel)], dtype=np.int64))
    actors = np.repeat(np.arange(width), executed.size // max(width, 1))
    return _one_actor_each(np.stack(columns), actors, executed)


def _one_actor_each(elements: np.ndarray, actors: np.ndarray, executed: np.ndarray) -> bool:
    """Whether each column of `elements` occurs with one actor only."""
    import numpy as np

    elements, actors = elements[:, executed], actors[executed]
    order = np.lexsort((actors, *elements))
    same = (np.diff(elements[:, order], axis=1) == 0).all(axis=0)
    return not bool((same & (np.diff(actors[order]) != 0)).any())


class _Unknown(Exception):
    """An expression that is not evaluated here."""


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
    "And": operator.and_,
    "Or": operator.or_,
}


def _value(expression: Any, values: Mapping[Any, Any]) -> Any:
    import numpy as np

    number = ir.constant(expression)
    if number is not None:
        return np.int64(number)
    if isinstance(expression, ir.Var):
        if expression not in values:
            raise _Unknown
        return values[expression]
    kind = type(expression).__name__
    if kind in ("Min", "Max"):
        pick = np.minimum if kind == "Min" else np.maximum
        return pick(_value(expression.a, values), _value(expression.b, values))
    if kind in _BINARY:
        return _BINARY[kind](_value(expression.a, values), _value(expression.b, values))
    raise _Unknown
