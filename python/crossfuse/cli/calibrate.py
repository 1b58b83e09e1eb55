"""``crossfuse calibrate``: measures the GPU of this machine, and stores its record."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from crossfuse.cli.output import JsonFlag, print_json


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="File to write instead of the record that plans are made with."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what the planner counts with on an idle GPU, a minute; later plans are made with it.

    The record is found by the name of the GPU. It is not one of kernels: what is fitted to those
    stays that of the nearest GPU that comes with the package.
    """
    from crossfuse.bench.calibrate import calibrate as measure
    from crossfuse.bench.environment import require_hopper
    from crossfuse.files import write_atomically
    from crossfuse.hardware import device, record_path

    require_hopper()
    name, start = device().name, time.perf_counter()

    def note(line: str) -> None:
        typer.echo(f"{time.perf_counter() - start:6.1f} s  {line}", err=True)

    found = measure(name, _machine, note=note)
    path = out or record_path(name)
    write_atomically(path, found.text().encode())
    if as_json:
        print_json({"record": str(path), "device": name})
    else:
        typer.echo(f"{path}: the record of {name}")


def _machine() -> dict[str, Any]:
    """What the numbers depend on in this machine; paths on it are left out."""
    from crossfuse.bench.environment import record

    found = record()
    cuda = str(found["versions"].get("nvcc", "unknown")).split()[0]
    kept = {key: found[key] for key in ("crossfuse", "commit", "date")}
    return {"gpu": found["gpu"], "cuda": cuda, **kept}
