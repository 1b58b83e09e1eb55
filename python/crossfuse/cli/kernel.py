"""Options and rendering that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossfuse.cli.output import LONGEST, MOST, finite, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from crossfuse.compiler.checks import Verdict
    from crossfuse.compiler.report import KernelReport

Workload = Annotated[
    str,
    typer.Argument(
        help="A packaged id such as S8, or a spec such as "
        "gated_ffn:M=16,K=256,N=512,L=256,dtype=bfloat16,act=silu."
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "--device",
        help="nvidia-h100 or nvidia-h200.",
        show_default="the GPU of this machine, else nvidia-h100",
    ),
]
Rule = Annotated[
    str,
    typer.Option(
        help="Of chains: tensor (kernels with TMA and wgmma), threads (ordinary instructions: "
        "general, and slow), or auto (the first, and the second of what has none)."
    ),
]
Placement = Annotated[
    str,
    typer.Option(
        help="Where the intermediate of a chain lives: registers (of the CTA that makes it), dsm "
        "(shared memory of a cluster), l2 (one persistent kernel), global (one kernel for each "
        "product), or auto (what `crossfuse explain` chooses, place and tiles). Of a cascade, "
        "where states merge: registers, dsm, global (by a second kernel), or auto."
    ),
]
Cluster = Annotated[
    int,
    typer.Option(min=0, max=16, help="CTAs in a cluster of a chain's kernel, 1 to 16; 0: choose."),
]
Constant = Annotated[
    bool | None,
    typer.Option(
        "--constant-weights/--written-weights",
        help="Whether no kernel writes the weights shortly before, so that they are loaded early.",
        show_default="constant",
    ),
]

Output = Annotated[Path, typer.Option("--output", "-o", help="Directory to write to.")]
OUTPUT = Path("crossfuse-out")
Repeats = Annotated[int, typer.Option(min=1, max=MOST, help="Of which the median is taken.")]
Timeout = Annotated[
    float, typer.Option(min=1, max=LONGEST, callback=finite, help="Seconds for one measurement.")
]
Budget = Annotated[
    float,
    typer.Option(
        min=0,
        max=LONGEST,
        callback=finite,
        help="Seconds after which none is begun; 0 for no limit.",
    ),
]

_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}


def render(report: KernelReport, *, schedule: bool = True) -> list[RenderableType]:
    """A report as rich renderables, in reading order."""
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [Text(report.workload, style="bold")]
    if schedule:
        parts.append(Panel(Text(report.schedule), title="schedule", title_align="left"))
    parts.append(Panel(Text(report.layout), title="who holds what", title_align="left"))
    if report.choice:
        parts.append(Text(report.choice))
    parts += [_launches(report), _shared(report)]
    if report.verdicts:
        parts.append(verdicts(report.verdicts))
    if report.timing is not None:
        parts.append(Text(_timing(report)))
    parts.append(Text(f"library  {report.shared_object}\nmanifest {report.manifest}"))
    return parts


def verdicts(found: tuple[Verdict, ...]) -> Table:
    """Outcomes of checks as a table."""
    from rich.text import Text

    rows = (
        (
            each.name,
            Text(each.status, style=_STYLES[each.status]),
            each.detail,
            f"{each.seconds:.1f}",
        )
        for each in found
    )
    return table("checks", ("check", "verdict", "detail", "seconds"), rows)


def _launches(report: KernelReport) -> Table:
    headings = ("kernel", "grid", "cluster", "threads", "registers", "spilled", "barriers")
    rows = []
    for launch, usage in zip(report.launches, report.resources, strict=True):
        spilled = usage["spill_store_bytes"] + usage["spill_load_bytes"]
        shapes = (" x ".join(map(str, launch[key])) for key in ("grid", "cluster", "block"))
        numbers = (str(usage["registers"]), f"{spilled} B", str(report.barriers))
        rows.append((launch["symbol"], *shapes, *numbers))
    return table(f"launches on {report.target}", headings, rows)


def _shared(report: KernelReport) -> Table:
    total, limit = report.shared_total, report.shared_limit
    title = f"shared memory of a CTA: {total} of {limit} bytes ({100 * total / limit:.0f} %)"
    rows = (
        (each["name"], f"{each['offset']}", f"{each['size']}", f"{each['first']} to {each['last']}")
        for each in report.shared_memory
    )
    return table(title, ("buffer", "offset", "bytes", "barrier intervals"), rows)


def _timing(report: KernelReport) -> str:
    timing = report.timing
    assert timing is not None
    text = f"{timing.microseconds:.1f} us on {timing.device}"
    if timing.baseline is not None:
        text += f", torch eager {timing.baseline:.1f} us"
    return f"{text} (median of {timing.runs}, cold L2, CUDA graph)"
