"""Tables of planned jobs and of outcomes, for a person to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from crossfuse.bench.compare import Comparison, compare, fastest, mean_speedup, place
from crossfuse.bench.job import L2, OURS, OWN, PROTOCOLS, Counters, Planned, Row
from crossfuse.bench.models import summary

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

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
    return Text(f"{row.timing.microseconds:.2f}{mark} {row.ratio:.2f}x")


def _verdict(found: Comparison | None) -> Text:
    from rich.text import Text

    if found is None:
        return Text("")
    style = "green" if found.speedup >= 1 else "red"
    own = "" if found.variant == OURS else f" ({found.variant})"
    return Text(f"{found.speedup:.2f}x {found.baseline}{own}", style=style)


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
