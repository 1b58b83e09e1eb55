"""Records in a trace which plan a schedule follows.

The note is an annotation of the root block, in JSON. It is part of the trace, so that it outlives
the database, and the lowering ignores it::

    sch.annotate("root", "crossfuse.plan", '{"family": "dsm", "tiles": {"rows": 64, ...}}')
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crossfuse.schema import read

#: Key of the annotation.
NOTE = "crossfuse.plan"


def annotate_plan(sch: Any, family: str, tiles: Mapping[str, Any]) -> None:
    """Record which plan a schedule of one function follows; tiles are plain values."""
    text = json.dumps(asdict(Note(family, dict(tiles))))
    sch.annotate(sch.get_sblock("root"), NOTE, text)


@dataclass(frozen=True)
class Note:
    """The contents of a note; see `annotate_plan`."""

    family: str
    tiles: Mapping[str, Any]


def read_note(text: str) -> Note:
    """Read the note of a trace; any other text is `Damaged`."""
    return read(Note, text)


def note(trace: Any) -> str | None:
    """The note of a trace; None where there is none."""
    for each in reversed(trace.insts):
        if str(each.kind.name) == "Annotate" and str(each.attrs[0]) == NOTE:
            return str(each.inputs[1])
    return None
