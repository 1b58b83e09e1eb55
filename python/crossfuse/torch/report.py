"""Reports on what became of each graph that torch gave to the backend."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING

from crossfuse.relax.outcome import ChainOutcome, headline, told

if TYPE_CHECKING:
    from crossfuse.relax.choice import Chosen

#: Reports that a process remembers.
_MOST = 64
#: What the graphs of a training step are called.
FORWARD, BACKWARD = "forward", "backward"
#: A screen, which the text of a report fits.
LINES, COLUMNS = 40, 100


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
    part : str
        Which graph of a training step it is: ``"forward"`` or ``"backward"``; empty for inference.

    Examples
    --------
    >>> from dataclasses import replace
    >>> mlp = ("addmm", "addmm_1")
    >>> made = ChainOutcome("main", mlp, "ffn", "registers", 3.1, 5.0, "gemm_chain:M=128,...")
    >>> print(Report((made, replace(made, products=("addmm_2", "addmm_3")))).text())
    2 x ffn, about 3.1 of 5.0 us; gemm_chain:M=128,...
        addmm, addmm_1 | addmm_2, addmm_3
    """

    outcomes: tuple[ChainOutcome, ...] = ()
    untranslated: tuple[str, ...] = ()
    reason: str = ""
    note: str = ""
    part: str = ""

    @property
    def fused(self) -> tuple[str, ...]:
        """Kernels that the graph calls, in order; equal layers share one."""
        return tuple(each.name for each in self.outcomes if each.name)

    def text(self) -> str:
        """What became of the operators, each of them once: at most `LINES` lines of `COLUMNS`.

        Equal groups are told together, with the names of their operators below; first those that
        became kernels, then what was left and why. `outcomes` has all of it, one by one.
        """
        head = [f"{self.part} graph of a training step:"] if self.part else []
        if self.reason:
            return "\n".join(_cut([*head, f"left to torch: {self.reason}"]))
        lines = _groups(self.outcomes)
        if not self.outcomes:
            lines = [told(())]
        if self.untranslated:
            lines += _wrapped("left to torch: ", list(self.untranslated), ", ")
        if self.note:
            lines.append(f"not measured: {self.note}")
        return "\n".join(_cut([*head, *lines]))


def _groups(outcomes: Sequence[ChainOutcome]) -> list[str]:
    """Lines on groups by what became of them, kernels first; each operator is named once."""
    lines, seen = [], set[str]()
    for fused in (True, False):
        alike: dict[str, list[str]] = {}
        for each in (one for one in outcomes if bool(one.name) == fused):
            head = "; ".join(filter(None, (headline(each), each.measured)))
            members = [name for name in each.products if name not in seen]
            # Of what was left, only operators that no kernel computes are of interest.
            if members and (fused or len(members) == len(each.products)):
                alike.setdefault(head, []).append(", ".join(members))
                seen.update(members)
        for head, groups in alike.items():
            count = f"{len(groups)} x " if len(groups) > 1 else ""
            text = f"{count}{head}"
            lines += wrap(text, COLUMNS, subsequent_indent=" " * 4, max_lines=6, placeholder=" ...")
            lines += _wrapped("    ", groups, " | ")
    return lines


def _wrapped(begin: str, parts: Sequence[str], between: str) -> list[str]:
    """Join parts into lines of at most `COLUMNS`."""
    lines, line = [], begin
    for number, part in enumerate(parts):
        text = part + (between if number + 1 < len(parts) else "")
        if len(line) > len(begin) and len(line) + len(text.rstrip()) > COLUMNS:
            lines.append(line.rstrip())
            line = " " * 4
        line += text
    return [*lines, line.rstrip()]


def _cut(lines: Sequence[str]) -> list[str]:
    """Cut lines to the size of a screen; `Report.outcomes` has what is cut off."""
    short = [each if len(each) <= COLUMNS else f"{each[: COLUMNS - 3]}..." for each in lines]
    if len(short) <= LINES:
        return short
    return [*short[: LINES - 1], f"... {len(short) - LINES + 1} more lines: see Report.outcomes"]


def in_torch(chosen: Chosen, names: Mapping[str, str]) -> Chosen:
    """Rename the products in outcomes as torch names its nodes, each once."""
    outcomes = (
        replace(each, products=tuple(dict.fromkeys(names.get(one, one) for one in each.products)))
        for each in chosen.outcomes
    )
    return replace(chosen, outcomes=tuple(outcomes))


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


def keep(report: Report, instead_of: Report | None = None) -> None:
    """Add a report to `reports`, or put it in the place of one."""
    for place, each in enumerate(_REPORTS):
        if each is instead_of:
            _REPORTS[place] = report
            return
    _REPORTS.append(report)


def left_to_torch(error: Exception) -> Report:
    """Warn that a graph is left to torch for an error, and report it."""
    report = Report(reason=f"{type(error).__name__}: {error}")
    warnings.warn(f"crossfuse left a graph to torch: {report.reason}", stacklevel=3)
    return report
