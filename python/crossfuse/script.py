"""What programs of subcommands share that are no part of the ``crossfuse`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossfuse.errors import RefusedError
from crossfuse.files import write_atomically


def program(description: str | None) -> tuple[argparse.ArgumentParser, Any]:
    """Make a parser of subcommands.

    Parameters
    ----------
    description : str | None
        What the program does; lines stay as they are.

    Returns
    -------
    tuple
        The parser, and what parsers of subcommands are added to. Each needs a default ``do``: a
        function of the options.
    """
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=plain)
    return parser, parser.add_subparsers(dest="command", required=True)


def run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Do what a command line asks for.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        From `program`.
    arguments : Sequence[str] | None
        Those of this process, if None.

    Returns
    -------
    int
        Exit code: 0, or 2 where it was refused; standard error says why.
    """
    given = parser.parse_args(arguments)
    try:
        given.do(given)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def write_json(path: Path, value: Any) -> None:
    """Write a value for programs to read, indented by one; missing directories are made."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())
