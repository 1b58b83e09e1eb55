"""What stands in the files of a package, as syntax trees."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path


def trees(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Parse all files below a folder, in the order of their paths.

    A tree is a hundred thousand objects and none of them is garbage, but Python looks again and
    again: without that a package is read in a third of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for path in sorted(root.rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if collects:
            gc.enable()
