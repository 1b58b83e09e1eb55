"""Links between files of the repository, as links between pages of the site.

A Markdown file links to another by its path, which works where the repository is browsed. Here
the same links lead to pages, wherever these are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

_LINK = re.compile(r"(?<!!)\]\((?!https?:|mailto:|#)([^()\s#]+)(#[^()\s]*)?\)")

#: Files outside docs/ that are pages of the site, by path; the page is below docs/.
COPIES = {
    "README.md": "generated/readme.md",
    "CONTRIBUTING.md": "generated/contributing.md",
    "CHANGELOG.md": "generated/changelog.md",
    "benchmarks/README.md": "generated/recorded.md",
}


def rewrite_links(text: str, path: str, page: str, root: Path) -> str:
    """The text of a file with links to other pages of the site.

    Parameters
    ----------
    text : str
        Markdown, or a notebook in percent format.
    path : str
        The file's path in the repository.
    page : str
        The path below docs/ that it is read from.
    root : Path
        The repository.

    Returns
    -------
    str
        With the targets of links to pages changed; links to other files become their path.
    """

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if not (root / target).exists():
            return match[0]
        there = page_of(target)
        if there is None:
            return match[0]
        here = posixpath.dirname(page) or "."
        return f"]({posixpath.relpath(there, here)}{match[2] or ''})"

    return _LINK.sub(replaced, text)


def page_of(path: str, copies: Mapping[str, str] = COPIES) -> str | None:
    """Where below docs/ a file of the repository is a page; None where it is none."""
    if path in copies:
        return copies[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in ("tutorials", "tutorials/README.md"):
        return "generated/tutorials.md"
    if re.match(r"tutorials/\d.*\.(py|ipynb)$", path):
        return str(PurePosixPath(path).with_suffix(".py"))
    if path == "benchmarks":
        return "generated/benchmarks.md"
    return None


def write_copies(root: Path, docs: Path) -> None:
    """Write the pages that are files outside docs/, with their links changed.

    Parameters
    ----------
    root : Path
        The repository.
    docs : Path
        Sources of the site.
    """
    numbered = sorted((root / "tutorials").glob("[0-9]*.py"))
    tutorials = {f"tutorials/{each.name}": f"tutorials/{each.name}" for each in numbered}
    for stale in set((docs / "tutorials").glob("*.py")) - {docs / each for each in tutorials}:
        stale.unlink()
    for path, page in {**COPIES, **tutorials}.items():
        text = rewrite_links((root / path).read_text(encoding="utf-8"), path, page, root)
        write_if_new(docs / page, text)


def write_if_new(path: Path, text: str) -> None:
    """Write a file unless it holds the text already, so that Sphinx reads only what changed."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
