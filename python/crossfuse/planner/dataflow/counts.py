"""Arithmetic on counts: one number, or an array with a number for each candidate.

Python integers stay Python integers, which do not overflow. Arrays are int64 where the largest
count of a chain fits, and float64 where it may not.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from crossfuse.planner.chain.spec import Chain

Count: TypeAlias = "int | np.ndarray[Any, Any]"
Flag: TypeAlias = "bool | np.ndarray[Any, Any]"

# Bytes, times copies in a cluster, of the largest count: an exchange moves each partial sum
# 16 * 15 times at most, in 4 bytes.
_MOST_FACTOR = 4 * 16 * 16


def ceil_div(count: Count, size: Count) -> Count:
    """How many of `size` cover `count`."""
    return -(-count // size)


def least(a: Count, b: Count) -> Count:
    """The smaller one."""
    return min(a, b) if _plain(a, b) else np.minimum(a, b)


def most(a: Count, b: Count) -> Count:
    """The larger one."""
    return max(a, b) if _plain(a, b) else np.maximum(a, b)


def choose(flag: Flag, yes: Count, no: Count) -> Count:
    """`yes` where the flag is set, `no` elsewhere."""
    if isinstance(flag, np.ndarray):
        return np.where(flag, yes, no)
    return yes if flag else no


def either(a: Flag, b: Flag) -> Flag:
    """Whether one of two flags is set."""
    return a | b


def both(a: Flag, b: Flag) -> Flag:
    """Whether two flags are set."""
    return a & b


def counting_type(chain: Chain) -> type[np.generic]:
    """The numpy type that tile extents of candidates should have.

    No count exceeds the product of all extents, times bytes and copies.

    Parameters
    ----------
    chain : Chain
        What is counted.

    Returns
    -------
    type
        ``numpy.int64`` where all counts of the chain fit; else ``numpy.float64``, in which counts
        are exact below 2**53 and within one part in 10**15 above.
    """
    largest = prod(each.extent for each in chain.dims) * _MOST_FACTOR
    return np.int64 if largest < 2**63 else np.float64


def _plain(a: Count, b: Count) -> bool:
    return not (isinstance(a, np.ndarray) or isinstance(b, np.ndarray))
