"""What commands share: options, ``--json``, tables, and how a refusal is shown."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from crossfuse.errors import RefusedError
from crossfuse.files import file_refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from crossfuse.compiler.checks import Verdict
    from crossfuse.compiler.report import KernelReport

REFUSED_EXIT_CODE = 2
_JSON = "crossfuse.json"
#: Of numbers of things, and of seconds: what C and the system's clocks take.
MOST, LONGEST = 2**31 - 1, 1e7


def finite(value: float) -> float:
    """Refuse an infinite number or nan as an option: nan passes every comparison with a limit."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number of seconds.")
    return value


def _remember(context: typer.Context, asked: bool) -> bool:
    context.meta[_JSON] = asked
    return asked


JsonFlag = Annotated[
    bool,
    typer.Option(
        "--json",
        # Eager, so that a refusal of another option is already printed as JSON.
        is_eager=True,
        callback=_remember,
        help="Print JSON on standard output.",
    ),
]
"""Type of a command's ``as_json`` parameter; its default is False."""


class RefusingGroup(TyperGroup):
    """Group of commands in which a refusal is an answer and not a crash.

    A `RefusedError` out of any command is printed in red on standard error, and with ``--json``
    also as ``{"refused": {...}}`` on standard output; the exit code is 2. So is a file that cannot
    be read or written, but for a pipe that nobody reads any more. Any other exception keeps its
    traceback and Python's exit code 1.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command of a command line; where it is refused, exit with code 2."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
            raise
        except (RefusedError, OSError) as raised:
            error = file_refused(raised, "a file") if isinstance(raised, OSError) else raised
            if ctx.meta.get(_JSON, False):
                print_json({"refused": asdict(error.refusal)})
            print_error(str(error))
            raise typer.Exit(REFUSED_EXIT_CODE) from raised


def show(as_json: bool, value: Any, *renderables: RenderableType) -> None:
    """Print what a command found: a value for a script, or the same for a person."""
    if as_json:
        print_json(value)
    else:
        print_rich(*renderables)


def table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> Table:
    """Build a table under its title, whose texts are not read as markup."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*(Text(each) if isinstance(each, str) else each for each in row))
    return made


def print_json(value: Any) -> None:
    """Print a value for a script to read, on standard output."""
    typer.echo(json.dumps(value, indent=2))


def print_rich(*renderables: RenderableType) -> None:
    """Print for a person, one below the other, in colour where standard output is a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    for renderable in renderables:
        console.print(renderable)


def print_error(message: str) -> None:
    """Print one red paragraph on standard error, unbroken so that it can be searched for."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)


# Options and rendering that several commands share.


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
