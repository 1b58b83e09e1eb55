"""The ``crossfuse`` command: heavy imports inside the commands.

Exit codes: 0 done; 1 a check failed or the program broke (with a traceback); 2 refused, or called
with wrong options.
"""

from __future__ import annotations

from typing import Annotated

import typer

import crossfuse
from crossfuse._discovery import without_torch
from crossfuse.cli.bench import app as bundle
from crossfuse.cli.bench import bench, tune
from crossfuse.cli.kernels import compile_workload, demo, emulate, explain, timeline, view
from crossfuse.cli.machine import app as cache
from crossfuse.cli.machine import calibrate, doctor
from crossfuse.cli.output import RefusingGroup

app = typer.Typer(
    name="crossfuse",
    cls=RefusingGroup,
    help="Fuse chains of operators across the streaming multiprocessors of a Hopper GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"crossfuse {crossfuse.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


app.command("doctor")(doctor)
app.command("explain")(explain)
app.command("compile")(compile_workload)
app.command("emulate")(emulate)
app.command("demo")(demo)
app.command("bench")(bench)
app.command("timeline")(timeline)
app.command("view")(view)
app.command("calibrate")(calibrate)
app.command("tune")(tune)
app.add_typer(bundle, name="bundle")
app.add_typer(cache, name="cache")


def main() -> None:
    """Run the command line with the arguments of this process; ends it with an exit code."""
    without_torch()
    app(prog_name="crossfuse")
