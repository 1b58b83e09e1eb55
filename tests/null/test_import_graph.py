"""Packages import one another one way, apart from circles that are known."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python" / "crossfuse"
#: Pairs of packages that need each other. A new one wants a place below both for what they share.
KNOWN = {
    # Schedules are made of plans, and a plan of rows asks how a rule reads its product.
    ("planner", "schedule"),
}


def package_of(path: str) -> str:
    """The folder of a module below `crossfuse`; empty of a module that lies in none."""
    parts = path.split(".")[1:]
    return parts[0] if parts and (PACKAGE / parts[0]).is_dir() else ""


def imported(tree: ast.Module) -> Iterator[str]:
    """What a module imports of ours, when it is loaded and later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "crossfuse":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("crossfuse."))


def test_packages_import_one_another_one_way() -> None:
    edges = set()
    for path in PACKAGE.rglob("*.py"):
        home = path.relative_to(PACKAGE).parts[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        there = {package_of(each) for each in imported(tree)} - {"", home}
        edges |= {(home, each) for each in there}
    both_ways = {(a, b) for a, b in edges if a < b and (b, a) in edges}
    assert both_ways == KNOWN
