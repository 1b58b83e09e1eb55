"""The error texts of the launcher, which is C++."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from refusals.entries import Entry

_CALL = re.compile(r"\brefuse\(\"")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_CONSTANT = re.compile(r"constexpr const char\* (\w+) =\s*((?:\"[^\"]*\"\s*)+);")
_MODULE = "crossfuse.runtime.host"


def native_entries(folder: Path) -> Iterator[Entry]:
    """Calls of ``refuse`` in the C++ of a folder.

    Parameters
    ----------
    folder : Path
        Sources of the launcher.
    """
    for path in sorted(each for each in folder.iterdir() if each.suffix in (".cpp", ".h")):
        code = path.read_text(encoding="utf-8").replace("\\\n", "\n")
        constants = {
            name: "".join(_LITERAL.findall(value)) for name, value in _CONSTANT.findall(code)
        }
        for match in _CALL.finditer(code):
            yield _entry(_arguments(code, code.index("(", match.start())), constants)


def _entry(arguments: list[str], constants: dict[str, str]) -> Entry:
    rules = tuple(_LITERAL.findall(arguments[1]))
    family = "EnvironmentRefused" if rules[0].startswith("cuda-") else "ArtefactRefused"
    where, found, limit, instead = (_text(each, constants) for each in arguments[2:6])
    return Entry(family, rules, where, found, limit, instead, _MODULE)


def _arguments(code: str, start: int) -> list[str]:
    """The arguments of the call whose bracket opens at `start`."""
    deep, begin, found = 0, start + 1, []
    for place in _outside_literals(code, start):
        sign = code[place]
        if sign in "([{":
            deep += 1
        elif sign in ")]}":
            deep -= 1
        if (sign == "," and deep == 1) or deep == 0:
            found.append(code[begin:place])
            begin = place + 1
        if deep == 0:
            return found
    raise ValueError(f"a call that does not end: {code[start : start + 60]}")


def _outside_literals(code: str, start: int) -> Iterator[int]:
    spans = [match.span() for match in _LITERAL.finditer(code, start)]
    place = start
    for first, last in [*spans, (len(code), len(code))]:
        yield from range(place, first)
        place = last


def _text(expression: str, constants: dict[str, str]) -> str:
    """Literals as they are, and one placeholder for each run of other code between them."""
    known = constants.get(expression.strip())
    if known is not None:
        return known
    if " ? " in expression and "+" not in expression:
        return " | ".join(_LITERAL.findall(expression)) or "<value>"
    parts = []
    for each in re.split(r"(\"(?:[^\"\\]|\\.)*\")", expression):
        literal = _LITERAL.fullmatch(each)
        if literal:
            parts.append(literal[1])
        elif re.search(r"\w", re.sub(r"std::string|to_string|std::", "", each)):
            parts.append(f"<{_name(each)}>")
    return "".join(parts)


def _name(code: str) -> str:
    words = re.findall(r"[a-z_]\w*", re.sub(r"std::\w+", "", code))
    return words[-1].replace("_", " ") if words else "value"
