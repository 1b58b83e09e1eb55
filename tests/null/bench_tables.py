"""Reading the tables of `crossfuse bench`."""

from __future__ import annotations

from itertools import pairwise


def cells(text: str) -> list[str]:
    """Cells of two lines each, which are joined: a time and its ratio, a ratio and a baseline."""
    rows = [line.split("│") for line in text.splitlines()]
    return [
        f"{above.strip()} {below.strip()}"
        for upper, lower in pairwise(rows)
        if len(upper) == len(lower)
        for above, below in zip(upper, lower, strict=True)
    ]
