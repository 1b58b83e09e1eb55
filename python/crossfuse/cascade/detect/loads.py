"""Reads of buffers, and their indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.errors import CascadeRefused, PlanRefused, RefusedError, refuse


@dataclass(frozen=True, eq=False)
class Load:
    """A read of an input, or of what a reduction makes.

    Attributes
    ----------
    buffer : tvm.tirx.Buffer
        What is read.
    indices : tuple
        Where, in the reader's variables.
    """

    buffer: Any
    indices: tuple[Any, ...]

    @property
    def text(self) -> str:
        """How messages show it."""
        return f"{self.buffer.name}[{', '.join(str(each) for each in self.indices)}]"

    @cached_property
    def variables(self) -> frozenset[Any]:
        """Loop variables of the indices."""
        return variables_of(self.indices)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal of loads of the same elements."""
        return (self.buffer, *map(ir.tvm_ffi.StructuralKey, self.indices))


def loads_of(value: Any) -> list[Load]:
    """All loads in an expression, those inside indices too."""
    return [Load(each.source, tuple(each.indices)) for each in ir.buffer_loads(value)]


def variables_of(indices: Iterable[Any]) -> frozenset[Any]:
    """Loop variables of indices."""
    return frozenset(var for var in access.variables(indices) if not ir.is_buffer_var(var))


def moved(
    indices: Iterable[Any], values: Mapping[Any, Any], domain: access.Domain
) -> tuple[Any, ...]:
    """Indices over other variables, in their simplest form.

    Those of one iteration stay, for they say which row or column they are.
    """
    return access.replaced(indices, values, _counting(domain))


def simplified(indices: Iterable[Any], domain: access.Domain) -> tuple[Any, ...]:
    """Indices in their simplest form; see `moved`."""
    return access.simplified(indices, _counting(domain))


def _counting(domain: access.Domain) -> access.Domain:
    return {var: extent for var, extent in domain.items() if extent > 1}


def same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether indices are the same expressions of the same variables, of whatever width."""
    first, second = tuple(one), tuple(other)
    return len(first) == len(second) and all(map(_same, first, second))


def _same(one: Any, other: Any) -> bool:
    number = ir.constant(one)
    if number is not None:
        return number == ir.constant(other)
    return bool(ir.tvm_ffi.structural_equal(one, other))


# Refusals of functions that hold no cascade.

#: What to do with a function whose reductions do not share an axis.
SPLIT = "split the function there, and fuse each part by itself"


def refused(where: str, found: object, limit: str, instead: str = SPLIT) -> RefusedError:
    """Build the refusal of a function; see `crossfuse.errors.Refusal`."""
    return refuse(
        CascadeRefused, "cascade-detect", where, found=found, limit=limit, instead=instead
    )


@contextmanager
def as_cascade() -> Iterator[None]:
    """Say of blocks that the planner's reader refuses that they are in no cascade."""
    try:
        yield
    except PlanRefused as error:
        raise CascadeRefused(replace(error.refusal, rule="cascade-detect")) from error
