"""Reads what CTAs exchange: a reduction split over a cluster, or the products of a pair."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place, Tile, TileNest, refuse_program
from crossfuse.lower.hopper.program.tile_program import Contraction, Exchange, TileProgram
from crossfuse.lower.hopper.recover.contraction import accumulates
from crossfuse.markers import DSM_SCOPE, PAIRED

# A reduction that is split over a cluster: partial tiles in slabs, combined in slices.


def read_exchange(
    copy: TileNest, combine: TileNest, contraction: Contraction, place: Place, slice_var: Any
) -> Exchange:
    """Read the two nests of `dsm_reduce`: which slice each CTA combines, and into which buffer.

    `copy` takes the partial tile from registers to the slab of the CTA; `combine` adds the slabs of
    all CTAs along `place`, each CTA over its own slice of the tile. Nests that are not as
    `dsm_reduce` writes them are refused.
    """
    (product,) = contraction.products
    rank = copy.placed(copy.block.body.indices[0])
    if not copy.known.can_prove_equal(rank, place.var):
        raise refuse_program(copy.where, f"slab {rank}", f"the slab of CTA {place.var}")
    slab, width = _slab(copy, product.accumulator, contraction)
    elements = _slice(combine, slab, contraction, place, slice_var, width)
    return Exchange(place, elements, width, combine.block.body.buffer)


def slice_tile(exchange: Exchange, whole: Tile, slice_var: Any) -> Tile:
    """A CTA's slice as a tile of the output: whole rows, or an equal part of one.

    Slices of any other shape are refused.
    """
    row, column = whole.origin
    if exchange.rows:
        origin = (row + slice_var * exchange.rows, column)
        return Tile(whole.buffer, origin, (exchange.rows, whole.shape[1]))
    if exchange.width % exchange.elements:
        raise refuse_program(
            f"axis {exchange.place.tag}",
            f"slices of {exchange.elements} elements of rows of {exchange.width}",
            "whole rows, or equal parts of a row",
        )
    first = slice_var * exchange.elements
    origin = (
        row + ir.tirx.floordiv(first, exchange.width),
        column + ir.tirx.floormod(first, exchange.width),
    )
    return Tile(whole.buffer, origin, (1, exchange.elements))


def _slab(nest: TileNest, accumulator: Any, contraction: Contraction) -> tuple[Any, int]:
    """The slabs that a copy of the whole tile fills, and the width of the tile in them."""
    body = nest.block.body
    plain = (
        isinstance(body, ir.BufferStore)
        and isinstance(body.value, ir.TensorLoad)
        and body.value.source.same_as(accumulator)
        and str(body.buffer.scope()) == DSM_SCOPE
        and ir.are_same(body.indices, body.value.indices)
    )
    shape, wanted = [0, 0], (contraction.rows, contraction.columns)
    if plain:
        loops = [nest.moved(each) for each in body.indices[-2:]]
        shape = [1 if each is None else int(each.extent) for each in loops]
        limits = [int(each) for each in list(body.buffer.ty.shape)[-2:]]
        plain = all(
            has in (size, limit) for has, size, limit in zip(shape, wanted, limits, strict=True)
        )
    if not plain:
        raise refuse_program(
            nest.where,
            "no copy of the partial tile to a slab",
            "the partial tile in scope shared.dsm",
        )
    return body.buffer, shape[1]


def _slice(
    nest: TileNest,
    slab: Any,
    contraction: Contraction,
    place: Place,
    slice_var: Any,
    width: int,
) -> int:
    """Elements of a slice, after a check that slices follow each other, row by row."""
    body = nest.block.body
    elements, ranks = _combined(nest, slab, place)
    count = prod(int(each.extent) for each in elements)
    row, column = _in_slice(elements, slice_var, count, width)
    origin = contraction.result(slab).origin
    wanted = (origin[0] + row, origin[1] + column)
    here = all(
        nest.known.can_prove_equal(nest.placed(index), value)
        for index, value in zip(body.indices, wanted, strict=True)
    )
    whole = len(elements) < 2 or int(elements[1].extent) == width
    if not here or not whole or int(ranks.extent) != place.extent:
        raise refuse_program(
            nest.where,
            f"slices of {count} elements, at {nest.placed(body.indices[0])}",
            f"slices that follow each other in rows of {width} elements",
        )
    if count * place.extent > contraction.rows * width:
        raise refuse_program(
            nest.where,
            f"{place.extent} slices of {count} elements",
            f"slices of the {contraction.rows * width} elements of a tile",
        )
    nest.check_predicate(body.buffer)
    return count


def _in_slice(elements: list[Any], slice_var: Any, count: int, width: int) -> tuple[Any, Any]:
    """Row and column in the tile of an element of a slice: of whole rows, or counted row by row."""
    if len(elements) == 2:
        row, column = elements
        return slice_var * int(row.extent) + row.loop_var, column.loop_var
    position = slice_var * count + (elements[0].loop_var if elements else 0)
    return ir.tirx.floordiv(position, width), ir.tirx.floormod(position, width)


def _combined(nest: TileNest, slab: Any, place: Place) -> tuple[list[Any], Any]:
    """Loops over the elements of a slice, or its rows and columns, and the loop over the ranks."""
    body = nest.block.body
    value = body.value if isinstance(body, ir.BufferStore) else None
    loads = [value.a, value.b] if isinstance(value, ir.tirx.Add) else []
    sums = (
        len(loads) == 2
        and all(isinstance(each, ir.TensorLoad) for each in loads)
        and accumulates(body)
        and loads[1].source.same_as(slab)
        and ir.are_same(loads[1].indices[1:], body.indices)
    )
    if not sums or len(nest.loops) > 3:
        raise refuse_program(
            nest.where, f"the statement {value}", "C[i, j] + slab[rank, i, j] over ranks"
        )
    ranks = nest.moved(loads[1].indices[0])
    elements = [each for each in nest.loops if ranks is None or not each.same_as(ranks)]
    if ranks is None or len(elements) > 2:
        raise refuse_program(
            nest.where, "no loop over ranks", f"a sum over the {place.extent} slabs"
        )
    return elements, ranks


# Two products of one tile that two CTAs of a cluster make, one each.


def paired(program: TileProgram, nest: TileNest) -> TileProgram:
    """Let each CTA of a pair make one product of all rows, and store its half of them.

    In the program that is read, each CTA makes both products of its half of the rows. Afterwards
    each loads one right operand instead of both, and the halves are exchanged through DSM. Refuses
    any but two products, and halves that are not those of two CTAs of one cluster axis.
    """
    contraction = program.contraction
    place = _place(program, nest)
    known = program.analyzer
    row, depth = contraction.left.origin
    first = ir.at_zero(row, place.var)
    moved = known.can_prove_equal(row - first, place.var * contraction.rows)
    columns = [index for each in contraction.products for index in each.right.origin]
    uses = any(ir.mentions(each, place.var) for each in columns)
    if len(contraction.products) != 2 or not moved or uses:
        raise refuse_program(
            nest.where,
            f"{len(contraction.products)} products of {contraction.rows} rows from {row}",
            f"two products, whose rows alone differ between the CTAs of axis {place.tag}: "
            f"{place.var} * {contraction.rows} further down",
        )
    whole = Tile(contraction.left.buffer, (first, depth), (2 * contraction.rows, contraction.depth))
    # Another product in the second CTA.
    first_product, second_product = contraction.products
    products = (replace(first_product, instead=second_product),)
    made = replace(contraction, left=whole, products=products)
    elements = contraction.rows * contraction.columns
    exchange = Exchange(place, elements, contraction.columns, None, pair=True)
    tile = made.result(program.store.tile.buffer)
    store = replace(program.store, tile=tile)
    return replace(program, contraction=made, exchange=exchange, store=store)


def _place(program: TileProgram, nest: TileNest) -> Place:
    """The cluster axis of two CTAs that the mark names."""
    axis = str(nest.block.annotations[PAIRED])
    for place in program.cluster:
        if place.tag == f"cluster.{axis}" and place.extent == 2:
            return place
    found = ", ".join(f"{each.tag} of {each.extent}" for each in program.cluster) or "no axes"
    raise refuse_program(
        nest.where, f"a pair along axis '{axis}' in a cluster with {found}", "an axis of two CTAs"
    )
