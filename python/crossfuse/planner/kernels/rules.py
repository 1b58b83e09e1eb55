"""Rules that tiles must keep, each with a name, so that what they leave out can be counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from crossfuse.planner.counts import Flag, both


@dataclass(frozen=True)
class TileRule:
    """One reason not to build a kernel.

    Attributes
    ----------
    name : str
        A word.
    text : str
        What it keeps, in a few words.
    keeps : Flag
        Whether a candidate, or each of many, keeps it.
    """

    name: str
    text: str
    keeps: Flag


def all_kept(rules: Sequence[TileRule]) -> Flag:
    """Whether candidates keep every rule."""
    start: Flag = True
    return reduce(both, (each.keeps for each in rules), start)
