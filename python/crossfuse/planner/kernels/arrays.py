"""Counts of one candidate, or of many as arrays: arithmetic, and how many are listed and selected.

Python integers stay Python integers, which do not overflow. Arrays become float64, whose division
is many times faster than that of int64, and which does not wrap around. Counts are exact in it
below 2**53, and so are rounded quotients: a/b of integers is an integer or at least 1/b away from
the next one, and the rounding error is less. Of a chain beyond that they are within 1 in 10**15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from crossfuse.schema import Damaged, Extent, typed

if TYPE_CHECKING:
    from crossfuse.planner.kernels.shape import Shape

Count: TypeAlias = "int | np.ndarray[Any, Any]"
Flag: TypeAlias = "bool | np.ndarray[Any, Any]"
#: From 0 to 1.
Share: TypeAlias = "float | np.ndarray[Any, Any]"
Value = TypeVar("Value", "Flag", "Count", "Share")


def ceil_div(count: Count, size: Count) -> Count:
    """Number of `size` that cover `count`."""
    if _plain(count, size):
        return -(-count // size)
    quotient: np.ndarray = np.divide(count, size)
    return np.ceil(quotient)


def least(a: Count, b: Count) -> Count:
    """The smaller one."""
    return min(a, b) if _plain(a, b) else np.minimum(a, b)


def most(a: Count, b: Count) -> Count:
    """The larger one."""
    return max(a, b) if _plain(a, b) else np.maximum(a, b)


def choose(flag: Flag, yes: Value, no: Value) -> Value:
    """`yes` where the flag is set, `no` elsewhere."""
    if isinstance(flag, np.ndarray):
        return np.where(flag, yes, no)
    return yes if flag else no


def _plain(a: Count, b: Count) -> bool:
    return not (isinstance(a, np.ndarray) or isinstance(b, np.ndarray))


# Many candidates as one dataclass of arrays: how they are listed, counted and selected.

_K = TypeVar("_K")

#: No given tiles: all of them are tried.
NOTHING: Mapping[str, int] = MappingProxyType({})
#: Rows of tiles: 64 for each warpgroup, and 128 for each of two.
ROWS = (64.0, 128.0, 192.0, 256.0)
CLUSTERS = (1.0, 2.0, 4.0, 8.0, 16.0)
PARTS = tuple(map(float, range(1, 33)))


def count(kernel: Any) -> int:
    """Candidates in a struct of arrays; 1 for plain numbers."""
    sizes = [np.size(each) for each in entries(kernel).values()]
    return max(sizes) if min(sizes) else 0


def select(kernel: _K, which: Any) -> _K:
    """Select some candidates by a mask, by indices, or by one index, which gives plain numbers."""

    def chosen(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(chosen, value))
        if not isinstance(value, np.ndarray) or not value.ndim:
            return value
        value = value[which]
        if np.ndim(value):
            return value
        return bool(value) if value.dtype == bool else int(value)

    values = {e.name: chosen(getattr(kernel, e.name)) for e in fields(kernel)}  # type: ignore[arg-type]
    return replace(kernel, **values)  # type: ignore[type-var]


def flags(kernel: Any, flag: Flag) -> np.ndarray:
    """One flag for each candidate."""
    return np.broadcast_to(np.asarray(flag, bool), (count(kernel),))


def stack(kernels: Sequence[_K]) -> _K:
    """Join kernels of one family into one struct of arrays."""

    def joined(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(map(joined, zip(*values, strict=True)))
        return np.array(values, bool if isinstance(values[0], bool) else np.float64)

    chosen: dict[str, Any] = {
        each.name: joined([getattr(kernel, each.name) for kernel in kernels])
        for each in _searched(kernels[0])
    }
    return replace(kernels[0], **chosen)  # type: ignore[type-var]


def entries(kernel: Any, *, fixed: bool = True) -> dict[str, Any]:
    """Values of a kernel by name; of a field with one for each phase they are numbered from 1.

    `fixed` are those too that are the same for all kernels of a family.
    """
    found: dict[str, Any] = {}
    for each in fields(kernel) if fixed else _searched(kernel):
        value = getattr(kernel, each.name)
        if isinstance(value, tuple):
            found |= {f"{each.name} {place}": part for place, part in enumerate(value, 1)}
        else:
            found[each.name] = value
    return found


def axes(kernel: Any) -> tuple[str, ...]:
    """Values in which kernels of a family differ, by the names of `entries`."""
    return tuple(entries(kernel, fixed=False))


def _searched(kernel: Any) -> list[Any]:
    return [each for each in fields(kernel) if "fixed" not in each.metadata]


# Values of the fields that are tried.


def given_or(given: Mapping[str, int], name: str, options: Sequence[float]) -> Sequence[float]:
    """Options of a field of the tiles: only what is given, or each option."""
    return (float(given[name]),) if name in given else options


def row_options(shape: Shape, options: Sequence[float]) -> tuple[float, ...]:
    """Rows of tiles that are not mostly empty."""
    return tuple(each for each in options if each < shape.m + 64 or each == options[0])


def column_options(width: int) -> tuple[float, ...]:
    """Columns of tiles: multiples of 8, the fewest for each number of tiles side by side."""
    options = range(8, min(256, -(-width // 8) * 8) + 1, 8)
    fewest = {-(-width // each): each for each in reversed(options)}
    even = [each for each in options if each % 32 == 0]
    return tuple(float(each) for each in sorted({*fewest.values(), *even}))


def grid(*options: Sequence[float]) -> list[np.ndarray]:
    """Build every combination, as one flat array for each axis."""
    return [each.ravel() for each in np.meshgrid(*map(np.asarray, options), indexing="ij")]


def read_extents(tiles: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Read fields of tiles as records and plans hold them; all of them have to be given."""
    if missing := [each for each in names if each not in tiles]:
        raise Damaged(f"no {missing[0]}", "all fields")
    return tuple(typed(Extent, tiles[each]) for each in names)
