"""What is reported of two layers; apart from what finds them, so that to read it needs no TVM."""

from __future__ import annotations

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
    """

    function: str
    products: tuple[str, ...]
    name: str
    family: str
    microseconds: float | None
    eager_microseconds: float | None
    text: str
