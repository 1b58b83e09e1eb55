"""The report on fused layers; a module of its own, so that reading it needs no TVM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BinOutcome:
    """What became of two layers of symbolic rows in one bin of rows.

    Family, times, text and measurements are as in `ChainOutcome`, for `rows` rows.
    """

    #: The most rows of a call; calls with no more rows than the bin before belong to that one.
    rows: int
    #: The kernel that computes them; empty where TVM's operators do.
    name: str
    family: str
    microseconds: float | None
    eager_microseconds: float | None
    #: Empty where there is a kernel.
    text: str
    measured: str = ""


@dataclass(frozen=True)
class ChainOutcome:
    """What became of two layers, or of one product with what makes its rows.

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
        Times of the kernel and of not fusing, in microseconds: estimates, or both measured. None
        where nothing was planned. Of symbolic rows those of the bin in which fusing saves most.
    text : str
        The chain that was found, or why there is none.
    bins : tuple[BinOutcome, ...]
        Of symbolic rows what became of each bin, few rows first.
    measured : str
        All times that were measured, on which GPU, and what won; empty where nothing was.

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
    bins: tuple[BinOutcome, ...] = ()
    measured: str = ""


def told(outcomes: Sequence[ChainOutcome]) -> str:
    """A report on chains, a line for each pair of layers and one for each of its bins; never empty.

    It gives the estimated or measured times of kernels, and the reasons where there is none.
    """
    lines = (
        line
        for each in outcomes
        for line in (_line(each), *_measured(each), *map(_bin_line, each.bins))
    )
    return "\n".join(lines) or "no two layers of matrix products"


def headline(outcome: ChainOutcome) -> str:
    """What became of a group, without the names of its operators."""
    if not outcome.name:
        return f"left, {outcome.text}"
    return f"{outcome.name}, {_times(outcome)}; {outcome.text}"


def _line(outcome: ChainOutcome) -> str:
    return f"{', '.join(outcome.products)}: {headline(outcome)}"


def _measured(outcome: ChainOutcome) -> tuple[str, ...]:
    return (f"  {outcome.measured}",) if outcome.measured else ()


def _bin_line(outcome: BinOutcome) -> str:
    what = f"{outcome.name}, {_times(outcome)}" if outcome.name else f"left, {outcome.text}"
    words = f"; {outcome.measured}" if outcome.measured else ""
    return f"  up to {outcome.rows} rows: {what}{words}"


def _times(outcome: ChainOutcome | BinOutcome) -> str:
    times = f"{outcome.microseconds:.1f} of {outcome.eager_microseconds:.1f} us"
    return f"{times} measured" if outcome.measured else f"about {times}"
