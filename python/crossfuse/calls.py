"""Public calls take what their annotations say, or refuse in words."""

from __future__ import annotations

import ast
import collections.abc
import difflib
import functools
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_origin, overload

from crossfuse.errors import ArgumentRefused, refuse
from crossfuse.schema import Between, shown

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

#: Of numpy's random generators, of the emulator and of xgboost.
Seed = Annotated[int, Between(0, 2**31 - 1)]
#: CTAs of a cluster.
ClusterSize = Annotated[int, Between(1, 16)]
#: A number of things of which there is at least one.
AtLeastOne = Annotated[int, Between(1, 2**31 - 1)]
#: One that may also be 0.
Whole = Annotated[int, Between(0, 2**31 - 1)]
#: A time that is waited for.
Seconds = Annotated[float, Between(1e-3, 1e7)]


@dataclass(frozen=True)
class Named:
    """Mark of parameters annotated with `Any`: names of the classes that it stands for."""

    classes: tuple[str, ...]
    #: What they are in words; empty names the classes.
    words: str = ""


AnySchedule = Annotated[Any, Named(("Schedule",))]
AnyProgram = Annotated[Any, Named(("PrimFunc", "Schedule", "IRModule"))]
AnyFunction = Annotated[Any, Named(("PrimFunc",))]

#: A test of a value, and what it asks for in words.
_Test = tuple[Callable[[Any], bool], str]


@overload
def checked(function: C) -> C: ...
@overload
def checked(function: Callable[P, R]) -> Callable[P, R]: ...
def checked(function: Any) -> Any:
    """Make a function, or a class's constructor, refuse arguments against its annotations.

    Classes that are not imported, such as those of torch and TVM, are recognised by name. Numbers
    may have a range, see `crossfuse.schema.Between`. What an argument cannot be raises
    `ArgumentRefused`; missing or surplus arguments raise Python's own `TypeError`, with the name of
    the function and of the parameter that may have been meant.
    """
    if inspect.isclass(function):
        # Of a dataclass Python writes the annotations itself; those of its fields are the same.
        made: Any = function
        made.__init__ = _checked(made.__init__, made.__name__, made.__module__)
        return function
    return _checked(function, function.__name__, function.__module__)


def _checked(function: Any, name: str, module: str) -> Any:
    signature = inspect.signature(function)
    known: list[dict[str, _Test]] = []  # Dynamo warns of lru_cache, where models call functions

    def tests() -> dict[str, _Test]:
        if not known:
            names = vars(sys.modules[module])
            found = {e.name: _test(e.annotation, names) for e in signature.parameters.values()}
            known.append({key: each for key, each in found.items() if each is not None})
        return known[0]

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            given = signature.bind(*args, **named).arguments
        except TypeError as error:
            raise TypeError(f"{name}() {error}{_meant(signature, named)}") from None
        for key, (fits, words) in tests().items():
            if key in given and not fits(given[key]):
                raise _refused(name, key, given[key], words)
        return function(*args, **named)

    return call


def _meant(signature: inspect.Signature, named: Mapping[str, Any]) -> str:
    """The parameter next to the first name that is none, as later releases of Python say it."""
    unknown = next((each for each in named if each not in signature.parameters), "")
    near = difflib.get_close_matches(unknown, signature.parameters, n=1)
    return f". Did you mean '{near[0]}'?" if near else ""


def _refused(function: str, name: str, value: Any, words: str) -> Exception:
    if value is None or isinstance(value, bool):
        found = str(value)
    elif isinstance(value, (int, float, str, list, tuple, Mapping)):
        found = shown(value)
    else:
        found = f"a {type(value).__name__}"
    return refuse(
        ArgumentRefused,
        "argument",
        f"{name} of {function}",
        found=found,
        limit=words,
        instead=f"pass {words}",
    )


def _test(annotation: Any, names: Mapping[str, Any]) -> _Test | None:
    """The test that an annotation asks for; None where it allows everything."""
    if annotation is inspect.Parameter.empty:
        return None
    if isinstance(annotation, str):
        return _of_node(ast.parse(annotation, mode="eval").body, names)
    return _of_type(annotation)


def _of_node(node: ast.expr, names: Mapping[str, Any]) -> _Test | None:
    """The test of an annotation as written: not all names in it are there to be looked up."""
    if isinstance(node, ast.BinOp):
        return _either(_of_node(node.left, names), _of_node(node.right, names))
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if ast.unparse(node.value) == "type":
            return _of_type(type)
        return _container(ast.unparse(node.value), inner, names)
    text = ast.unparse(node)
    known = {"None": None, "Any": Any, **vars(collections.abc), "os": os}
    try:
        return _of_type(eval(text, {**known, **names}))
    except (NameError, AttributeError):
        return _of_name(text.rpartition(".")[2])


def _either(one: _Test | None, other: _Test | None) -> _Test | None:
    if one is None or other is None:
        return None
    return lambda value: one[0](value) or other[0](value), f"{one[1]} or {other[1]}"


def _fixed(parts: Sequence[_Test | None]) -> _Test:
    """The test of a tuple of fixed length, part by part."""

    def fits(value: Any) -> bool:
        if not isinstance(value, (list, tuple)) or len(value) != len(parts):
            return False
        return all(part is None or part[0](each) for part, each in zip(parts, value, strict=True))

    words = ", ".join(part[1] if part else "anything" for part in parts)
    return fits, f"{len(parts)} of them, {words}"


def _container(name: str, nodes: Sequence[ast.expr], names: Mapping[str, Any]) -> _Test | None:
    """The test of a list, a tuple, a mapping or a callable."""
    inner = [None if ast.unparse(each) == "..." else _of_node(each, names) for each in nodes]
    if name == "tuple" and "..." not in map(ast.unparse, nodes):
        return _fixed(inner)
    if name in ("Sequence", "tuple", "list"):
        part = inner[0]
        words = "a list or tuple" + (f", of which each is {part[1]}" if part else "")

        def fits(value: Any) -> bool:
            if isinstance(value, (str, bytes)) or not isinstance(value, collections.abc.Sequence):
                return False
            return part is None or all(map(part[0], value))

        return fits, words
    if name in ("Mapping", "dict"):
        key, part = inner[0], inner[1]
        words = "a dictionary" + (f" whose keys are {key[1]}" if key else "")

        def maps(value: Any) -> bool:
            if not isinstance(value, Mapping):
                return False
            right = key is None or all(map(key[0], value.keys()))
            return right and (part is None or all(map(part[0], value.values())))

        return maps, words
    if name == "os.PathLike":
        return _of_type(os.PathLike)
    if name == "Callable":
        return callable, "a function"
    return None


_WORDS: dict[Any, str] = {
    str: "a text",
    bool: "True or False",
    bytes: "bytes",
    os.PathLike: "a path",
    type(None): "None",
    collections.abc.Callable: "a function",
}


def _of_type(kind: Any) -> _Test | None:
    if kind is None:
        kind = type(None)
    if get_origin(kind) is Annotated:
        plain, mark = get_args(kind)[:2]
        if isinstance(mark, Named):
            fits, words = _of_name(*mark.classes)
            return fits, mark.words or words
        return _between(_of_type(plain), mark)
    if kind is int:
        return _is_whole, "a whole number"
    if kind is float:
        return _is_number, "a number"
    if kind is bool:
        return lambda value: isinstance(value, bool) or _is_flag(value), _WORDS[bool]
    if isinstance(kind, TypeVar) and kind.__bound__ is not None:
        return _of_type(getattr(kind.__bound__, "__origin__", kind.__bound__))
    if not isinstance(kind, type) or kind in (object, Any):
        return None
    return lambda value: isinstance(value, kind), _WORDS.get(kind, f"a {kind.__name__}")


def _between(test: _Test | None, mark: Any) -> _Test | None:
    if test is None or not isinstance(mark, Between):
        return test
    fits, words = test
    most = "" if mark.most == math.inf else f" and at most {mark.most:g}"
    return (
        lambda value: fits(value) and mark.least <= value <= mark.most,
        f"{words} of at least {mark.least:g}{most}",
    )


def _of_name(*names: str) -> _Test:
    return (
        lambda value: any(each.__name__ in names for each in type(value).__mro__),
        f"a {' or '.join(names)}",
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool_", "bool") and type(value).__module__ == "numpy"
