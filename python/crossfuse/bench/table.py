"""Tables of planned jobs, of outcomes and of comparisons, for a person to read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.bench.job import L2, OURS, OWN, PROTOCOLS, VARIANTS, Counters, Planned, Row
from crossfuse.bench.models import summary
from crossfuse.errors import EnvironmentRefused, refuse

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


# Our kernel beside the fastest baseline of the same run.


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


# Tables.

_HEADING = {"graph": "", "stream": "\nno graph"}
_CAPTION = (
    "ours over best: time of the fastest baseline over ours, below 1 where we lose; "
    "!: a baseline less accurate than the float64 rule allows"
)


def planned_table(planned: Sequence[Planned]) -> Table:
    """The jobs that would be measured, one line each, with their rooflines."""
    from rich.text import Text

    headings = ("workload", "M", "floor us", "variant", "L2", "protocol")
    table = _framed(f"{len(planned)} jobs", headings)
    for each in planned:
        job = each.job
        numbers = (str(each.rows), f"{each.floor:.2f}")
        table.add_row(Text(each.label), *numbers, job.variant, job.l2, job.protocol)
    return table


def report(rows: Sequence[Row]) -> list[RenderableType]:
    """The outcomes of a run.

    A table for each state of the cache, one of memory traffic where it was read, then a line for
    each row without a sound time.
    """
    from rich.text import Text

    states = dict.fromkeys(row.planned.job.l2 for row in rows)
    parts: list[RenderableType] = [
        _table(l2, [row for row in rows if row.planned.job.l2 == l2]) for l2 in states
    ]
    found = [Text(each) for each in summary(rows)]
    return [*parts, *_summary(rows), *found, *traffic(rows), *_notes(rows)]


def _framed(title: str, headings: Iterable[str], caption: str | None = None) -> Table:
    """A table without rows, its texts to the left."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _table(l2: str, rows: Sequence[Row]) -> Table:
    from rich.text import Text

    kinds = list(dict.fromkeys((r.planned.job.protocol, r.planned.job.variant) for r in rows))
    protocols = list(dict.fromkeys(protocol for protocol, _ in kinds))
    several = len({name for _, name in kinds if name in OWN}) > 1
    last = ("ours over best", *(("fastest of ours",) if several else ()))
    headings = ["workload", "M", "floor"]
    for protocol in protocols:
        names = (*(name for each, name in kinds if each == protocol), *last)
        headings += [each + _HEADING[protocol] for each in names]
    table = _framed(_title(l2, protocols), headings, _CAPTION)
    compared = compare(rows)
    cells = {(r.planned.label, r.planned.rows, *_kind(r)): r for r in rows}
    shapes = {(r.planned.label, r.planned.rows): r.planned.floor for r in rows}
    for (label, count), floor in shapes.items():
        line = [Text(label), Text(str(count)), Text(f"{floor:.2f}")]
        for protocol in protocols:
            own = [kind for kind in kinds if kind[0] == protocol]
            found = [cells.get((label, count, *kind)) for kind in own]
            line += map(_cell, found)
            line.append(_verdict(compared.get((label, count, l2, protocol))))
            line += [_fastest(found)] if several else []
        table.add_row(*line)
    return table


def _title(l2: str, protocols: Iterable[str]) -> str:
    how = "; ".join(PROTOCOLS[each] for each in protocols)
    return f"microseconds and time over floor; {l2} L2: {L2[l2]}; {how}"


def _kind(row: Row) -> tuple[str, str]:
    return row.planned.job.protocol, row.planned.job.variant


def _cell(row: Row | None) -> Text:
    """Time and its ratio to the roofline; marked where a baseline breaks the accuracy rule."""
    from rich.text import Text

    if row is None:
        return Text("")
    if row.timing.microseconds is None or row.ratio is None:
        return Text(row.timing.status, style="red" if row.timing.fault else "yellow")
    mark = "!" if row.timing.fault else ""
    return Text(f"{row.timing.microseconds:.2f}{mark}\n{row.ratio:.2f}x")


def _verdict(found: Comparison | None) -> Text:
    from rich.text import Text

    if found is None:
        return Text("")
    style = "green" if found.speedup >= 1 else "red"
    own = "" if found.variant == OURS else f" ({found.variant})"
    return Text(f"{found.speedup:.2f}x\n{found.baseline}{own}", style=style)


def _fastest(rows: Iterable[Row | None]) -> Text:
    """The placement of the intermediate that takes the least time."""
    from rich.text import Text

    times = {
        row.planned.job.variant: row.timing.microseconds
        for row in rows
        if row is not None
        and row.planned.job.variant in OWN
        and row.timing.microseconds is not None
    }
    return Text(fastest(times) if times else "")


def _summary(rows: Sequence[Row]) -> list[RenderableType]:
    """Mean speed-up and number of losses at each setting."""
    settings: dict[tuple[str, str], list[Comparison]] = {}
    for each in compare(rows).values():
        settings.setdefault((each.l2, each.protocol), []).append(each)
    lines: list[RenderableType] = []
    for (l2, protocol), found in settings.items():
        lost = sum(each.speedup < 1 for each in found)
        lines.append(
            f"{l2} L2, {protocol}: {OURS} over the best baseline {mean_speedup(found):.2f}x "
            f"(geometric mean of {len(found)}), slower on {lost}"
        )
    return lines


def _notes(rows: Iterable[Row]) -> list[RenderableType]:
    """A line for each row without a sound time, and for each kernel that ptxas slowed down."""
    from rich.text import Text

    notes: list[RenderableType] = []
    for row in rows:
        if row.timing.status != "ok":
            notes.append(Text(f"{_head(row)}: {row.timing.status}: {row.timing.message}"))
        if row.timing.complaints:
            notes.append(Text(f"{_head(row)}: {row.timing.complaints}", style="red"))
    return notes


def _head(row: Row) -> str:
    label, count, l2, protocol = place(row)
    return f"{label} M={count} {row.planned.job.variant} ({l2}, {protocol})"


def progress(row: Row, number: int, total: int) -> str:
    """One line of progress for an outcome that has just come in.

    Such as ``[3/40] S3 M=16 eager (cold, graph): 107.22 us, 1.19x floor, 9.1 s``.
    """
    head = f"[{number}/{total}] {_head(row)}"
    time = row.timing.microseconds
    found = row.timing.status
    if time is not None:
        found = f"{time:.2f} us, {row.ratio:.2f}x floor"
    moved = row.dram_over_compulsory
    if moved is not None:
        found += f", {moved:.2f}x compulsory bytes"
    return f"{head}: {found}, {row.timing.seconds:.1f} s"


# Memory traffic.

_TRAFFIC = (
    "workload",
    "M",
    "variant",
    "L2",
    "kernels",
    "read MB",
    "written MB",
    "over compulsory",
    "L2 to SMs MB",
    "us apart",
)
_TRAFFIC_CAPTION = (
    "read, written: between memory and L2 cache, of one computation; over compulsory: both over "
    "the bytes of inputs and output; us apart: kernels one after another under Nsight Compute"
)


def traffic(rows: Sequence[Row]) -> list[RenderableType]:
    """A table of what the counters read, and each reason for a gap in it once.

    Empty where no counters were asked for.
    """
    from rich.text import Text

    # Rows of several protocols share their counters.
    chosen = {
        (*place(row)[:3], row.planned.job.variant): row for row in rows if row.counters is not None
    }
    if not chosen:
        return []
    gaps = {
        f"counters {each.status}: {each.message}": None
        for row in chosen.values()
        if (each := row.counters) is not None and each.message
    }
    return [_traffic_table(list(chosen.values())), *map(Text, gaps)]


def _traffic_table(rows: Sequence[Row]) -> Table:
    from rich.text import Text

    table = _framed("memory traffic", _TRAFFIC, _TRAFFIC_CAPTION)
    for row in rows:
        if row.counters is not None:
            label, count, l2, _ = place(row)
            line = (label, str(count), row.planned.job.variant, l2, *_numbers(row, row.counters))
            table.add_row(*map(Text, line))
    return table


def _numbers(row: Row, found: Counters) -> tuple[str, ...]:
    ratio = row.dram_over_compulsory
    return (
        str(len(found.kernels)) if found.kernels else "",
        found.status if found.dram_read_bytes is None else _megabytes(found.dram_read_bytes),
        _megabytes(found.dram_write_bytes),
        "" if ratio is None else f"{ratio:.3f}x",
        _megabytes(found.l2_to_sm_bytes),
        "" if found.microseconds is None else f"{found.microseconds:.2f}",
    )


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.2f}"
