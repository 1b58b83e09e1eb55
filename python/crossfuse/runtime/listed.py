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

    `libraries` gives the hash of each library's manifest as the table has it. `refused` makes a
    refusal of the place, what was found, and what was expected. A missing manifest is left to
    `crossfuse.runtime.load`.
    """
    for each, digest in libraries.items():
        manifest = each.with_suffix(".json")
        try:
            found = sha256(read_bytes(manifest))
        except Damaged:
            continue
        if found != digest:
            raise refused(str(manifest), f"a file of hash {found}", f"{digest}, as in {table}")
