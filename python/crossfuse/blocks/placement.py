"""Which elements of a buffer a block writes, and that it writes each of them once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.access import is_reduction
from crossfuse.errors import PlanRefused, RefusedError, refuse

# Refusals of blocks that do not say plainly what they compute.

#: What to do with a function that says no more what it computes.
LOWERED = "extract the chain before the function is lowered"


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a function; see `crossfuse.errors.Refusal`."""
    return refuse(PlanRefused, "extract", where, found=found, limit=limit, instead=instead)


_WHOLE = "write each buffer by one block, all of it"


@dataclass(frozen=True, eq=False)
class Placement:
    """Which elements of a buffer a block writes; `Block` has the first three fields too."""

    coordinates: tuple[Any, ...]
    summed: tuple[Any, ...]
    domain: Mapping[Any, int]
    #: The block's own variables, except reduced ones, in terms of the coordinates.
    inside: Mapping[Any, Any]


def placement(loops: tuple[Any, ...], realize: Any, store: Any) -> Placement:
    """Work out which elements a block's store writes, given the loops around the block.

    What does not write each element of the buffer once raises `PlanRefused`, as in `read_blocks`.
    """
    node = realize.block
    where = f"block '{node.name_hint}'"
    check_plain(node)
    domain = {each.var: _extent(each, where) for each in node.iter_vars}
    _check_bindings(loops, realize, domain, where)
    summed = tuple(each.var for each in node.iter_vars if is_reduction(each))
    coordinates, inside = _coordinates(store, where, summed, domain)
    extents = dict(zip(coordinates, shape_of(store.buffer, where), strict=True))
    extents |= {var: domain[var] for var in summed}
    return Placement(coordinates, summed, extents, inside)


def shape_of(buffer: Any, where: str) -> tuple[int, ...]:
    """Extents of a buffer; `PlanRefused` if one is not constant."""
    shape = buffer.ty.shape
    return tuple(_constant(each, f"{where}, buffer '{buffer.name}'", "extent") for each in shape)


def check_plain(block: Any) -> None:
    """Refuse a block that sees buffers through views, with `PlanRefused` as `placement`."""
    if len(block.match_buffers):
        name = block.match_buffers[0].buffer.name
        where = f"block '{block.name_hint}', buffer '{name}'"
        raise refused(where, "a view by match_buffer", "buffers as they are", LOWERED)


def _extent(each: Any, where: str) -> int:
    where = f"{where}, loop '{each.var.name}'"
    first = _constant(each.dom.min, where, "first value")
    if first:
        raise refused(where, f"a loop from {first}", "loops from 0", "shift the loop and indices")
    return _constant(each.dom.extent, where, "extent")


def _constant(value: Any, where: str, what: str) -> int:
    number = ir.constant(value)
    if number is None:
        instead = "build the function for one number of rows; plans are made for each"
        raise refused(where, f"{what} {value}", "constant extents", instead)
    return number


def _check_bindings(loops: tuple[Any, ...], realize: Any, domain: Any, where: str) -> None:
    """Refuse loops that do not run each iteration of the block exactly once."""
    counts = {}
    for loop in loops:
        named = f"{where}, loop '{loop.loop_var.name}'"
        if ir.constant(loop.min) != 0:
            raise refused(named, f"a loop from {loop.min}", "loops from 0", "shift the loop")
        counts[loop.loop_var] = _constant(loop.extent, named, "extent")
    predicate = None if ir.constant(realize.predicate) == 1 else realize.predicate
    if access.inverse(list(realize.iter_values), domain, counts, predicate) is None:
        found = ", ".join(f"{var.name} = {value}" for var, value in _bound(realize))
        instead = "extract the chain from the function before it is scheduled"
        raise refused(where, found, "loops that run each iteration of a block once", instead)


def _bound(realize: Any) -> list[tuple[Any, Any]]:
    names = (each.var for each in realize.block.iter_vars)
    return list(zip(names, realize.iter_values, strict=True))


def _coordinates(
    store: Any, where: str, summed: tuple[Any, ...], domain: Mapping[Any, int]
) -> tuple[tuple[Any, ...], dict[Any, Any]]:
    """New variables for the buffer's dimensions, and the block's own variables in terms of them."""
    shape = shape_of(store.buffer, where)
    spatial = {var: extent for var, extent in domain.items() if var not in summed}
    # As wide as the loops, so that no conversion stands in the way of simpler indices.
    wide = any(str(var.ty) == "int64" for var in domain)
    dtype = "int64" if wide else "int32"
    names = tuple(ir.Var(f"i{each}", dtype) for each in range(len(shape)))
    extents = dict(zip(names, shape, strict=True))
    indices = list(store.indices)
    if not all(access.is_affine(each) for each in indices):
        inside = None
    else:
        inside = access.inverse(indices, extents, spatial)
    if inside is None:
        place = ", ".join(str(each) for each in indices)
        found = f"a store to [{place}] of {list(shape)}"
        where = f"{where}, buffer '{store.buffer.name}'"
        raise refused(where, found, "each element of the buffer once, at affine indices", _WHOLE)
    return names, inside
