"""Table of memory traffic, for a person to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossfuse.bench.job import Counters, Row

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_HEADINGS = (
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
_CAPTION = (
    "read, written: between memory and L2 cache, of one computation; over compulsory: both over "
    "the bytes of inputs and output; us apart: kernels one after another under Nsight Compute"
)


def traffic(rows: Sequence[Row]) -> list[RenderableType]:
    """A table of what the counters read, and each reason for a gap in it once.

    Empty where no counters were asked for.
    """
    from rich.text import Text

    # Rows of several protocols share their counters.
    chosen = {(*_place(row), row.planned.job.l2): row for row in rows if row.counters is not None}
    if not chosen:
        return []
    gaps = {
        f"counters {each.status}: {each.message}": None
        for row in chosen.values()
        if (each := row.counters) is not None and each.message
    }
    return [_table(list(chosen.values())), *map(Text, gaps)]


def _table(rows: Sequence[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="memory traffic", title_justify="left", caption=_CAPTION)
    table.caption_justify = "left"
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in rows:
        if row.counters is not None:
            line = (*map(str, _place(row)), row.planned.job.l2, *_numbers(row, row.counters))
            table.add_row(*map(Text, line))
    return table


def _place(row: Row) -> tuple[str, int, str]:
    return row.planned.label, row.planned.rows, row.planned.job.variant


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
