"""``crossfuse view``: a page for a browser."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from crossfuse.cli.kernel import Target
from crossfuse.cli.output import JsonFlag, show


def view(
    source: Annotated[
        str,
        typer.Argument(
            help="A packaged id or spec, or a file: a plan (crossfuse explain --json), a candidate "
            "with tiles or a trace, a scheduled module as TVM's JSON or TVMScript (.py)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Page to write.")] = Path("view.html"),
    target: Target = None,
    workload: Annotated[
        str, typer.Option(help="Of the plan of a chain: the spec that it is of.")
    ] = "",
    measured: Annotated[
        Path | None, typer.Option(help="What crossfuse timeline --json printed on a GPU.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a page that shows a plan, its cluster, when what happens, and CUDA by schedule line."""
    from crossfuse.files import write_atomically
    from crossfuse.view.write import view_page

    kernels = _measured(measured) if measured else ()
    text = view_page(source, target, workload=workload, measured=kernels)
    write_atomically(out, text.encode())
    found = {"page": str(out), "bytes": len(text.encode())}
    show(as_json, found, f"{out}: open it in a browser; it needs no network")


def _measured(path: Path) -> Any:
    from crossfuse.files import read_text
    from crossfuse.schema import Damaged, parse, typed
    from crossfuse.view.write import measured_refused

    try:
        return typed(Mapping[str, Any], parse(read_text(path))).get("kernels")
    except Damaged as error:
        raise measured_refused(str(path), error) from None
