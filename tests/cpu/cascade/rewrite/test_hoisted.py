"""What is computed once for a row: reciprocals, by which its elements are multiplied."""

from __future__ import annotations

import numpy as np
import sympy

from crossfuse.cascade.expressions.functions import function
from crossfuse.cascade.rewrite.phases import hoisted

x, y, a, b = sympy.symbols("x y a b", real=True)


def test_factors_are_divided_in_turns() -> None:
    """Of numbers of 1e30 the norms are infinite, and so is the product of two that are none."""
    definitions, rest = hoisted(x * y / (a * b), (x, y), ())
    found = dict.fromkeys((x, y), np.float32(1e30)) | dict.fromkeys((a, b), np.float32(np.inf))
    for symbol, each in (*definitions, (None, rest)):
        needed = list(each.free_symbols)
        found[symbol] = np.float32(function(needed, each)(*(found[one] for one in needed)))
    assert found[None] == 0
