"""Which set of weights each call reads, so that the L2 cache is cold or hot as asked."""

from __future__ import annotations

#: The sets together exceed this: five times the L2 cache of an H200.
COLD_BYTES = 300 * 10**6
#: More sets than this are not made; tiny weights rely on what is read between the repeats.
MOST_COPIES = 1024


def copies_needed(size: int, calls: int, l2: str) -> int:
    """Sets of weights to make, of `size` bytes each.

    One for a hot cache, and where there are no weights. Else enough to exceed `COLD_BYTES`, and
    where that is more than `calls`, the most calls between two timestamps, a multiple of it, so
    that no call reads a set twice in a row of calls.
    """
    if l2 == "hot" or not size:
        return 1
    enough = COLD_BYTES // size + 1
    if enough <= calls:
        return enough
    return min(-(-enough // calls), max(1, MOST_COPIES // calls)) * calls


def groups(copies: int, calls: int, l2: str) -> tuple[tuple[int, ...], ...]:
    """Indices of the sets that are used between two timestamps, one group after another.

    For a hot cache there is one group, of the same set again and again.
    """
    if l2 == "hot":
        return ((0,) * calls,)
    if copies <= calls:
        # A set comes again after all others, which do not fit the cache.
        return (tuple(number % copies for number in range(calls)),)
    return tuple(
        tuple(range(first, first + calls)) for first in range(0, copies - calls + 1, calls)
    )
