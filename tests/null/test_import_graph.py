"""Packages import one another one way: data flows down, and a reader may follow it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from syntax_trees import trees

PACKAGE = Path(__file__).parents[2] / "python" / "crossfuse"
#: TVM's and torch's ways in: what they register loads packages when that is used, so these may ask
#: for them.
ENTRIES = {"_autoload", "_discovery"}


def home_of(path: str) -> str:
    """The package or file right below `crossfuse` that has a module; empty of what has none."""
    parts = path.split(".")[1:]
    if not parts or not ((PACKAGE / parts[0]).is_dir() or (PACKAGE / f"{parts[0]}.py").is_file()):
        return ""
    return parts[0]


def imported(tree: ast.Module) -> Iterator[str]:
    """What a module imports of ours, when it is loaded and later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "crossfuse":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("crossfuse."))


def test_packages_import_one_another_one_way() -> None:
    """What two packages share wants a place below both: `blocks`, or a file such as `markers`."""
    needed: dict[str, set[str]] = {}
    for path, tree in trees(PACKAGE):
        home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        needed.setdefault(home, set()).update({home_of(each) for each in imported(tree)})
    for each in ENTRIES:
        needed.pop(each)
    try:
        TopologicalSorter({a: b - {"", a} - ENTRIES for a, b in needed.items()}).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' <- '.join(error.args[1])}") from None


def bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module binds, but for those of overloads."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        if "overload" not in map(ast.unparse, node.decorator_list):
            yield node.name
    elif isinstance(node, ast.Assign):
        names = (each for target in node.targets for each in ast.walk(target))
        yield from (e.id for e in names if isinstance(e, ast.Name) and isinstance(e.ctx, ast.Store))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def test_a_module_binds_a_name_once() -> None:
    """What is bound again, as where two files were joined, is another thing to all that use it."""
    twice = [
        f"{path.name}: {name}"
        for path, tree in trees(PACKAGE)
        for name, times in Counter(name for node in tree.body for name in bound(node)).items()
        if times > 1
    ]
    assert not twice
