"""Reads tiles whose two products are made by two CTAs of a cluster, one each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place, Tile
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program
from crossfuse.lower.hopper.program.tile_program import Contraction, Exchange, TileProgram
from crossfuse.markers import PAIRED


def is_paired(nest: TileNest) -> bool:
    """Whether the store of two products is marked."""
    return PAIRED in nest.block.annotations


def paired(program: TileProgram, nest: TileNest) -> TileProgram:
    """Let each CTA of a pair make one product of all rows, and store its half of them.

    Parameters
    ----------
    program : TileProgram
        In which each CTA makes both products of its half.
    nest : TileNest
        The store.

    Returns
    -------
    TileProgram
        With the tile of both halves, and the exchange of halves.

    Raises
    ------
    LoweringRefused
        If there are not two products, or the halves are not those of two CTAs.
    """
    contraction = program.contraction
    place = _place(program, nest)
    known = program.analyzer
    row, depth = contraction.left.origin
    first = ir.substitute(row, lambda var: _zero(var) if var.same_as(place.var) else var)
    moved = known.can_prove_equal(row - first, place.var * contraction.rows)
    columns = [index for each in contraction.products for index in each.right.origin]
    if len(contraction.products) != 2 or not moved or any(_uses(each, place) for each in columns):
        raise refuse_program(
            nest.where,
            f"{len(contraction.products)} products of {contraction.rows} rows from {row}",
            f"two products, whose rows alone differ between the CTAs of axis {place.tag}: "
            f"{place.var} * {contraction.rows} further down",
        )
    whole = Tile(contraction.left.buffer, (first, depth), (2 * contraction.rows, contraction.depth))
    made = _one_each(contraction, whole)
    elements = contraction.rows * contraction.columns
    exchange = Exchange(place, elements, contraction.columns, None, pair=True)
    tile = made.result(program.store.tile.buffer)
    store = replace(program.store, tile=tile)
    return replace(program, contraction=made, exchange=exchange, store=store)


def _one_each(contraction: Contraction, left: Tile) -> Contraction:
    """The same loop with one product, which is another one in the second CTA."""
    first, second = contraction.products
    return replace(contraction, left=left, products=(replace(first, instead=second),))


def _place(program: TileProgram, nest: TileNest) -> Place:
    """The axis that the mark names."""
    axis = str(nest.block.annotations[PAIRED])
    for place in program.cluster:
        if place.tag == f"cluster.{axis}" and place.extent == 2:
            return place
    found = ", ".join(f"{each.tag} of {each.extent}" for each in program.cluster) or "no axes"
    raise refuse_program(
        nest.where, f"a pair along axis '{axis}' in a cluster with {found}", "an axis of two CTAs"
    )


def _zero(var: Any) -> Any:
    return ir.tirx.IntImm(str(var.ty), 0)


def _uses(index: Any, place: Place) -> bool:
    return any(var.same_as(place.var) for var in ir.variables(index))
