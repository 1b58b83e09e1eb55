"""Compares our kernel with the fastest baseline of the same run, and documents the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crossfuse.bench.job import L2, OURS, OWN, PROTOCOLS, VARIANTS, Row


@dataclass(frozen=True)
class Comparison:
    """Our kernel and the fastest baseline of one workload at one setting; times in microseconds."""

    #: Its label, without its rows.
    workload: str
    #: Rows.
    M: int
    l2: str
    protocol: str
    ours: float
    #: Of the fastest baseline.
    best: float
    #: The name of that baseline.
    baseline: str
    #: Which kernel of ours: ``ours`` where it has a time, else the fastest of the placements.
    variant: str = OURS

    @property
    def speedup(self) -> float:
        """Time of the baseline over ours: below 1 where ours is slower."""
        return self.best / self.ours

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write."""
        return asdict(self) | {"speedup": self.speedup}


Place = tuple[str, int, str, str]


def place(row: Row) -> Place:
    """Label, rows, cache and protocol: what rows have in common that are compared."""
    job = row.planned.job
    return row.planned.label, row.planned.rows, job.l2, job.protocol


def compare(rows: Iterable[Row]) -> dict[Place, Comparison]:
    """Find the fastest baseline wherever a kernel of ours has a time.

    Kernels of ours are no baselines of each other. The one that is compared is what a user gets by
    default, not the best placement found afterwards. A place without our time, or without a
    baseline, is left out.
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
    """Geometric mean of the speed-ups; None where there are none."""
    logarithms = [math.log(each.speedup) for each in found]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def document(rows: Sequence[Row], environment: dict[str, Any]) -> dict[str, Any]:
    """The document of a run so far, which ``--json`` prints and ``--out`` writes."""
    return {
        "ok": not any(row.timing.fault for row in rows),
        "environment": environment,
        "method": {"variants": VARIANTS, "l2": L2, "protocols": PROTOCOLS},
        "comparisons": [each.to_json() for each in compare(rows).values()],
        "rows": [row.to_json() for row in rows],
    }
