"""The reference has every public name, each described once."""

from __future__ import annotations

import re
from pathlib import Path

from api_pages import write_api
from public_names import LISTED, public_names


def test_every_public_name_is_described_once(tmp_path: Path) -> None:
    write_api(tmp_path, {"crossfuse.errors": "Every refusal."})
    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md")}
    described = [
        each
        for page in pages.values()
        for each in re.findall(r"^\.\. auto\w+:: (\S+)$", page, flags=re.MULTILINE)
    ]
    assert len(described) == len(set(described)) == len({id(n.value) for n in public_names()})
    for each in public_names():
        assert each.path in pages[each.package]
    assert set(LISTED) <= set(pages)
    assert "- `crossfuse.errors`: Every refusal." in pages["modules"]


def test_members_of_bases_that_are_not_public_are_described(tmp_path: Path) -> None:
    """``run`` of kernels and dispatches is that of `crossfuse.runtime.kernel.Runnable`.

    And ``text`` and ``svg`` of explanations are those of all reasons.
    """
    write_api(tmp_path, {})
    text = "\n".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md"))
    inheriting = re.findall(r"autoclass:: (\S+)\n   :members:\n   :inherited-members:", text)
    assert inheriting == [
        "crossfuse.runtime.Dispatch",
        "crossfuse.runtime.LoadedKernel",
        "crossfuse.planner.explain.explanation.Explanation",
    ]
