"""Reads the store of a slice that stays in the cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.plan.gathered import gathered, side_by_side
from crossfuse.lower.hopper.program.tile import Gather, Store, Tile, covers
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program
from crossfuse.lower.hopper.recover.contraction import is_zero
from crossfuse.lower.hopper.recover.store import accumulator_loads
from crossfuse.lower.stored_elements import implies
from crossfuse.lower.tree import bounds, is_call


def read_slice(
    nest: TileNest, accumulators: tuple[Any, ...], wanted: Tile, gather: Gather
) -> Store:
    """Read an elementwise store to a slab.

    Parameters
    ----------
    nest : TileNest
        The nest.
    accumulators : tuple
        Buffers in registers that it may read.
    wanted : Tile
        What they hold, on any buffer.
    gather : Gather
        Where it goes.

    Returns
    -------
    Store
        Its tile is counted in columns of what the cluster gathers; its value is written in those
        of the product.

    Raises
    ------
    LoweringRefused
        If it is no elementwise store of the accumulators to the CTA's slab.
    """
    body = nest.block.body
    plain = isinstance(body, ir.BufferStore) and body.buffer.same_as(gather.slab)
    loads = accumulator_loads(nest, accumulators) if plain else []
    if not loads or nest.block.init is not None:
        raise refuse_program(
            nest.where, "no elementwise store to the slab", "slab[rank, i, j] = f(C[i, j], ...)"
        )
    row, inner = side_by_side(gather, body.indices)
    tile = gathered(nest.tile(body.buffer, (row, inner)), gather)
    for load in loads:
        _check_accumulator(nest, load, (row, inner), wanted)
    if not nest.known.can_prove_equal(nest.placed(body.indices[0]), gather.place.var):
        raise refuse_program(
            nest.where,
            f"slab {nest.placed(body.indices[0])}",
            f"the slab of CTA {gather.place.var}",
        )
    value, zeros_from = _without_zeros(nest, loads[0])
    column, value = _in_columns_of_product(nest, value, loads[0], inner)
    shape = (max(tile.shape[0], wanted.shape[0]), wanted.shape[1])
    return Store(replace(tile, shape=shape), row, column, value, zeros_from=zeros_from)


def _check_accumulator(nest: TileNest, load: Any, stored: tuple[Any, ...], wanted: Tile) -> None:
    """The accumulator is the one at the row and the column that are stored."""
    tile = nest.tile(load.source, load.indices[-2:])
    moved = [(nest.moved(a), nest.moved(b)) for a, b in zip(load.indices[-2:], stored, strict=True)]
    together = all((a is None) == (b is None) and (a is None or a.same_as(b)) for a, b in moved)
    if not together or not covers(tile, replace(wanted, buffer=tile.buffer), nest.known):
        raise refuse_program(
            nest.where, f"the accumulator at {list(load.indices)}", "the element that is stored"
        )


def _without_zeros(nest: TileNest, load: Any) -> tuple[Any, int | None]:
    """The value that is stored, and the product's column from which on it is zero, or None.

    Raises
    ------
    LoweringRefused
        If it is zero anywhere but beyond the product's columns.
    """
    value = nest.block.body.value
    if not is_call(value, ir.IF_THEN_ELSE):
        return value, None
    condition, zero, inside = value.args
    extent = int(load.source.ty.shape[-1])
    loops = bounds((*nest.around, *nest.loops))
    condition, beyond = nest.placed(condition), extent <= nest.placed(load.indices[-1])
    same = implies(condition, beyond, loops) and implies(beyond, condition, loops)
    if not same or not is_zero(zero):
        raise refuse_program(
            nest.where, f"{zero} where {condition}", f"zeros from column {extent} of the product on"
        )
    return inside, extent


def _in_columns_of_product(nest: TileNest, value: Any, load: Any, inner: Any) -> tuple[Any, Any]:
    """The variable for the product's column; and the value that is stored, in that variable."""
    column = load.indices[-1]
    if column.same_as(inner):
        return column, value
    known = ir.sym.Analyzer()
    rest = known.simplify(column - inner)
    if not isinstance(inner, ir.Var) or any(each.same_as(inner) for each in ir.variables(rest)):
        raise refuse_program(nest.where, f"column {inner}", "one variable for the column")
    image = ir.Var("column", str(inner.ty))
    moved = ir.substitute(value, lambda var: image - rest if var.same_as(inner) else var)
    moved = known.simplify(moved)
    for other in ir.variables(rest):
        if any(each.same_as(other) for each in ir.variables(moved)):
            raise refuse_program(
                nest.where, f"a value that depends on '{other.name}'", "on row and column alone"
            )
    return image, moved
