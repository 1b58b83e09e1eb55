"""The doctor's findings as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes
    ----------
    name : str
        What was looked at, such as ``"nvcc"``.
    status : {"ok", "warn", "fail"}
        ``"warn"``: something works less well or only in part; ``"fail"``: kernels cannot be built.
    found : str
        What is there.
    instead : str
        What to do about it, as an imperative clause without a full stop; empty when all is well.

    Examples
    --------
    >>> Check("nvcc", "fail", "none", "pip install 'crossfuse[nvcc]'").status
    'fail'
    """

    name: str
    status: Status
    found: str
    instead: str = ""


@dataclass(frozen=True)
class Report:
    """All findings.

    Attributes
    ----------
    version : str
        Version of the package that made the report.
    checks : tuple[Check, ...]
        In the order in which they are shown.

    Examples
    --------
    >>> from crossfuse.doctor import collect
    >>> sorted({each.status for each in collect().checks} - {"ok", "info", "warn", "fail"})
    []
    """

    version: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing fails; warnings do not count."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Render as JSON-ready values.

        Returns
        -------
        dict[str, Any]
            Keys ``version``, ``ok`` and ``checks``, the last a list of the attributes of `Check`.
        """
        return {
            "version": self.version,
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
        }
