"""JSON within limits, and dataclasses of it: what is taken, and how the rest is named."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from crossfuse import schema
from crossfuse.schema import DEEPEST, Between, Damaged, Extent, FileName, parse, read, typed
from syntax_trees import trees

PACKAGE = Path(schema.__file__).parent


@dataclass(frozen=True)
class Part:
    name: Annotated[str, FileName]
    shape: tuple[Extent, ...]
    ratio: float | None = None


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    corner: tuple[int, int]
    sizes: Mapping[str, int | str]
    note: Any = None
    flags: Mapping[str, bool] = field(default_factory=dict)
    share: Annotated[float, Between(0, 1)] = 0.5


GOOD = {
    "parts": [{"name": "a.so", "shape": [2, 3]}, {"name": "b.so", "shape": [], "ratio": 1}],
    "corner": [1, -1],
    "sizes": {"m": 4, "n": "m * 2"},
    "note": [1, {"x": None}],
}


def test_a_dataclass_is_read_by_its_annotations() -> None:
    found = typed(Whole, GOOD)
    assert found.parts == (Part("a.so", (2, 3)), Part("b.so", (), 1))
    assert (found.corner, found.sizes) == ((1, -1), {"m": 4, "n": "m * 2"})
    assert found.note == GOOD["note"] and found.share == 0.5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parts": None}, "parts: null; expected a list"),
        ({"parts": [{"name": "a.so"}]}, "parts[0].shape: nothing; expected all fields"),
        ({"parts": [{"name": "a.so", "shape": [0]}]}, "parts[0].shape[0]: 0; expected 1 to"),
        ({"parts": [{"name": "a.so", "shape": [True]}]}, "parts[0].shape[0]: true; expected a who"),
        ({"parts": [{"name": "a.so", "shape": [2.0]}]}, "parts[0].shape[0]: 2.0; expected a whole"),
        ({"parts": [{"name": "../a", "shape": []}]}, "parts[0].name: '../a'; expected the name of"),
        ({"parts": [{"name": "n" * 300, "shape": []}]}, "expected the name of a file"),
        ({"parts": [{"name": "a", "shape": [], "ratio": "1"}]}, "'1'; expected a number or null"),
        ({"corner": [1]}, "corner: a list of 1 entries; expected a list of 2"),
        ({"sizes": {"m": []}}, "sizes.m: a list of 0 entries; expected a whole number or a text"),
        ({"sizes": [1]}, "sizes: a list of 1 entries; expected an object"),
        ({"flags": {"x": 1}}, "flags.x: 1; expected true or false"),
        ({"share": 1.5}, "share: 1.5; expected 0 to 1"),
        ({"further": 1}, "further: unknown; expected at most parts, corner"),
    ],
)
def test_the_first_wrong_part_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(Damaged) as caught:
        typed(Whole, GOOD | change)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Expecting value at line 1, column 1"),
        ("[" * 200_000, "lists inside one another"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "lists inside one another"),
        ('{"a": 1, "a": 2}', "key 'a' twice"),
        ("NaN", "the number nan"),
        ("[-Infinity]", "the number -inf"),
        ("1e999", "the number inf"),
        ("9" * 5000, "numbers of 64 bits"),
        ("18446744073709551617", "numbers of 64 bits"),
        ('"\\ud800"', "half of a surrogate pair"),
        ('"a\\u0000b"', "a NUL"),
        ('{"a\\u0000b": 1}', "a NUL"),
        (b"\xff\xfe", "byte 0; expected text in UTF-8"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_what_is_no_json_of_ours(text: str | bytes, found: str) -> None:
    with pytest.raises(Damaged) as caught:
        parse(text)
    assert found in str(caught.value)


def test_deep_and_large_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("[" * DEEPEST + "]" * DEEPEST)
    monkeypatch.setattr(schema, "MOST_BYTES", 10)
    with pytest.raises(Damaged, match="11 bytes; expected JSON of at most 10 bytes"):
        parse('"123456789"')
    assert parse("[NaN]", finite=False)  # as TVM writes it


def test_versions_come_first() -> None:
    text = '{"format_version": 2, "other": 1}'
    with pytest.raises(Damaged, match="format version 2; expected format version 1"):
        read(Part, text, version=1)
    with pytest.raises(Damaged, match="format version null"):
        read(Part, "{}", version=1)
    with pytest.raises(Damaged, match="format version true"):
        read(Part, '{"format_version": true}', version=1)


def test_there_is_one_reader_of_json() -> None:
    readers = []
    for path, tree in trees(PACKAGE):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.load", "json.loads"):
                readers.append(str(path.relative_to(PACKAGE)))
    assert readers == ["schema.py"]
