"""All kernels of a chain that the rules build: tiles that fit, family by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.families import FAMILIES
from crossfuse.planner.kernels.clustered import SLICE, ClusteredKernel
from crossfuse.planner.kernels.memory import Memory, memory
from crossfuse.planner.kernels.registers import RegisterKernel
from crossfuse.planner.kernels.shape import Shape
from crossfuse.planner.kernels.tiled import TiledKernel

Kernel: TypeAlias = "TiledKernel | ClusteredKernel | RegisterKernel"

_K = TypeVar("_K", bound="TiledKernel | ClusteredKernel | RegisterKernel")

_ROWS = (64.0, 128.0, 192.0, 256.0)
_CLUSTERS = (1.0, 2.0, 4.0, 8.0, 16.0)
_PARTS = 32
#: No tiles are given: all of them are tried.
NOTHING: Mapping[str, int] = MappingProxyType({})


def families(shape: Shape) -> tuple[str, ...]:
    """Families that have kernels of a shape."""
    return FAMILIES[1:] if shape.l else FAMILIES[:1]


def every(family: str, shape: Shape, device: Device) -> Kernel:
    """All legal tiles of a family, as arrays with an entry for each.

    Parameters
    ----------
    family : str
        One of `FAMILIES`.
    shape : Shape
        What is computed.
    device : Device
        Its limits.

    Returns
    -------
    Kernel
        Of arrays; they are empty where nothing fits.
    """
    found = possible(family, shape)
    found = select(found, legal(found, shape, device))
    if count(found) == 0:
        return found
    return select(found, fitting(found, shape, device))


def possible(family: str, shape: Shape, given: Mapping[str, int] = NOTHING) -> Kernel:
    """All tiles of a family before any rule, as arrays.

    Parameters
    ----------
    family : str
        One of `FAMILIES`.
    shape : Shape
        What is computed.
    given : Mapping[str, int]
        Of ``registers`` and ``dsm``: fields of the rule's tiles that are not tried, but are this.
    """
    if family == "registers":
        return _registers(shape, given)
    return _clustered(shape, given) if family == "dsm" else _tiled(family, shape)


def legal(kernel: Kernel, shape: Shape, device: Device) -> np.ndarray:
    """Which of many keep all rules but for shared memory."""
    found = np.asarray(kernel.legal(shape, device), bool)
    return np.broadcast_to(found, (count(kernel),))


def fitting(kernel: Kernel, shape: Shape, device: Device) -> np.ndarray:
    """Which of many have room in shared memory for two stages of each ring."""
    fits = np.ones(count(kernel), bool)
    for each in memories(kernel, shape, device):
        fits &= np.asarray(each.fits, bool)
    return fits


def memories(kernel: Kernel, shape: Shape, device: Device) -> tuple[Memory, ...]:
    """Shared memory of each of its kernels."""
    summed: Any = False
    if isinstance(kernel, RegisterKernel):
        summed = (kernel.parts > 1) & (kernel.size == 1)
    elif isinstance(kernel, ClusteredKernel):
        summed = kernel.parts > 1
    return tuple(memory(each, device, waits=summed) for each in kernel.kernels(shape))


def count(kernel: Kernel) -> int:
    """Candidates in a struct of arrays; 1 for plain numbers."""
    sizes = [np.size(getattr(kernel, each.name)) for each in fields(kernel)]
    return max(sizes) if min(sizes) else 0


def select(kernel: _K, which: Any) -> _K:
    """Some of the candidates: a mask, indices, or one index, which gives plain numbers."""
    chosen: dict[str, Any] = {}
    for each in fields(kernel):
        value = getattr(kernel, each.name)
        if isinstance(value, np.ndarray) and value.ndim:
            value = value[which]
            if not np.ndim(value):
                value = bool(value) if value.dtype == bool else int(value)
        chosen[each.name] = value
    return replace(kernel, **chosen)


def _tiled(place: str, shape: Shape) -> TiledKernel:
    rows = _rows(shape, _ROWS)
    first = _columns(shape.n)
    second = _columns(shape.l) if shape.l else (0.0,)
    sizes, across = _CLUSTERS, (1.0, 2.0, 4.0)
    flags = (0.0, 1.0)
    split = flags if place != "l2" and shape.products == 1 else flags[:1]
    split2 = flags if shape.l else flags[:1]
    kernel = TiledKernel(place, *_grid(rows, first, second, sizes, across, flags, split, split2))
    named = {each: getattr(kernel, each) > 0 for each in ("stacked", "split", "split2")}
    kernel = replace(kernel, **named)
    # A cluster of one CTA is the same however it lies.
    single = (kernel.size == 1) & (kernel.stacked | kernel.split | kernel.split2)
    return select(kernel, ~single)


def _clustered(shape: Shape, given: Mapping[str, int]) -> ClusteredKernel:
    rows, sizes, parts = _grid(
        _given(given, "rows", _rows(shape, _ROWS[:2])),
        _given(given, "cluster", _CLUSTERS),
        _given(given, "parts", _counts(_PARTS)),
    )
    return ClusteredKernel(rows, sizes, parts, given.get("multiple", SLICE))


def _registers(shape: Shape, given: Mapping[str, int]) -> RegisterKernel:
    rows, columns, parts, clustered = _grid(
        _given(given, "rows", _rows(shape, _ROWS[:3])),
        _given(given, "columns", _columns(shape.l)),
        _given(given, "parts", _counts(_PARTS)),
        (0.0, 1.0),
    )
    size = np.where(clustered > 0, parts, 1.0)
    kernel = RegisterKernel(rows, columns, parts, size)
    kernel = select(kernel, ~((clustered > 0) & (parts == 1)))
    return select(kernel, kernel.size == given["cluster"]) if "cluster" in given else kernel


def _given(given: Mapping[str, int], name: str, options: Sequence[float]) -> Sequence[float]:
    """What a field of the tiles may be: what is given, or each option."""
    return (float(given[name]),) if name in given else options


def _rows(shape: Shape, options: Sequence[float]) -> tuple[float, ...]:
    """Rows of tiles that are not mostly empty."""
    return tuple(each for each in options if each < shape.m + 64 or each == options[0])


def _columns(width: int) -> tuple[float, ...]:
    """Columns of tiles: multiples of 8, the fewest for each number of tiles side by side."""
    options = range(8, min(256, -(-width // 8) * 8) + 1, 8)
    fewest = {-(-width // each): each for each in reversed(options)}
    even = [each for each in options if each % 32 == 0]
    return tuple(float(each) for each in sorted({*fewest.values(), *even}))


def _counts(most: int) -> tuple[float, ...]:
    return tuple(float(each) for each in range(1, most + 1))


def _grid(*axes: Sequence[float]) -> list[np.ndarray]:
    """Every combination, as one flat array for each axis."""
    return [each.ravel() for each in np.meshgrid(*map(np.asarray, axes), indexing="ij")]
