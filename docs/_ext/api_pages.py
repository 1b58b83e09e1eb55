"""The reference, one page a package, from the names that are public."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path

from links import write_if_new
from public_names import LISTED, PRIMITIVES, RULES, Name, public_names

_TITLES = {
    **LISTED,
    PRIMITIVES: "Schedule primitives",
    RULES: "Schedule rules",
    "crossfuse.cascade": "Cascades",
    "crossfuse.errors": "Errors",
    "crossfuse.hardware": "Devices",
    "crossfuse.measure": "Times",
    "crossfuse.meta_schedule": "Tuning",
    "crossfuse.planner": "The planner",
}


def write_api(folder: Path, summaries: Mapping[str, str]) -> None:
    """Write the pages of the reference and their index.

    Parameters
    ----------
    folder : Path
        ``docs/generated/api``.
    summaries : Mapping[str, str]
        What each module of the package is for.
    """
    pages = []
    # What several packages list has one description, under the first of its paths.
    first: dict[int, str] = {}
    for package, names in groupby(public_names(), key=lambda each: each.package):
        pages.append(package)
        homes = [(each, first.setdefault(id(each.value), each.path)) for each in names]
        write_if_new(folder / f"{package}.md", _page(package, homes))
    write_if_new(folder / "modules.md", _modules(summaries))
    write_if_new(folder / "index.md", _index([*pages, "modules"]))


def _index(pages: list[str]) -> str:
    said = (
        "Public names, from their docstrings. Shapes are in elements, sizes in bytes and times in "
        "microseconds where nothing else is said. What is not on these pages may change without "
        "notice; [Modules](modules.md) says what is where."
    )
    return "\n".join(["# API", "", said, "", "```{toctree}", ":maxdepth: 1", "", *pages, "```", ""])


def _page(package: str, names: Sequence[tuple[Name, str]]) -> str:
    said = (inspect.getdoc(import_module(package)) or "").split("\n\n")[0]
    lines = [f"# {_TITLES[package]}", "", f"`{package}`: {' '.join(said.split())}", ""]
    if package == PRIMITIVES:
        lines += ["Each is a method of `tvm.s_tir.Schedule`: `sch.cluster_bind(loop)`.", ""]
    lines += ["```{eval-rst}"]
    for each, home in names:
        if each.path == home:
            lines += [*_directive(each), ""]
        else:
            lines += [f"``{each.path}`` is :py:obj:`{home}`.", ""]
    return "\n".join([*lines, "```", ""])


def _directive(name: Name) -> Iterator[str]:
    if inspect.isclass(name.value):
        yield f".. autoclass:: {name.path}"
        yield "   :members:"
        if _inherits(name.value):
            yield "   :inherited-members:"
        if issubclass(name.value, Exception):
            yield "   :show-inheritance:"
    elif callable(name.value) and hasattr(name.value, "__code__"):
        yield f".. autofunction:: {name.path}"
    else:
        yield f".. autodata:: {name.path}"


def _inherits(value: type) -> bool:
    """Whether a class has public members of a base of ours that no page describes."""
    described = {id(each.value) for each in public_names()}
    return any(
        base.__module__.startswith("crossfuse.")
        and id(base) not in described
        and any(not member.startswith("_") for member in vars(base))
        for base in value.__mro__[1:]
    )


def _modules(summaries: Mapping[str, str]) -> str:
    """What each module is for, folder by folder."""
    lines = ["# Modules", "", "For those who change the project: what is where.", ""]
    known = sorted(each for each in summaries if summaries[each])
    folders = {".".join(each.split(".")[:2]) for each in known if each.count(".") > 1}

    def folder_of(module: str) -> str:
        """The folder below the package, or the package for its own files."""
        folder = ".".join(module.split(".")[:2])
        return folder if folder in folders else module.split(".")[0]

    for folder, modules in groupby(sorted(known, key=folder_of), key=folder_of):
        lines += [f"## `{folder}`", ""]
        lines += [f"- `{each}`: {_escaped(summaries[each])}" for each in modules]
        lines.append("")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Prose of a docstring as Markdown."""
    return text.replace("``", "`").replace("*", "\\*").replace("<", "\\<").replace("[", "\\[")
