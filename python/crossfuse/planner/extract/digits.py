"""Loops that are several in one: where indices take a quotient and a remainder of one.

A loop over ``i`` whose indices have ``i // 4`` and ``i % 4`` is two loops: one of them may be a
batch, and the other the rows of its matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.read import Block


def radices(indices: Iterable[Any], domain: access.Domain) -> dict[Any, tuple[int, ...]]:
    """Say where loops fall apart.

    Parameters
    ----------
    indices : Iterable[Any]
        All that a block reads at, in their simplest form.
    domain : Mapping[Any, int]
        Its loops.

    Returns
    -------
    dict[Any, tuple[int, ...]]
        Strides of the parts of each loop, from the largest to 1; loops that are whole, and those
        whose parts overlap, are left out.
    """
    cuts: dict[Any, set[int]] = {}
    for index in indices:
        ir.walk(index, (ir.tirx.FloorDiv, lambda node: _note(cuts, node)))
        ir.walk(index, (ir.tirx.FloorMod, lambda node: _note(cuts, node)))
    found = {}
    for var, present in cuts.items():
        extent = domain[var]
        strides = sorted((each for each in present if 1 < each < extent), reverse=True)
        nested = all(a % b == 0 for a, b in zip([extent, *strides], strides, strict=False))
        if strides and nested:
            found[var] = (*strides, 1)
    return found


def _note(cuts: dict[Any, set[int]], node: Any) -> None:
    """Where a quotient or remainder cuts its variable: after strides that divide each other."""
    inner, size = node.a, ir.constant(node.b)
    if size is None:
        return
    if isinstance(inner, ir.Var):
        cuts.setdefault(inner, set()).add(size)
    elif isinstance(inner, ir.tirx.FloorDiv) and isinstance(inner.a, ir.Var):
        cuts.setdefault(inner.a, set()).add(size * (ir.constant(inner.b) or 1))
    elif isinstance(inner, ir.tirx.FloorMod) and isinstance(inner.a, ir.Var):
        cuts.setdefault(inner.a, set()).add(size)


def taken_apart(block: Block, strides: Mapping[Any, Sequence[int]]) -> Block:
    """A block over the parts of its loops.

    Parameters
    ----------
    block : Block
        Its coordinates are those of its buffer.
    strides : Mapping
        From `radices`.

    Returns
    -------
    Block
        With a coordinate for each part; `Block.strides` says how they make up the buffer's.
    """
    values: dict[Any, Any] = {}
    domain: dict[Any, int] = {}
    parts: dict[Any, list[Any]] = {}
    for var, extent in block.domain.items():
        parts[var], rest = [], extent
        for stride in strides.get(var, (1,)):
            part = ir.Var(f"{var.name}_{stride}", str(var.ty)) if var in strides else var
            parts[var].append(part)
            domain[part] = rest // stride
            values[var] = part * stride + values[var] if var in values else part * stride
            rest = stride
    (value,) = access.replaced([block.value], values, {})
    return replace(
        block,
        coordinates=tuple(part for each in block.coordinates for part in parts[each]),
        summed=tuple(part for each in block.summed for part in parts[each]),
        domain=domain,
        value=value,
        strides=tuple(tuple(strides.get(each, (1,))) for each in block.coordinates),
    )


def apart(block: Block, indices: Sequence[Any]) -> list[Any]:
    """Indices of a block's buffer as indices of its coordinates."""
    if not block.strides:
        return list(indices)
    found = []
    extents = iter(block.domain[each] for each in block.coordinates)
    for index, strides in zip(indices, block.strides, strict=True):
        for place, stride in enumerate(strides):
            extent = next(extents)
            part = index // stride if stride > 1 else index
            found.append(part % extent if place else part)
    return found
