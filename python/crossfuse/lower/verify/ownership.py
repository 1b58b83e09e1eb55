"""Who owns an element: proofs that a coordinate of the grid follows from a buffer's index."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.access import row_major
from crossfuse.lower.tree import Access, analyzer, coordinate, coordinate_loop

#: A number read off an index.
Projection = Callable[[list[Any]], Any]


def extents(loops: tuple[Any, ...]) -> dict[str, int | None]:
    """Coordinates that loops are bound to, with their extents; unit loops are left out."""
    found = {coordinate(loop): ir.constant(loop.extent) for loop in loops if coordinate(loop)}
    return {tag: extent for tag, extent in found.items() if extent != 1}


def stray_access(mine: list[Access], tag: str) -> Access | None:
    """An access that may touch an element of another place on a coordinate of the grid.

    Parameters
    ----------
    mine : list[Access]
        All accesses to one buffer, one at least.
    tag : str
        The coordinate, such as ``"cluster.x"``.

    Returns
    -------
    Access | None
        None if one function of the index gives the coordinate at every access: then each element
        is touched by one place only.
    """
    for access in mine:
        if access.indices is None or coordinate_loop(access.loops, tag) is None:
            return access
    reference = next((each for each in mine if each.write), mine[0])
    stray: Access | None = reference
    for owner in _owners(reference, tag):
        stray = next((each for each in mine if not _agrees(each, tag, owner)), None)
        if stray is None:
            return None
    return stray


def _owners(access: Access, tag: str) -> list[Projection]:
    """Functions of the index that might give the coordinate, read off one access."""
    loop = coordinate_loop(access.loops, tag)
    count = ir.constant(loop.extent)
    if count is None:
        return []
    known = analyzer(access.loops)
    owners: list[Projection] = []
    for select in _projections(access):
        index = known.simplify(select(list(access.indices or ())))
        terms = ir.sym.detect_linear_equation(index, [loop.loop_var])
        scale = ir.constant(known.simplify(terms[0])) if terms else None
        if scale is not None and scale > 0:
            owners.append(_digit(select, scale, count))
    return owners


def _digit(select: Projection, scale: int, count: int) -> Projection:
    def owner(indices: list[Any]) -> Any:
        return ir.tirx.floormod(ir.tirx.floordiv(select(indices), scale), count)

    return owner


def _projections(access: Access) -> list[Projection]:
    """Each dimension of the index, and its row-major position where extents are known."""
    shape = [ir.constant(extent) for extent in access.buffer.ty.shape]
    found: list[Projection] = [itemgetter(dimension) for dimension in range(len(shape))]
    if len(shape) > 1 and None not in shape:
        found.append(lambda indices: row_major(indices, shape))
    return found


def _agrees(access: Access, tag: str, owner: Projection) -> bool:
    loop = coordinate_loop(access.loops, tag)
    place = owner(list(access.indices or ()))
    return bool(analyzer(access.loops).can_prove_equal(place, loop.loop_var))
