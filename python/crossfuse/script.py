"""What programs of subcommands share that are no part of the ``crossfuse`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from crossfuse.errors import RefusedError


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
