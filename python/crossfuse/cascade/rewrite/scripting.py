"""Helpers for writing statements through TVM's builder, with names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crossfuse import _tvm as ir


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
