"""Links from pages of source code back to the reference.

Sphinx writes one for each name as if the reference had all names of a file under the first path
that it has one under. Ours has `crossfuse.CheckFailed`, and `crossfuse.errors.LoweringRefused`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_BACK = re.compile(r'(<a class="viewcode-back" href=")[^"#]*#([^"]+)"')


def mend_back_links(body: str, documented: Mapping[str, str], link: Callable[[str], str]) -> str:
    """A page of source code with links that lead to names.

    Parameters
    ----------
    body : str
        HTML of the page.
    documented : Mapping[str, str]
        Page of each name of the reference, by its path.
    link : Callable[[str], str]
        Link from this page to another.

    Returns
    -------
    str
        The page; links to what the reference has nowhere are as they were.
    """

    def mended(found: re.Match[str]) -> str:
        path = _place(found[2], documented)
        return f'{found[1]}{link(documented[path])}#{path}"' if path else found[0]

    return _BACK.sub(mended, body)


def _place(path: str, documented: Mapping[str, str]) -> str:
    """The path under which the reference has a name; empty where it has it nowhere."""
    if path in documented:
        return path
    parts = path.split(".")
    for first in range(1, len(parts)):
        end = "." + ".".join(parts[first:])
        for each in documented:
            if each.endswith(end):
                return each
    return ""


def mend_page(app: Any, pagename: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """What Sphinx calls before it writes a page."""
    if not pagename.startswith("_modules/") or "body" not in context:
        return
    objects = app.env.domains.python_domain.objects
    documented = {path: each.docname for path, each in objects.items() if not each.aliased}
    context["body"] = mend_back_links(
        context["body"], documented, lambda page: app.builder.get_relative_uri(pagename, page)
    )
