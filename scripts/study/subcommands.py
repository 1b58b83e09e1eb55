"""Shared parts of programs with subcommands that are not in the ``crossfuse`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from crossfuse.errors import RefusedError


def program(description: str | None) -> tuple[argparse.ArgumentParser, Any]:
    """An argument parser for a program of subcommands, and what subcommands are added to.

    Line breaks of the description stay. Each subcommand sets a default ``do``: a function of the
    parsed options.
    """
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=plain)
    return parser, parser.add_subparsers(dest="command", required=True)


def run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names; gives the exit code.

    It is 0, or 2 where the command was refused, with the reason on standard error.
    """
    given = parser.parse_args(arguments)
    try:
        given.do(given)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
