"""What the backend made of each graph."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from crossfuse.relax.chains.outcome import ChainOutcome

#: Graphs that are remembered.
_MOST = 64


@dataclass(frozen=True)
class Report:
    """One graph that torch gave to the backend.

    Attributes
    ----------
    outcomes : tuple[ChainOutcome, ...]
        Each pair of layers in it: the kernel that it became, or why it did not.
    untranslated : tuple[str, ...]
        Operators that were left to torch because TVM does not know them.
    reason : str
        Why the graph was left to torch as a whole; empty if it was looked at.

    Examples
    --------
    >>> from crossfuse.torch import reports
    >>> print(reports()[-1])  # after a call of a compiled model  # doctest: +SKIP
    """

    outcomes: tuple[ChainOutcome, ...] = ()
    untranslated: tuple[str, ...] = ()
    reason: str = ""

    @property
    def fused(self) -> tuple[str, ...]:
        """Kernels that the graph calls, in order; equal layers share one."""
        return tuple(each.name for each in self.outcomes if each.name)

    def text(self) -> str:
        """One line for each pair of layers."""
        if self.reason:
            return f"left to torch: {self.reason}"
        lines = [_line(each) for each in self.outcomes]
        return "\n".join(lines or ["no two layers of matrix products"])


def in_torch(outcome: ChainOutcome, names: Mapping[str, str]) -> ChainOutcome:
    """An outcome whose products have the names of torch's nodes."""
    return replace(outcome, products=tuple(names.get(each, each) for each in outcome.products))


_REPORTS: deque[Report] = deque(maxlen=_MOST)


def reports() -> tuple[Report, ...]:
    """Reports of this process's graphs, the last one last.

    Examples
    --------
    >>> for report in reports():  # after calls of a model compiled with backend="crossfuse"
    ...     print(report)
    """
    return tuple(_REPORTS)


def keep(report: Report) -> None:
    """Add a report to `reports`."""
    _REPORTS.append(report)


def warn_of_training() -> None:
    """Say that a graph with gradients is left alone."""
    reason = "it records gradients, and our kernels have none"
    keep(Report(reason=reason))
    warnings.warn(
        f"crossfuse left a graph to torch: {reason}; call the model under torch.no_grad() or "
        "torch.inference_mode()",
        stacklevel=2,
    )


def _line(outcome: ChainOutcome) -> str:
    products = ", ".join(outcome.products)
    if not outcome.name:
        return f"{products}: left, {outcome.text}"
    ours, eager = outcome.microseconds, outcome.eager_microseconds
    return f"{products}: {outcome.name}, about {ours:.1f} of {eager:.1f} us; {outcome.text}"
