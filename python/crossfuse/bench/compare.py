"""Our kernel against the fastest baseline of the same run, and everything as one document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crossfuse.bench.job import L2, OURS, OWN, PROTOCOLS, VARIANTS, Row


@dataclass(frozen=True)
class Comparison:
    """One workload at one setting.

    Attributes
    ----------
    workload : str
        Its label.
    M : int
        Rows.
    l2, protocol : str
        The setting.
    ours, best : float
        Microseconds of our kernel and of the fastest baseline.
    baseline : str
        Which that is.
    variant : str
        Which kernel of ours: ``ours`` where it has a time, else the fastest with another placement.
    """

    workload: str
    M: int
    l2: str
    protocol: str
    ours: float
    best: float
    baseline: str
    variant: str = OURS

    @property
    def speedup(self) -> float:
        """Time of the baseline over ours: below 1 where we lose."""
        return self.best / self.ours

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write."""
        return asdict(self) | {"speedup": self.speedup}


Place = tuple[str, int, str, str]


def place(row: Row) -> Place:
    """Label, rows, cache and protocol: what the rows have in common that are compared."""
    job = row.planned.job
    return row.planned.label, row.planned.rows, job.l2, job.protocol


def compare(rows: Iterable[Row]) -> dict[Place, Comparison]:
    """Find the fastest baseline wherever a kernel of ours has a time.

    Kernels of ours are no baselines of each other. The one that is compared is what a user gets by
    default, not the best placement found afterwards.

    Parameters
    ----------
    rows : Iterable[Row]
        Of any workloads and settings.

    Returns
    -------
    dict[Place, Comparison]
        By `place`; a place without our time, or without a baseline, is left out.
    """
    times: dict[Place, dict[str, float]] = {}
    for row in rows:
        if row.timing.microseconds is not None:
            times.setdefault(place(row), {})[row.planned.job.variant] = row.timing.microseconds
    found = {}
    for where, measured in times.items():
        own = {name: measured.pop(name) for name in OWN if name in measured}
        if own and measured:
            variant = OURS if OURS in own else fastest(own)
            baseline = fastest(measured)
            found[where] = Comparison(*where, own[variant], measured[baseline], baseline, variant)
    return found


def fastest(times: Mapping[str, float]) -> str:
    """Name of the least time."""
    return min(times, key=lambda name: times[name])


def mean_speedup(found: Iterable[Comparison]) -> float | None:
    """Geometric mean of the speed-ups; None of nothing."""
    logarithms = [math.log(each.speedup) for each in found]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def document(rows: Sequence[Row], environment: dict[str, Any]) -> dict[str, Any]:
    """Everything that a run found.

    Parameters
    ----------
    rows : Sequence[Row]
        Outcomes so far.
    environment : dict[str, Any]
        From `crossfuse.bench.environment.record`.

    Returns
    -------
    dict[str, Any]
        What ``--json`` prints and ``--out`` writes.
    """
    return {
        "ok": not any(row.timing.fault for row in rows),
        "environment": environment,
        "method": {"variants": VARIANTS, "l2": L2, "protocols": PROTOCOLS},
        "comparisons": [each.to_json() for each in compare(rows).values()],
        "rows": [row.to_json() for row in rows],
    }
