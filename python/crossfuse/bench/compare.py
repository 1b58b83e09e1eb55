"""Compares our kernel with the fastest baseline of the same run, and documents the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from crossfuse.bench.job import L2, OURS, OWN, PROTOCOLS, VARIANTS, Row
from crossfuse.errors import EnvironmentRefused, refuse


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


# Draws time over roofline of every shape.

_INCHES_A_SHAPE = 0.35
_MARKERS = "osD^vPX"


def require_matplotlib() -> None:
    """Refuse to plot without matplotlib, before anything is measured."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise refuse(
            EnvironmentRefused,
            "bench",
            "--plot",
            found="no matplotlib",
            limit="an installed matplotlib",
            instead="run `pip install matplotlib`, or leave --plot out",
        ) from error


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw time over roofline to a file, one panel for each cache state and protocol.

    Rows without a time leave a gap. The suffix of the path says the format; without matplotlib it
    is refused.
    """
    require_matplotlib()
    # A figure of its own needs neither a display nor pyplot's global state.
    figures: Any = import_module("matplotlib.figure")
    settings = list(dict.fromkeys((r.planned.job.l2, r.planned.job.protocol) for r in rows))
    shapes = list(dict.fromkeys((r.planned.label, r.planned.rows) for r in rows))
    size = (max(6.0, 2 + _INCHES_A_SHAPE * len(shapes)), 1 + 3.5 * max(1, len(settings)))
    figure = figures.Figure(figsize=size, layout="constrained")
    panels = figure.subplots(max(1, len(settings)), 1, squeeze=False)
    for axes, (l2, protocol) in zip(panels[:, 0], settings, strict=False):
        chosen = [
            row for row in rows if (row.planned.job.l2, row.planned.job.protocol) == (l2, protocol)
        ]
        _panel(axes, chosen, shapes)
        axes.set_title(f"{l2} L2, {PROTOCOLS[protocol]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, rows: Sequence[Row], shapes: Sequence[tuple[str, int]]) -> None:
    """One series for each variant over all shapes."""
    variants = list(dict.fromkeys(row.planned.job.variant for row in rows))
    for index, variant in enumerate(variants):
        series = {
            (row.planned.label, row.planned.rows): row.ratio
            for row in rows
            if row.planned.job.variant == variant and row.ratio is not None
        }
        places = [number for number, shape in enumerate(shapes) if shape in series]
        heights = [series[shapes[number]] for number in places]
        marker = _MARKERS[index % len(_MARKERS)]
        # Ours is drawn last: it is what the picture is looked at for.
        front = 3 if variant in OWN else 2
        axes.plot(places, heights, marker=marker, linestyle="none", label=variant, zorder=front)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("time over floor")
    axes.set_xticks(range(len(shapes)))
    axes.set_xticklabels([f"{label} M={rows}" for label, rows in shapes], rotation=90)
    axes.grid(True, axis="y", which="both", alpha=0.3)
    if variants:
        axes.legend()
