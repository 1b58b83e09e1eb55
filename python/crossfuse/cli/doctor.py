"""``crossfuse doctor``: what this machine offers and what to install."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from crossfuse.cli.output import JsonFlag, print_json, print_rich

if TYPE_CHECKING:
    from rich.table import Table

    from crossfuse.doctor import Report

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(as_json: JsonFlag = False) -> None:
    """Report what this machine offers, and what to install; exit code 1 if a check fails."""
    from crossfuse.doctor import collect

    report = collect()
    if as_json:
        print_json(report.to_json())
    else:
        print_rich(_table(report))
    if not report.ok:
        raise typer.Exit(1)


def _table(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"crossfuse {report.version}", title_justify="left")
    for heading in ("check", "status", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in report.checks:
        status = Text(check.status, style=_STYLES[check.status])
        # Text, because rich reads the brackets of a plain string as markup.
        table.add_row(check.name, status, Text(check.found), Text(check.instead))
    return table
