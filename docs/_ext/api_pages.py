"""The reference, one page a package, from the names that are public."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path

from links import write_if_new
from public_names import INTERNAL, LISTED, PRIMITIVES, RULES, Name, modules_below, public_names

_TITLES = {
    **LISTED,
    PRIMITIVES: "Schedule primitives",
    RULES: "Schedule rules",
    "crossfuse.cascade": "Cascades",
    "crossfuse.errors": "Errors",
    "crossfuse.hardware": "Devices",
    "crossfuse.meta_schedule": "Tuning",
    "crossfuse.planner": "The planner",
}


def write_api(folder: Path) -> None:
    """Write the pages of the reference and their index.

    Parameters
    ----------
    folder : Path
        ``docs/generated/api``.
    """
    pages = []
    for package, names in groupby(public_names(), key=lambda each: each.package):
        pages.append(package)
        write_if_new(folder / f"{package}.md", _page(package, list(names)))
    inner = []
    for package in INTERNAL:
        inner.append(f"{package}.modules")
        write_if_new(folder / f"{package}.modules.md", _modules(package))
    write_if_new(folder / "index.md", _index(pages, inner))


def _index(pages: list[str], inner: list[str]) -> str:
    return "\n".join(
        [
            "# API",
            "",
            "Public names, from their docstrings. Shapes are in elements, sizes in bytes and times",
            "in microseconds where nothing else is said.",
            "",
            *_toctree(pages),
            "## Modules",
            "",
            "Every module of the packages that list no names, for those who change them. What is",
            "not above may change without notice.",
            "",
            *_toctree(inner),
        ]
    )


def _toctree(pages: list[str]) -> list[str]:
    return ["```{toctree}", ":maxdepth: 1", "", *pages, "```", ""]


def _page(package: str, names: list[Name]) -> str:
    said = (inspect.getdoc(import_module(package)) or "").split("\n\n")[0]
    lines = [f"# {_TITLES[package]}", "", f"`{package}`: {' '.join(said.split())}", ""]
    if package == PRIMITIVES:
        lines += ["Each is a method of `tvm.s_tir.Schedule`: `sch.cluster_bind(loop)`.", ""]
    lines += ["```{eval-rst}"]
    for each in names:
        lines += [*_directive(each), ""]
    return "\n".join([*lines, "```", ""])


def _directive(name: Name) -> Iterator[str]:
    if inspect.isclass(name.value):
        yield f".. autoclass:: {name.path}"
        yield "   :members:"
        if issubclass(name.value, Exception):
            yield "   :show-inheritance:"
    elif callable(name.value) and hasattr(name.value, "__code__"):
        yield f".. autofunction:: {name.path}"
    else:
        yield f".. autodata:: {name.path}"


def _modules(package: str) -> str:
    lines = [f"# Modules of {package}", "", "```{eval-rst}"]
    for module in modules_below(package):
        lines += [f".. automodule:: {module}", "   :members:", "   :no-index-entry:", ""]
    return "\n".join([*lines, "```", ""])
