"""``crossfuse doctor``: what this machine offers and what to install."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from crossfuse.cli.output import JsonFlag, show, table

if TYPE_CHECKING:
    from rich.table import Table

    from crossfuse.doctor import Report

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(as_json: JsonFlag = False) -> None:
    """Report what this machine offers, and what to install; exit code 1 if a check fails."""
    from crossfuse.doctor import collect

    report = collect()
    show(as_json, report.to_json(), _table(report))
    if not report.ok:
        raise typer.Exit(1)


def _table(report: Report) -> Table:
    from rich.text import Text

    rows = (
        (each.name, Text(each.status, style=_STYLES[each.status]), each.found, each.instead)
        for each in report.checks
    )
    return table(f"crossfuse {report.version}", ("check", "status", "found", "what to do"), rows)
