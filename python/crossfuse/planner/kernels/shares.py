"""How a reduction, or a sum of parts, is divided among CTAs."""

from __future__ import annotations

import numpy as np

from crossfuse.planner.counts import Count, Flag, ceil_div

#: Neighbours that a thread adds at once.
_UNIT = 4


def has_equal_shares(extent: Count, size: Count, depth: Count) -> Flag:
    """Whether each of `size` CTAs has a share of a reduction, of as many steps as the others.

    The last share may reach beyond the reduction, where operands are zero, but begins within.

    Parameters
    ----------
    extent : Count
        Elements of the reduction.
    size : Count
        CTAs.
    depth : Count
        Elements of a step.
    """
    share = ceil_div(extent, size * depth) * depth
    return (size - 1) * share < extent


def divides_equally(extent: int, size: int, depth: int) -> bool:
    """`has_equal_shares` of one reduction."""
    return bool(has_equal_shares(extent, size, depth))


def rows_in_parts(rows: Count, columns: Count, parts: Count) -> Count:
    """Rows of a tile, so many at least, of which each part adds as many neighbours."""
    unit = parts * _UNIT
    if isinstance(unit, np.ndarray) or isinstance(columns, np.ndarray):
        common = np.gcd(np.asarray(unit, np.int64), np.asarray(columns, np.int64))
        return ceil_div(np.asarray(rows, np.float64), unit / common) * (unit / common)
    multiple = int(unit // np.gcd(unit, columns))
    return ceil_div(rows, multiple) * multiple
