"""Arithmetic on counts: one number, or an array with a number for each candidate.

Python integers stay Python integers, which do not overflow. Arrays become float64, whose division
is many times faster than that of int64, and which does not wrap around. Counts are exact in it
below 2**53, and so are rounded quotients: a/b of integers is an integer or at least 1/b away from
the next one, and the rounding error is less. Of a chain beyond that they are within 1 in 10**15.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np

Count: TypeAlias = "int | np.ndarray[Any, Any]"
Flag: TypeAlias = "bool | np.ndarray[Any, Any]"
#: From 0 to 1.
Share: TypeAlias = "float | np.ndarray[Any, Any]"
Value = TypeVar("Value", "Flag", "Count", "Share")


def ceil_div(count: Count, size: Count) -> Count:
    """Number of `size` that cover `count`."""
    if _plain(count, size):
        return -(-count // size)
    quotient: np.ndarray = np.divide(count, size)
    return np.ceil(quotient)


def least(a: Count, b: Count) -> Count:
    """The smaller one."""
    return min(a, b) if _plain(a, b) else np.minimum(a, b)


def most(a: Count, b: Count) -> Count:
    """The larger one."""
    return max(a, b) if _plain(a, b) else np.maximum(a, b)


def choose(flag: Flag, yes: Value, no: Value) -> Value:
    """`yes` where the flag is set, `no` elsewhere."""
    if isinstance(flag, np.ndarray):
        return np.where(flag, yes, no)
    return yes if flag else no


def _plain(a: Count, b: Count) -> bool:
    return not (isinstance(a, np.ndarray) or isinstance(b, np.ndarray))
