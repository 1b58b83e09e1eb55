"""Kernel libraries in the cache: built once, copied to where they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crossfuse.cache import Entry, Shelf, shelf
from crossfuse.errors import ArtefactRefused
from crossfuse.runtime.artefact import Artefact
from crossfuse.runtime.files import write_atomically
from crossfuse.runtime.manifest import Manifest


def kept_library(key: str, path: Path) -> Artefact | None:
    """Copy a library out of the cache.

    Parameters
    ----------
    key : str
        What it was kept under, see `crossfuse.cache.keys.content_key`; its name is part of it.
    path : pathlib.Path
        The ``.so`` to write; the manifest goes beside it.

    Returns
    -------
    Artefact | None
        The library; None where the cache has none.
    """
    entry = _libraries().read(key)
    return None if entry is None else _written(entry, path)


def library_once(key: str, path: Path, build: Callable[[], Artefact]) -> Artefact:
    """Copy a library out of the cache, or build and keep it; one process builds, others wait.

    Parameters
    ----------
    key, path
        See `kept_library`.
    build : Callable
        Builds it, anywhere.

    Returns
    -------
    Artefact
        The library at `path`.

    Raises
    ------
    LoweringRefused, EnvironmentRefused
        What `build` raises.
    """

    def entry() -> Entry:
        made = build()
        about = {
            "label": f"{made.manifest.name} for {made.manifest.device}",
            "manifest": made.manifest_path.read_text(encoding="utf-8"),
        }
        return Entry(made.shared_object.read_bytes(), about)

    found = _written(_libraries().made(key, entry), path)
    # An entry that is whole and no library can only have been put there by hand.
    return build() if found is None else found


def _libraries() -> Shelf:
    return shelf("library")


def _written(entry: Entry, path: Path) -> Artefact | None:
    """The two files of an entry; None if it is none of a library."""
    text, beside = str(entry.about.get("manifest", "")), path.with_suffix(".json")
    try:
        manifest = Manifest.from_json(text, str(beside))
    except ArtefactRefused:
        return None
    write_atomically(path, entry.data, mode=0o755)
    write_atomically(beside, text.encode())
    return Artefact(path, beside, manifest)
