"""Fifty-two patterns of reductions over one axis, as plain two-pass definitions.

Verdicts: ``S`` one product and the usual pairs; ``S*`` needs a maximum times what is not negative;
``V`` no stage uses another, or only results do; ``R`` a sum of products, with its exact rank;
``N`` cannot be streamed. ``outside`` is what no cascade states: its result is no function of
reductions.
"""

from __future__ import annotations

from cascade_patterns.moments import moments
from cascade_patterns.pattern import Pattern
from cascade_patterns.probabilities import probabilities
from cascade_patterns.scales import scales
from cascade_patterns.softmaxes import softmaxes

PATTERNS = (*softmaxes(), *probabilities(), *moments(), *scales())


def named(name: str) -> Pattern:
    """The first pattern of a name."""
    return next(each for each in PATTERNS if each.name == name)
