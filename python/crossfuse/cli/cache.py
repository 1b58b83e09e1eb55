"""``crossfuse cache``: lists and removes what is cached between runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.output import MOST, JsonFlag, print_json

if TYPE_CHECKING:
    from crossfuse.cache import Kept

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
