"""Loads of buffers, and the algebra of their indices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.errors import CascadeRefused, Rule


@dataclass(frozen=True, eq=False)
class Load:
    """A load from an input, or from the result of a reduction."""

    buffer: Any
    #: In the reader's variables.
    indices: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The load as messages show it."""
        return f"{self.buffer.name}[{', '.join(str(each) for each in self.indices)}]"

    @cached_property
    def variables(self) -> frozenset[Any]:
        """Loop variables of the indices."""
        return variables_of(self.indices)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for loads of the same elements."""
        return (self.buffer, *map(ir.tvm_ffi.StructuralKey, self.indices))


def loads_of(value: Any) -> list[Load]:
    """All loads in an expression, those inside indices too."""
    return [Load(each.source, tuple(each.indices)) for each in ir.buffer_loads(value)]


def variables_of(indices: Iterable[Any]) -> frozenset[Any]:
    """Loop variables of indices."""
    return frozenset(var for var in access.variables(indices) if not ir.is_buffer_var(var))


def mentions(expressions: Iterable[Any], var: Any) -> bool:
    """Whether expressions use a variable."""
    return any(each.same_as(var) for one in expressions for each in ir.variables(one))


def moved(
    indices: Iterable[Any], values: Mapping[Any, Any], domain: access.Domain
) -> tuple[Any, ...]:
    """Rewrite indices over other variables, in their simplest form; see `simplified`."""
    return simplified((ir.substitute(each, values) for each in indices), domain)


def simplified(indices: Iterable[Any], domain: access.Domain) -> tuple[Any, ...]:
    """Indices in their simplest form.

    Variables of one iteration stay, for they say which row or column they are, but where others
    count beside them: as in what a reshape divides, such as ``(i * 8 + j + one) % 24``.
    """
    counting = {var: extent for var, extent in domain.items() if extent > 1}

    def simplest(index: Any) -> Any:
        counts = any(var in counting for var in ir.variables(index))
        return access.simplified((index,), domain if counts else counting)[0]

    return tuple(map(simplest, indices))


def same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether indices are the same expressions of the same variables, whatever their width."""
    first, second = tuple(one), tuple(other)
    return len(first) == len(second) and all(map(_same, first, second))


def _same(one: Any, other: Any) -> bool:
    number = ir.constant(one)
    if number is not None:
        return number == ir.constant(other)
    return bool(ir.tvm_ffi.structural_equal(one, other))


#: Advice for a function whose reductions do not share an axis.
SPLIT = "split the function there, and fuse each part by itself"

refused = Rule(CascadeRefused, "cascade-detect", instead=SPLIT)
