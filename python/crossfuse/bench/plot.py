"""Draws time over roofline of every shape."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from crossfuse.bench.job import OWN, PROTOCOLS, Row
from crossfuse.errors import EnvironmentRefused, refuse

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
