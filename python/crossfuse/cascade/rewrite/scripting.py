"""Helpers for writing statements through TVM's builder, with names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.spec import Monoid, Slot


def named(name: str, value: Any) -> Any:
    """Give a variable or buffer its name."""
    ir.IRBuilder.name(name, value)
    return value


def symbol_of(function: Any) -> str:
    """The name that a function has in a module."""
    attrs = function.attrs or {}
    return str(attrs["global_symbol"]) if "global_symbol" in attrs else "main"


@contextmanager
def loop(name: str, extent: int, kind: str = "serial") -> Iterator[Any]:
    """A loop from 0; yields its variable."""
    with getattr(ir.script, kind)(0, extent) as variable:
        yield named(name, variable)


@contextmanager
def steps(name: str, extent: int, kind: str = "serial") -> Iterator[Any]:
    """A loop from 0, left out where it has one iteration."""
    if extent == 1:
        yield 0
    else:
        with loop(name, extent, kind) as variable:
            yield variable


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """Statements under a condition; None always holds."""
    if condition is None:
        yield
    else:
        with ir.script.If(condition), ir.script.Then():
            yield


def spatial(name: str, extent: int, value: Any) -> Any:
    """A spatial iterator of the current block."""
    return named(name, ir.script.axis.spatial(extent, value))


def held(name: str, shape: tuple[int, ...], dtype: str, scope: str = "global") -> Any:
    """Allocate a buffer in the current block (or function)."""
    return named(name, ir.script.sblock_alloc_buffer(shape, dtype, scope=scope))


def zero(dtype: str) -> Any:
    """The number 0 of a type."""
    return ir.tirx.const(0.0 if "float8" in dtype else 0, dtype)


class Scratch:
    """One number in a thread's registers."""

    def __init__(self, name: str, dtype: str, value: Any = None) -> None:
        self.buffer = held(name, (1,), dtype, "local")
        if value is not None:
            self.set(value)

    @property
    def value(self) -> Any:
        """Its value at this point of the program."""
        return self.buffer[0]

    def set(self, value: Any) -> None:
        """Statement: assign a value."""
        ir.script.buffer_store(self.buffer, value, [0])


# The numbers of a slot: one, or the best values and their places.

#: Type of places along the axis, and the place of no element.
PLACE, NOWHERE = "int32", 2**31 - 1

#: A number and its place.
Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Number:
    """One number of a state."""

    #: For buffers.
    name: str
    #: `PLACE` for the place of another number.
    dtype: str


def numbers(slot: Slot, dtype: str) -> tuple[Number, ...]:
    """The numbers of a slot: of a choice the values, best first, then their places."""
    if not slot.monoid.keeps_places:
        return (Number(slot.name, dtype),)
    count = slot.monoid.count
    values = [Number(f"{slot.name}_{i}", dtype) for i in range(count)]
    return (*values, *(Number(f"{slot.name}_place_{i}", PLACE) for i in range(count)))


def pairs(slot: Slot, held: Mapping[str, Any], dtype: str) -> list[Pair]:
    """Pair values and places of a choice, by the names of its numbers."""
    found = [held[each.name] for each in numbers(slot, dtype)]
    half = len(found) // 2
    return list(zip(found[:half], found[half:], strict=True))


def flat(chosen: list[Pair]) -> list[Any]:
    """Flatten pairs to the order of `numbers`."""
    return [*(value for value, _ in chosen), *(place for _, place in chosen)]


def nothing(number: Number, slot: Slot, start: Any) -> Any:
    """A number of the state without elements; `start` is that of values."""
    if slot.monoid.keeps_places and number.dtype == PLACE:
        return ir.tirx.const(NOWHERE, PLACE)
    return start


def stands_before(monoid: Monoid, one: Pair, other: Pair) -> Any:
    """Whether a number is better than another, or equal with a lower place."""
    better = one[0] < other[0] if monoid.name == "argmin" else one[0] > other[0]
    equal = ir.tirx.And(ir.tirx.EQ(one[0], other[0]), one[1] < other[1])
    return ir.tirx.Or(better, equal)


def best_of(monoid: Monoid, one: Pair, other: Pair) -> Pair:
    """The better of two."""
    before = stands_before(monoid, one, other)
    return ir.tirx.Select(before, one[0], other[0]), ir.tirx.Select(before, one[1], other[1])


def worst_of(monoid: Monoid, one: Pair, other: Pair) -> Pair:
    """The worse of two: the one that `best_of` does not give."""
    before = stands_before(monoid, one, other)
    return ir.tirx.Select(before, other[0], one[0]), ir.tirx.Select(before, other[1], one[1])
