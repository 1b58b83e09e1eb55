"""Libraries that a table in their folder lists, each with the hash of its manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from crossfuse.errors import RefusedError
from crossfuse.files import read_bytes, sha256
from crossfuse.schema import Damaged


def check_listed(
    libraries: Mapping[Path, str], table: str, refused: Callable[[str, str, str], RefusedError]
) -> None:
    """Check that manifests are those that a table was written for, before anything is loaded.

    Parameters
    ----------
    libraries : Mapping[Path, str]
        Hashes of the manifests' files, as the table has them, by library.
    table : str
        The table's name.
    refused : Callable
        Makes a refusal of where something is wrong, what was found, and what had to be.

    Raises
    ------
    ArtefactRefused
        If one is another. One that is missing is named by `crossfuse.runtime.load`.
    """
    for each, digest in libraries.items():
        manifest = each.with_suffix(".json")
        try:
            found = sha256(read_bytes(manifest))
        except Damaged:
            continue
        if found != digest:
            raise refused(str(manifest), f"a file of hash {found}", f"{digest}, as in {table}")
