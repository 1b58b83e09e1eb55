"""Reductions of numpy arrays by the operators of cascades: of elements, and of two results.

What keeps positions is a pair of arrays: values, and where they stood.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from crossfuse.cascade.monoid import INDEXED, RANKED, Monoid


def reduced(monoid: Monoid, brought: Any, positions: Any) -> Any:
    """Reduce elements along rows.

    Parameters
    ----------
    monoid : Monoid
        The operator.
    brought : numpy.ndarray
        Elements, (rows, count).
    positions : numpy.ndarray
        Where they stand.

    Returns
    -------
    numpy.ndarray | tuple
        (rows, 1); of ``topk`` (rows, k); with positions of the same shape, if these are kept.
    """
    nothing = float(monoid.identity)
    if monoid.name in (*INDEXED, *RANKED):
        return chosen(monoid, brought, positions)
    if monoid.name == "sum":
        return brought.sum(axis=1, keepdims=True)
    if monoid.name == "prod":
        return brought.prod(axis=1, keepdims=True)
    operator = {"max": np.maximum, "min": np.minimum, "logaddexp": np.logaddexp}[monoid.name]
    return operator.reduce(brought, axis=1, keepdims=True, initial=brought.dtype.type(nothing))


def combined(monoid: Monoid, one: Any, other: Any) -> Any:
    """Combine two reductions; see `reduced`."""
    if monoid.name in (*INDEXED, *RANKED):
        if not isinstance(one, tuple):
            return other
        both = [np.concatenate(pair, axis=1) for pair in zip(one, other, strict=True)]
        return chosen(monoid, *both)
    operators = {
        "sum": np.add,
        "prod": np.multiply,
        "max": np.maximum,
        "min": np.minimum,
        "logaddexp": np.logaddexp,
    }
    return operators[monoid.name](np.asarray(one, dtype=other.dtype), other)


def chosen(monoid: Monoid, brought: Any, positions: Any) -> tuple[Any, Any]:
    """The best elements and their positions, of equals the first; where there are too few, none.

    Parameters
    ----------
    monoid : Monoid
        One of `INDEXED` or `RANKED`.
    brought, positions : numpy.ndarray
        Elements and where they stand, (rows, count); the count may be 0.

    Returns
    -------
    tuple[numpy.ndarray, numpy.ndarray]
        Both (rows, k), k of an argmax 1.
    """
    count = max(monoid.k, 1)
    nothing = float(monoid.identity)
    empty = np.full((len(brought), count), nothing, brought.dtype)
    brought = np.concatenate([brought, empty], axis=1)
    last = np.full(empty.shape, np.iinfo(np.int64).max)
    positions = np.concatenate([positions.astype(np.int64), last], axis=1)
    key = brought if monoid.name == "argmin" else -brought
    order = np.lexsort((positions, key), axis=1)[:, :count]
    places = np.take_along_axis(positions, order, axis=1)
    return np.take_along_axis(brought, order, axis=1), places
