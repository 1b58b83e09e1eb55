"""``crossfuse timeline``: when the CTAs of a kernel reach each of its steps, on a GPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from crossfuse.cli.kernel import Placement, Target, Workload
from crossfuse.cli.output import MOST, JsonFlag, show, table

if TYPE_CHECKING:
    from rich.table import Table

    from crossfuse.bench.timeline import KernelTimeline


def timeline(
    workload: Workload,
    m: Annotated[
        int, typer.Option("--m", min=0, max=MOST, help="Rows; 0 takes those of the workload.")
    ] = 0,
    target: Target = None,
    placement: Placement = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Show when the CTAs of our kernels begin, multiply, exchange and store: where time goes."""
    from crossfuse.bench.timeline import measure_timeline
    from crossfuse.workload.suites import resolve

    spec = resolve(workload)
    spec = replace(spec, M=m) if m else spec
    found = measure_timeline(spec, target, placement)
    value = {"workload": str(spec), "kernels": [asdict(each) for each in found]}
    show(as_json, value, str(spec), *map(_table, found))


def _table(kernel: KernelTimeline) -> Table:
    gap = "" if kernel.gap is None else f", {kernel.gap:.1f} us after the kernel before"
    headings = ("event", "first CTA", "median", "last CTA", "CTAs")
    rows = (
        (
            each.name,
            *(f"{time:.1f}" for time in (each.first, each.median, each.last)),
            f"{each.ctas}",
        )
        for each in kernel.events
    )
    return table(f"{kernel.kernel}{gap}; microseconds", headings, rows)
