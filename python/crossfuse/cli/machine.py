"""Commands about this machine: ``crossfuse doctor``, ``calibrate`` and ``cache``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.output import MOST, JsonFlag, print_json, show, table

if TYPE_CHECKING:
    from rich.table import Table

    from crossfuse.cache import Kept
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


# ``crossfuse calibrate``: measures the GPU of this machine, and stores its record.


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

    Under torchrun (torchrun --nproc-per-node 2 --no-python crossfuse calibrate) it measures what
    GPUs do together: collectives, and copies.
    """
    # Other launchers set WORLD_SIZE too, in shells where nobody waits for this process.
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        return _calibrate_ranks(out, as_json)
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


def _calibrate_ranks(out: Path | None, as_json: bool) -> None:
    """Measure the GPUs of all processes; the first one writes the record."""
    import torch
    import torch.distributed as dist

    from crossfuse.bench.environment import require_hopper
    from crossfuse.bench.ranks import calibrate_ranks
    from crossfuse.files import write_atomically
    from crossfuse.hardware import device
    from crossfuse.planner.cost.rank_rates import rank_record_path

    require_hopper()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    first, start = dist.get_rank() == 0, time.perf_counter()

    def note(line: str) -> None:
        if first:
            typer.echo(f"{time.perf_counter() - start:6.1f} s  {line}", err=True)

    found = calibrate_ranks(device().name, _machine, note)
    path = out or rank_record_path(found.name, found.ranks)
    if first:
        write_atomically(path, found.text().encode())
        if as_json:
            print_json({"record": str(path), "device": found.name, "ranks": found.ranks})
        else:
            typer.echo(f"{path}: the record of {found.ranks} x {found.name}")
    dist.barrier()
    dist.destroy_process_group()


def _machine() -> dict[str, Any]:
    """What the numbers depend on in this machine; paths on it are left out."""
    from crossfuse.bench.environment import record

    found = record()
    cuda = str(found["versions"].get("nvcc", "unknown")).split()[0]
    kept = {key: found[key] for key in ("crossfuse", "commit", "date")}
    return {"gpu": found["gpu"], "cuda": cuda, **kept}


# ``crossfuse cache``: lists and removes what is cached between runs.


app = typer.Typer(help="Look at what is kept between runs, and remove it.", no_args_is_help=True)

_Kinds = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KIND]...", help="Such as cubin or library; all if none is named."),
]


@app.command("list")
def list_entries(kinds: _Kinds = None, as_json: JsonFlag = False) -> None:
    """List entries, the one that was used last first."""
    from datetime import datetime

    from crossfuse.cache import kept

    found = [each for each in reversed(kept()) if not kinds or each.kind in kinds]
    if as_json:
        print_json([_row(each) for each in found])
        return
    for each in found:
        used = datetime.fromtimestamp(each.used).isoformat(" ", "minutes")
        label = _label(each)
        typer.echo(f"{used}  {_size(each.size):>9}  {each.kind:<9} {each.path.stem[:12]}  {label}")


@app.command("info")
def info(as_json: JsonFlag = False) -> None:
    """Say where the cache is, how large it is, and how large it may be."""
    from crossfuse.cache import kept, limit_bytes, root

    kinds: dict[str, dict[str, int]] = {}
    for each in kept():
        row = kinds.setdefault(each.kind, {"entries": 0, "bytes": 0})
        row["entries"] += 1
        row["bytes"] += each.size
    total, limit = sum(row["bytes"] for row in kinds.values()), limit_bytes()
    if as_json:
        print_json({"folder": str(root()), "bytes": total, "limit": limit, "kinds": kinds})
        return
    typer.echo(f"{root()}: {_size(total)} of {_size(limit)}")
    for kind, row in sorted(kinds.items()):
        typer.echo(f"{kind:<9} {row['entries']:>6} entries {_size(row['bytes']):>9}")


@app.command("clear")
def clear_entries(kinds: _Kinds = None, as_json: JsonFlag = False) -> None:
    """Remove all entries, or those of some kinds."""
    from crossfuse.cache import clear

    _removed(clear(kinds or ()), as_json)


@app.command("prune")
def prune_entries(
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST, help="MiB that may stay; else CROSSFUSE_CACHE_LIMIT, or 2048."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove what was not used for longest until the rest is small enough."""
    from crossfuse.cache import prune

    _removed(prune(limit=None if limit is None else limit * 2**20), as_json)


def _removed(gone: tuple[Kept, ...], as_json: bool) -> None:
    size = sum(each.size for each in gone)
    if as_json:
        print_json({"removed": len(gone), "bytes": size})
    else:
        typer.echo(f"{len(gone)} entries removed, {_size(size)}")


def _row(each: Kept) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "key": each.path.stem,
        "bytes": each.size,
        "used": each.used,
        "label": _label(each),
    }


def _label(each: Kept) -> str:
    from crossfuse.cache import read_label

    return read_label(each.path)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
