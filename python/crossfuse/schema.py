"""JSON that anybody may have written, as the frozen dataclasses that it stands for.

`parse` reads a text within limits, `typed` makes a value of it what a dataclass's annotations say,
and `read` does both. There is no other reader of JSON in the package. What they raise is `Damaged`;
who knows what the text was to be turns it into a refusal, or, for an entry of the cache, works it
out again.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import PurePath
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints, overload

#: Bytes of a text. The largest that we write are functions in TVM's JSON, of a few MiB.
MOST_BYTES = 256 * 2**20
#: Objects and lists inside one another.
DEEPEST = 64
#: Whole numbers are those that TVM and C++ have too.
_LARGEST = 2**64
_SHOWN = 60

T = TypeVar("T")


class Damaged(ValueError):
    """A fault in a file or a text: what was found there, and what was expected.

    `found` begins with its place in the document.
    """

    def __init__(self, found: str, limit: str) -> None:
        super().__init__(f"{found}; expected {limit}")
        self.found = found
        self.limit = limit


@dataclass(frozen=True)
class Between:
    """Mark of an annotated number: the least and the largest that it may be."""

    least: float
    most: float = math.inf


class FileName:
    """Mark of an annotated text: the name of a file in the folder of the document."""


#: Extent of a buffer, a grid or a tile.
Extent = Annotated[int, Between(1, 2**40)]
#: A number of things or of bytes.
Count = Annotated[int, Between(0)]
#: Extent of a tile; 0 leaves it to be chosen.
Tile = Annotated[int, Between(0, 2**16)]
#: What is divided by.
Positive = Annotated[float, Between(1e-12)]


def parse(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse JSON within limits into dictionaries, lists, texts, numbers, booleans and None.

    With `finite`, NaN and infinities are refused: JSON has no words for them, but TVM writes them.
    `Damaged` stands for no JSON, text larger than `MOST_BYTES` or deeper than `DEEPEST`, repeated
    keys, integers of more than 64 bits, and strings that are no Unicode.
    """
    if len(text) > MOST_BYTES:
        raise Damaged(f"{len(text)} bytes", f"JSON of at most {MOST_BYTES} bytes")
    try:
        if isinstance(text, bytes):
            text = text.decode()
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        found = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise Damaged(found, "JSON") from None
    except UnicodeDecodeError as error:
        raise Damaged(f"{error.reason} at byte {error.start}", "text in UTF-8") from None
    except Damaged:
        raise
    except ValueError:  # of Python itself, for numbers of thousands of digits
        raise Damaged("a number of thousands of digits", "numbers of 64 bits") from None
    _check(value, finite)
    return value


@overload
def read(kind: type[T], text: str | bytes, *, version: int | None = None, key: str = ...) -> T: ...
@overload
def read(kind: Any, text: str | bytes, *, version: int | None = None, key: str = ...) -> Any: ...
def read(
    kind: Any, text: str | bytes, *, version: int | None = None, key: str = "format_version"
) -> Any:
    """Parse a JSON object as the dataclass, or other type, `kind`; see `parse` and `typed`.

    With `version`, the object has a further field `key` that must hold it.
    """
    value = parse(text)
    if version is not None:
        value = versioned(value, version, key)
    return typed(kind, value)


def versioned(value: object, version: int, key: str = "format_version") -> dict[str, Any]:
    """An object without its version field; `Damaged` unless that holds the expected version."""
    if not isinstance(value, dict):
        raise Damaged(shown(value), "a JSON object")
    words = key.replace("_", " ")
    if type(value.get(key)) is not int or value[key] != version:
        raise Damaged(f"{words} {shown(value.get(key))}", f"{words} {version}")
    return {name: each for name, each in value.items() if name != key}


@overload
def typed(kind: type[T], value: object) -> T: ...
@overload
def typed(kind: Any, value: object) -> Any: ...
def typed(kind: Any, value: object) -> Any:
    """Convert a parsed JSON value to a type, or raise `Damaged` naming the first misfit.

    `kind` is a dataclass, whose annotations say what each field may be, or a type that a field may
    have: text, number, ``None``, ``Any``, mappings and tuples of these, unions, and ``Annotated``
    with `Between` or `FileName`. Fields with defaults may be missing. A dataclass's own check may
    raise too.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Tile:
    ...     shape: tuple[int, ...]
    >>> typed(Tile, {"shape": [64, 128]})
    Tile(shape=(64, 128))
    """
    return _reader(kind)(value, "")


def shown(value: object) -> str:
    """A value as messages show it, truncated."""
    if isinstance(value, (Mapping, list, tuple)):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)} entries"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(each for each in names if names.count(each) > 1)
        raise Damaged(f"key {shown(twice)} twice", "each key once")
    return found


def _check(value: Any, finite: bool) -> None:
    """Refuse what JSON's grammar allows and none of our documents contains."""
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.keys()
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, str):
                _check_text(each)
            elif isinstance(each, int) and abs(each) > _LARGEST:
                raise Damaged(shown(each), "numbers of 64 bits")
            elif finite and isinstance(each, float) and not math.isfinite(each):
                raise Damaged(f"the number {each}", "finite numbers")
        if not inner:
            return
        level = inner
    raise _too_deep()


def _check_text(text: str) -> None:
    if "\0" in text:
        raise Damaged(f"a NUL in {shown(text)}", "text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Damaged(f"half of a surrogate pair in {shown(text)}", "text") from None


def _too_deep() -> Damaged:
    return Damaged("lists inside one another without end", f"at most {DEEPEST} of them")


# A reader takes a value and its place in the document.


@cache
def _reader(kind: Any) -> Any:
    """The function that reads values of a type: it takes a value and its place in the document."""
    origin, given = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, where: value
    if is_dataclass(kind):
        return partial(_dataclass, kind)
    if origin is Annotated:
        return partial(_marked, _reader(given[0]), given[1])
    if origin in (Union, types.UnionType):
        return partial(_either, tuple(map(_reader, given)), _words(kind))
    if origin is tuple and given[-1] is not Ellipsis:
        return partial(_fixed, tuple(map(_reader, given)))
    if origin is not None and issubclass(origin, Mapping):
        return partial(_mapping, _reader(given[0]), _reader(given[1]))
    if origin is not None and issubclass(origin, Sequence):
        return partial(_tuple, _reader(given[0]))
    return partial(_plain, kind, _words(kind))


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


def _words(kind: Any) -> str:
    """A type in words, for messages."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(_words, get_args(kind)))
    if get_origin(kind) is Annotated:
        return _words(get_args(kind)[0])
    if kind in _WORDS:
        return _WORDS[kind]
    return "an object" if is_dataclass(kind) or _is_mapping(kind) else "a list"


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _at(where: str, found: object) -> str:
    return f"{where}: {shown(found)}" if where else shown(found)


def _plain(kind: type, words: str, value: Any, where: str) -> Any:
    # A bool is an int to Python, and an int is as good as a float.
    known = (int, float) if kind is float else (kind,)
    if type(value) not in known:
        raise Damaged(_at(where, value), words)
    return value


def _marked(reader: Any, mark: Any, value: Any, where: str) -> Any:
    found = reader(value, where)
    if isinstance(mark, Between) and not mark.least <= found <= mark.most:
        words = f"at least {mark.least:g}"
        raise Damaged(
            _at(where, value),
            words if mark.most == math.inf else f"{mark.least:g} to {mark.most:g}",
        )
    if mark is FileName and (
        not found or PurePath(found).name != found or len(found.encode()) > 200
    ):
        raise Damaged(_at(where, value), "the name of a file in the folder")
    return found


def _either(readers: tuple[Any, ...], words: str, value: Any, where: str) -> Any:
    faults = []
    for reader in readers:
        try:
            return reader(value, where)
        except Damaged as error:
            faults.append(error)
    # Of an object that is none, the reader that looked into it says more than the list of all.
    inside = [each for each in faults if not each.found.startswith(_at(where, value))]
    raise inside[0] if inside else Damaged(_at(where, value), words)


def _items(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise Damaged(_at(where, value), "a list")
    return value


def _tuple(reader: Any, value: Any, where: str) -> tuple[Any, ...]:
    return tuple(reader(each, f"{where}[{at}]") for at, each in enumerate(_items(value, where)))


def _fixed(readers: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if len(_items(value, where)) != len(readers):
        raise Damaged(_at(where, value), f"a list of {len(readers)}")
    pairs = enumerate(zip(readers, value, strict=True))
    return tuple(reader(each, f"{where}[{at}]") for at, (reader, each) in pairs)


def _mapping(keys: Any, values: Any, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Damaged(_at(where, value), "an object")
    found = {}
    for key, each in value.items():
        place = f"{where}.{key[:_SHOWN]}" if where else key[:_SHOWN]
        found[keys(key, place)] = values(each, place)
    return found


@cache
def _fields(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    """A dataclass's fields with their readers, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: (each, _reader(hints[each.name])) for each in fields(kind) if each.init}


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise Damaged(_at(where, value), "an object")
    known, given = _fields(kind), {}
    dot = f"{where}." if where else ""
    for name, (field, reader) in known.items():
        if name in value:
            given[name] = reader(value[name], f"{dot}{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise Damaged(f"{dot}{name}: nothing", "all fields")
    for name in value:
        if name not in known:
            raise Damaged(f"{dot}{name[:_SHOWN]}: unknown", f"at most {', '.join(known)}")
    return kind(**given)
