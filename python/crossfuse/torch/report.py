"""What the backend made of each graph."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from crossfuse.relax.chains.outcome import ChainOutcome, told

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
        Operators that were left to torch because TVM does not know them, or kernels do not take
        their type.
    reason : str
        Why the graph was left to torch as a whole; empty if it was looked at.
    note : str
        Why nothing was measured, though it was asked for; else empty.

    Examples
    --------
    >>> mlp = ("addmm", "addmm_1")
    >>> made = ChainOutcome("main", mlp, "ffn", "registers", 3.1, 5.0, "gemm_chain:M=128,...")
    >>> print(Report((made,)).text())
    addmm, addmm_1: ffn, about 3.1 of 5.0 us; gemm_chain:M=128,...
    """

    outcomes: tuple[ChainOutcome, ...] = ()
    untranslated: tuple[str, ...] = ()
    reason: str = ""
    note: str = ""

    @property
    def fused(self) -> tuple[str, ...]:
        """Kernels that the graph calls, in order; equal layers share one."""
        return tuple(each.name for each in self.outcomes if each.name)

    def text(self) -> str:
        """One line for each pair of layers, and what was measured of it."""
        if self.reason:
            return f"left to torch: {self.reason}"
        text = told(self.outcomes)
        if self.untranslated and not self.outcomes:
            text += f"; left to torch: {', '.join(self.untranslated)}"
        return f"{text}\nnot measured: {self.note}" if self.note else text


def in_torch(outcome: ChainOutcome, names: Mapping[str, str]) -> ChainOutcome:
    """An outcome whose products have the names of torch's nodes."""
    return replace(outcome, products=tuple(names.get(each, each) for each in outcome.products))


_REPORTS: deque[Report] = deque(maxlen=_MOST)


def reports() -> tuple[Report, ...]:
    """Reports of this process's graphs, the last one last.

    Returns
    -------
    tuple[Report, ...]
        The last 64 at most.

    Examples
    --------
    >>> import torch
    >>> from crossfuse.torch import crossfuse
    >>> fn = torch.compile(torch.nn.Linear(8, 4), backend=crossfuse, options={"rest": "eager"})
    >>> with torch.inference_mode():
    ...     y = fn(torch.zeros(2, 8))  # [2, 4]
    >>> print(reports()[-1].text())  # of the graph that was compiled last
    left to torch: its tensors are on cpu, and kernels need a GPU
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
