"""Results of an emulation as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crossfuse.errors import CheckFailed, refuse

#: Every kind of finding.
KINDS = (
    "race",
    "out-of-bounds",
    "uninitialised-read",
    "unwritten-output",
    "write-to-input",
    "early-exit",
    "early-launch",
    "peer-not-started",
    "deadlock",
    "async-race",
    "register-race",
    "mbarrier",
    "barrier-divergence",
    "bad-rank",
    "misaligned",
    "tensor-map",
    "order-dependent",
    "crash",
    "timeout",
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a kernel.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    buffer : str
        Name of the argument or of the static shared array, ``"shared memory"`` for the dynamic
        one, empty where no buffer is concerned.
    index : int
        Position in `unit` from the start of the buffer; -1 without a buffer.
    unit : str
        ``"element"`` for an argument (flat, row-major), ``"byte"`` for shared memory.
    first : str
        The statement at fault, as ``"line N: text"`` of the generated text; of a race, the access
        that came first in this emulation. Empty where no statement is.
    second : str
        The other statement of a race or of diverging barriers.
    cta : int
        CTA of the thread at fault, counted x first over the grid; -1 if no thread is.
    thread : int
        Thread within that CTA, counted x first; -1 if no thread is.
    detail : str
        What happened, in words.

    Examples
    --------
    >>> print(Finding("race", "out", 3, "element", "line 7: out[i] = x", "", 0, 5, "no barrier"))
    race at element 3 of out in `line 7: out[i] = x` (CTA 0, thread 5): no barrier.
    """

    kind: str
    buffer: str
    index: int
    unit: str
    first: str
    second: str
    cta: int
    thread: int
    detail: str

    def __str__(self) -> str:
        place = f" at {self.unit} {self.index} of {self.buffer}" if self.buffer else ""
        statements = " and ".join(f"`{s}`" for s in (self.first, self.second) if s)
        actor = f" (CTA {self.cta}, thread {self.thread})" if self.thread >= 0 else ""
        where = f" in {statements}" if statements else ""
        return f"{self.kind}{place}{where}{actor}: {self.detail}."


@dataclass(frozen=True)
class EmulationReport:
    """Result of an emulation.

    Attributes
    ----------
    name : str
        Name of the emulated function.
    outputs : Mapping[str, np.ndarray]
        Every output of the first run by name; elements that were never written hold all-ones bytes.
        Empty after a crash, a timeout or a deadlock.
    findings : tuple[Finding, ...]
        What is wrong; empty for a correct kernel.
    seconds : float
        Wall time, compilation included.
    launches : int
        Kernel launches of one run.
    later : tuple[Mapping[str, np.ndarray], ...]
        The same of further runs, in other orders; empty ones behind a run with findings.
    at_once : int
        Most launches that ran at the same time in any order: more than 1 where some start early.

    Examples
    --------
    >>> out = np.zeros(4, np.float32)  # [4]
    >>> race = Finding("race", "out", 3, "element", "line 7: out[i] = x", "", 0, 5, "no barrier")
    >>> report = EmulationReport("copy", {"out": out}, (race,), seconds=0.1, launches=1)
    >>> report.ok
    False
    >>> report.raise_if_wrong()
    Traceback (most recent call last):
    ...
    crossfuse.errors.CheckFailed: emulation: copy: found 1 finding(s): race at element 3 of out ...
    """

    name: str
    outputs: Mapping[str, np.ndarray]
    findings: tuple[Finding, ...]
    seconds: float
    launches: int
    later: tuple[Mapping[str, np.ndarray], ...] = ()
    at_once: int = 1

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def raise_if_wrong(self) -> None:
        """Raise if anything was found.

        Raises
        ------
        CheckFailed
            Its text has the first three findings.
        """
        if self.ok:
            return
        shown = " ".join(str(finding) for finding in self.findings[:3])
        rest = len(self.findings) - 3
        more = f" And {rest} more." if rest > 0 else ""
        raise refuse(
            CheckFailed,
            "emulation",
            self.name,
            found=f"{len(self.findings)} finding(s): {shown}{more}".rstrip("."),
            limit="no finding",
            instead="correct the schedule, the edit or the lowering that these statements come "
            "from; docs/troubleshooting.md says what to do about each kind",
        )
