"""The page of all error texts, grouped by what the user was doing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from refusals.entries import TASKS, Entry

_HEAD = """# All error texts

<!-- Written by docs/_ext/refusals from the sources of the package. -->

Each refusal reads `RULE: WHERE: found FOUND; limit: LIMIT. Instead: INSTEAD.` It is a
`crossfuse.errors.RefusedError`, whose `refusal` has the five facts. The command line prints it in
one paragraph, or as JSON with `--json`, and ends with exit code 2.

Look for the rule, the word in front of the first colon. What depends on the case stands in angle
brackets; `|` stands between texts of which one is shown. Entries that need more words than a line
are in [Troubleshooting](../troubleshooting.md).
"""


def write_page(entries: Sequence[Entry], summaries: Mapping[str, str]) -> str:
    """The page as Markdown.

    Parameters
    ----------
    entries : Sequence[Entry]
        What `refusals.find.find_entries` found.
    summaries : Mapping[str, str]
        What each module is for.
    """
    order = list(TASKS)
    ranked = sorted(entries, key=lambda each: (order.index(each.task), each.rules))
    parts = [_HEAD]
    for task, group in groupby(ranked, key=lambda each: each.task):
        parts.append(f"## {task}\n")
        for rules, same in groupby(group, key=lambda each: each.rules):
            parts.append(_rule(rules, list(same), summaries))
    return "\n".join(parts)


def _rule(rules: tuple[str, ...], entries: list[Entry], summaries: Mapping[str, str]) -> str:
    title = " or ".join(f"`{each}`" for each in rules)
    lines = [f"### {title}\n"]
    modules = dict.fromkeys(each.module for each in entries)
    for module in modules:
        if summaries.get(module):
            lines.append(f"`{module}`: {summaries[module]}\n")
    for each in entries:
        lines += [
            f"{_code(each.where)} ({each.family})",
            f": found {_code(each.found)}",
            f": allowed: {_code(each.limit)}",
            f": **What to do:** {_code(each.instead)}\n",
        ]
    return "\n".join(lines)


def _code(text: str) -> str:
    """A text as code, whatever it holds; a pipe and a bracket mean nothing there."""
    flat = " ".join(text.split()) or "<text>"
    fence = "``" if "`" in flat else "`"
    pad = " " if "`" in flat else ""
    return f"{fence}{pad}{flat}{pad}{fence}"
