"""Refusals of specs, and values that are read or refused."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields
from typing import Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.workload.dtypes import closest

_FLAGS = {"true": True, "false": False}
# Linear indices are int32.
_MOST_ELEMENTS = 2**31 - 1


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


def check_extent(kind: str, name: str, value: object, example: int) -> None:
    """Refuse an extent that is no positive integer."""
    if type(value) is not int or value < 1:
        where, limit = f"{kind}:{name}", "a positive integer"
        raise refused("workload-extent", where, value, limit, f"write {name}={example}, say")


def check_elements(kind: str, name: str, elements: int, instead: str) -> None:
    """Refuse more elements of a tensor than linear indices count in functions of specs."""
    if elements > _MOST_ELEMENTS:
        found, limit = f"{elements} elements", f"{_MOST_ELEMENTS}, so that int32 can index them"
        raise refused("workload-extent", f"{kind}:{name}", found, limit, instead)


def check_given(
    kind: str,
    needed: Sequence[str],
    options: Container[str],
    example: int,
    otherwise: str = "the extents you mean",
) -> None:
    """Refuse options that leave extents out."""
    missing = [name for name in needed if name not in options]
    if missing:
        found, limit = "no " + ", ".join(missing), "the extents " + ", ".join(needed)
        instead = "add " + ",".join(f"{name}={example}" for name in missing) + f" or {otherwise}"
        raise refused("workload-extent", kind, found, limit, instead)


def read_flag(kind: str, name: str, text: str) -> bool:
    """Read ``true`` or ``false``; anything else raises `WorkloadRefused`."""
    one_of(f"{kind}:{name}", text.lower(), tuple(_FLAGS))
    return _FLAGS[text.lower()]


#: What reads a text, by the type of a field.
_READERS: dict[Any, Callable[[str, str, str], Any]] = {"int": read_extent, "bool": read_flag}


def read_fields(kind: str, made: type, options: Mapping[str, str]) -> dict[str, Any]:
    """Read numbers and flags of a spec of the dataclass `made`; other fields stay texts."""
    readers = {each.name: _READERS.get(each.type) for each in fields(made)}
    return {
        name: text if (reader := readers[name]) is None else reader(kind, name, text)
        for name, text in options.items()
    }
