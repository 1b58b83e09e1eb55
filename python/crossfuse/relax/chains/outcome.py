"""What is reported of two layers; apart from what finds them, so that to read it needs no TVM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChainOutcome:
    """What became of two layers.

    Attributes
    ----------
    function : str
        The Relax function that they are in.
    products : tuple[str, ...]
        Variables of the products, the last one last.
    name : str
        The kernel that computes them; empty where they were left alone.
    family : str
        Its family, see `crossfuse.planner.families`; ``"eager"`` where not to fuse is faster.
    microseconds, eager_microseconds : float | None
        Estimated times of the kernel and of not fusing; None where nothing was planned.
    text : str
        The chain that was found, or why there is none.

    Examples
    --------
    >>> left = ChainOutcome("main", ("lv", "lv2"), "", "eager", 9.5, 9.0, "not to fuse is faster")
    >>> left.microseconds - left.eager_microseconds
    0.5
    """

    function: str
    products: tuple[str, ...]
    name: str
    family: str
    microseconds: float | None
    eager_microseconds: float | None
    text: str


def told(outcomes: Sequence[ChainOutcome]) -> str:
    """What became of chains, one line for each pair of layers.

    Parameters
    ----------
    outcomes : Sequence[ChainOutcome]
        Of a graph or a model.

    Returns
    -------
    str
        With estimated times of kernels, and reasons of the others; never empty.
    """
    return "\n".join(map(_line, outcomes)) or "no two layers of matrix products"


def _line(outcome: ChainOutcome) -> str:
    products = ", ".join(outcome.products)
    if not outcome.name:
        return f"{products}: left, {outcome.text}"
    ours, eager = outcome.microseconds, outcome.eager_microseconds
    return f"{products}: {outcome.name}, about {ours:.1f} of {eager:.1f} us; {outcome.text}"
