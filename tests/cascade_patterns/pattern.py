"""One pattern, and the inputs that are drawn for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cascade_patterns.symbols import x, x2
from crossfuse.cascade.spec import Cascade

LOGITS = "plain zero tiny large holes masked"
FINITE = "plain zero tiny large"


@dataclass(frozen=True)
class Pattern:
    """One of the patterns.

    Attributes
    ----------
    number : int
        As in the list of patterns; variants share it.
    name : str
        What people call it.
    cascade : Cascade | None
        The definition; None for what is outside.
    verdict : str
        See `cascade_patterns`.
    rank : tuple[str, int] | None
        Of ``R``: a stage and its rank.
    refusal : tuple[str, ...]
        Of ``N``: parts of the message, the rule first.
    rows : str
        Kinds of rows that are drawn; see `draw`.
    least : int
        The fewest elements: k of a top-k.
    given : Mapping[str, float]
        Values of invariants; others are drawn.
    """

    number: int
    name: str
    cascade: Cascade | None
    verdict: str
    rank: tuple[str, int] | None = None
    refusal: tuple[str, ...] = ()
    rows: str = "plain zero tiny"
    least: int = 1
    given: Mapping[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """For test names."""
        return f"{self.number}-{self.name.replace(' ', '_')}"


def draw(pattern: Pattern, rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    """Draw inputs, a row for each kind, twice.

    Kinds: ``plain``, ``zero`` (the first element's tensor is 0), ``tiny`` (denormal), ``large``
    (logits up to a thousand), ``holes`` (some -inf), ``masked`` (all -inf).
    """
    cascade, kinds = pattern.cascade, pattern.rows.split() * 2
    data = {}
    for symbol in cascade.elements:
        if symbol == cascade.index:
            continue
        shape = (len(kinds), length)
        drawn = rng.uniform(0.5, 2, shape) if symbol.is_positive else rng.normal(0, 2, shape)
        if symbol in (x, x2):
            for row, kind in enumerate(kinds):
                drawn[row] = _row(kind, drawn[row], rng)
        data[symbol.name] = drawn
    for symbol in cascade.invariants:
        if symbol != cascade.length:
            drawn = rng.uniform(0.5, 2, len(kinds))
            drawn = rng.integers(0, length, len(kinds)) if symbol.is_integer else drawn
            data[symbol.name] = np.full(len(kinds), pattern.given.get(symbol.name, drawn))
    return data


def _row(kind: str, row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    made = {
        "plain": row,
        "zero": np.zeros_like(row),
        "tiny": row * 1e-308,
        "large": row * 300,
        "holes": np.where(rng.random(row.shape) < 0.6, -np.inf, row),
        "masked": np.full_like(row, -np.inf),
    }
    return made[kind]
