"""Refusals of specs, and values that are read or refused."""

from __future__ import annotations

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.workload.dtypes import closest

_FLAGS = {"true": True, "false": False}


def refused(rule: str, where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a workload; see `crossfuse.errors.Refusal`."""
    return refuse(WorkloadRefused, rule, where, found=found, limit=limit, instead=instead)


def one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `WorkloadRefused` for a word that is not known, advising the closest one.

    `what` names the kind of word in messages; what follows its last colon names the rule.
    """
    if value not in known:
        raise refused(
            "workload-" + what.rpartition(":")[2],
            what,
            repr(value),
            "one of " + ", ".join(known),
            closest(value, known, "choose one of these"),
        )


def read_extent(kind: str, name: str, text: str) -> int:
    """Read an extent from decimal digits; anything else raises `WorkloadRefused`."""
    # isdecimal alone would take digits of other scripts.
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    raise refused(
        "workload-extent", f"{kind}:{name}", text, "a positive integer", f"write {name}=128, say"
    )


def read_flag(kind: str, name: str, text: str) -> bool:
    """Read ``true`` or ``false``; anything else raises `WorkloadRefused`."""
    one_of(f"{kind}:{name}", text.lower(), tuple(_FLAGS))
    return _FLAGS[text.lower()]
