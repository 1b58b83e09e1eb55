"""Which elements a store writes and which thread writes them, by enumeration.

TVM's affine analysis proves most stores distinct and gives up on some that are. Extents are
constant, so what it cannot prove is counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir

if TYPE_CHECKING:
    import numpy as np

#: Variables of loops, each with its first value and its extent; None where that is not constant.
Bounds = Mapping[Any, tuple[int | None, int | None]]

#: Iterations that are enumerated at most.
MAX_ITERATIONS = 1 << 22


@dataclass(frozen=True)
class StoredElements:
    """Pairs of an element that a store writes and the parallel iteration that writes it."""

    #: Indices, one column for each element.
    elements: np.ndarray
    #: Number of the parallel iteration, for each column.
    actors: np.ndarray

    @staticmethod
    def joined(stores: Sequence[StoredElements]) -> StoredElements:
        """The writes of several stores of the same parallel loops together."""
        import numpy as np

        return StoredElements(
            np.concatenate([each.elements for each in stores], axis=1),
            np.concatenate([each.actors for each in stores]),
        )

    def of_several_actors(self) -> np.ndarray:
        """Elements that different parallel iterations store, by column."""
        import numpy as np

        order = np.lexsort((self.actors, *self.elements))
        elements, actors = self.elements[:, order], self.actors[order]
        same = (np.diff(elements, axis=1) == 0).all(axis=0)
        return elements[:, 1:][:, same & (np.diff(actors) != 0)]


def stored_elements(
    indices: Sequence[Any],
    parallel: Bounds,
    serial: Bounds,
    conditions: Iterable[Any],
) -> StoredElements | None:
    """Enumerate the elements that a store writes, and the parallel iterations that write them.

    `parallel` loops are those bound to CTAs or threads. Conditions on other variables are left out,
    so that more may be found than is stored. None where there are too many iterations or no
    constant number of them, or an expression has a node that is not evaluated here.
    """
    import numpy as np

    loops = {**parallel, **serial}
    iterations = _iterations(loops)
    if iterations is None:
        return None
    values, shape = iterations
    try:
        executed = np.broadcast_to(_value(_decided(conditions, loops), values), shape)
        columns = [np.broadcast_to(_value(each, values), shape).ravel() for each in indices]
    except _Unknown:
        return None
    executed = executed.astype(bool).ravel()
    width = int(np.prod(shape[: len(parallel)], dtype=np.int64))
    actors = np.repeat(np.arange(width), executed.size // max(width, 1))
    return StoredElements(np.stack(columns)[:, executed], actors[executed])


def implies(premise: Any, conclusion: Any, loops: Bounds) -> bool:
    """Whether enumeration shows that a condition holds wherever another does."""
    import numpy as np

    used = {var for each in (premise, conclusion) for var in ir.variables(each)}
    known = {var: bound for var, bound in loops.items() if var in used}
    iterations = _iterations(known)
    if len(known) < len(used) or iterations is None:
        return False
    values, _ = iterations
    try:
        holds, wanted = _value(premise, values), _value(conclusion, values)
    except _Unknown:
        return False
    return bool(np.all(np.logical_not(holds) | wanted))


def are_apart(steps: Iterable[tuple[int, int]]) -> bool:
    """Whether each step exceeds all that smaller ones reach together, so that all sums differ.

    A step comes with the number of its multiples, from 0 on; a sum has one multiple of each.
    """
    reached = 0
    for step, count in sorted(steps, key=operator.itemgetter(0)):
        if step <= reached:
            return False
        reached += step * (count - 1)
    return True


def _iterations(loops: Bounds) -> tuple[dict[Any, Any], tuple[int, ...]] | None:
    """Values of each variable over all iterations, and the number of each variable's values.

    Shapes of values broadcast against each other. None where there are too many iterations or no
    constant number of them.
    """
    import numpy as np

    starts = [start for start, _ in loops.values() if start is not None]
    shape = tuple(extent for _, extent in loops.values() if extent)
    if len(starts) < len(loops) or len(shape) < len(loops):
        return None
    if np.prod(shape, dtype=np.int64) > MAX_ITERATIONS:
        return None
    counters = np.indices(shape, dtype=np.int64, sparse=True)
    values = {
        variable: counter + start
        for variable, start, counter in zip(loops, starts, counters, strict=True)
    }
    return values, shape


def _decided(conditions: Iterable[Any], loops: Bounds) -> Any:
    """The terms of conditions that depend on variables of the loops alone."""
    return ir.conjunction(
        term
        for condition in conditions
        for term in ir.terms(condition)
        if all(var in loops for var in ir.variables(term))
    )


class _Unknown(Exception):
    """An expression has a node that is not evaluated here."""


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
