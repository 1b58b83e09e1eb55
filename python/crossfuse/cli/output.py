"""What every command shares: ``--json``, and how a refusal is shown."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
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
