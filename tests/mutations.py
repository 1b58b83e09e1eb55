"""Damage to files: bytes that flip, parts that are gone or there twice, fields of another type."""

from __future__ import annotations

import json
from random import Random
from typing import Any

#: What may stand in the place of any value.
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**12,
    2.5,
    float("nan"),
    float("inf"),
    "",
    "../../up",
    "a\0b",
    "n" * 300,
    "\ud800",
    [],
    {},
    [0, {"a": 1}],
    {"a": None},
)
#: Whole files of nothing that is expected.
NOTHING = (
    b"",
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b"\xff\xfe\x00",
    b"null",
    b"9" * 5000,
    b'{"version": 1, "version": 1}',
    b"\x00" * 64,
)


def damaged(data: bytes, rng: Random) -> bytes:
    """A file with one thing wrong; it may by chance be as good as before."""
    kind = rng.choice(("flip", "flip", "cut", "drop", "twice", "nothing", "mark", "field", "field"))
    if kind == "nothing":
        return rng.choice(NOTHING)
    if kind == "mark":
        return b"\xef\xbb\xbf" + data
    if kind == "field" and (found := _other_field(data, rng)) is not None:
        return found
    at = rng.randrange(len(data) or 1)
    length = rng.choice((1, 1, 2, 7, 40))
    part = data[at : at + length]
    if kind == "cut":
        return data[:at]
    if kind == "drop":
        return data[:at] + data[at + length :]
    if kind == "twice":
        return data[:at] + part + part + data[at + length :]
    flipped = bytes(each ^ (1 << rng.randrange(8)) for each in part[:1])
    return data[:at] + flipped + data[at + 1 :]


def _other_field(data: bytes, rng: Random) -> bytes | None:
    """The same JSON with another value in one place, or a key more or less."""
    lines = data.split(b"\n") if data.count(b"\n{") else [data]
    line = rng.randrange(len(lines))
    try:
        value = json.loads(lines[line])
    except ValueError:
        return None
    places = [(value, key) for value in _containers(value) for key in _keys(value)]
    if not places:
        return None
    inside, key = rng.choice(places)
    what = rng.choice(("other", "other", "other", "gone", "more"))
    if what == "gone":
        del inside[key]
    elif what == "more" and isinstance(inside, dict):
        inside["another"] = 1
    else:
        inside[key] = rng.choice(STRANGE)
    lines[line] = json.dumps(value).encode()
    return b"\n".join(lines)


def _containers(value: Any) -> list[Any]:
    if not isinstance(value, (dict, list)):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(each for part in inner for each in _containers(part))]


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))
