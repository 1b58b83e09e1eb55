"""Reads a tile program off a scheduled function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.recover_contraction import merge, read_contraction
from crossfuse.lower.hopper.recover_exchange import read_exchange, slice_tile
from crossfuse.lower.hopper.recover_store import read_store
from crossfuse.lower.hopper.tile_nest import refuse_program, tile_nest
from crossfuse.lower.hopper.tile_program import Place, TileProgram
from crossfuse.lower.tree import coordinate
from crossfuse.schedule.markers import STAGES

_Loops = tuple[Any, ...]


def is_tile_program(func: Any) -> bool:
    """Whether a schedule asks for the Hopper pipeline: a loop has stages."""
    found: list[Any] = []
    ir.walk(func.body, (ir.For, lambda loop: found.append(loop) if _stages(loop) else None))
    return bool(found)


def recover(func: Any) -> TileProgram:
    """Read the tile program of a scheduled function.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Loops over places, inside them loops with stages (two loads and a product of tiles each)
        and the store of the products; between them, if the reduction is split over the cluster,
        the two nests of `dsm_reduce`. Each block has one loop for each of its dimensions.

    Returns
    -------
    TileProgram
        Its tiles.

    Raises
    ------
    LoweringRefused
        Naming the block or loop that has another form.
    """
    outer, parts = _outer_loops(func.body.block.body)
    if len(parts) == 2 and all(_is_bound(each) for each in parts):
        return _recover_split(func, outer, parts)
    loops = [each for each in parts if isinstance(each, ir.For) and _stages(each)]
    others = [each for each in parts if not any(each.same_as(loop) for loop in loops)]
    if not loops or len(others) != 1:
        raise refuse_program(
            "function",
            f"{len(loops)} loops with stages and {len(others)} other nests in a CTA",
            "pipelined loops, then the store of their products",
        )
    contraction = merge([read_contraction(each, outer) for each in loops])
    accumulators = tuple(each.accumulator for each in contraction.products)
    nest = tile_nest(others[0], outer)
    store = read_store(nest, accumulators, contraction.result(contraction.left.buffer))
    return TileProgram(_places(outer), contraction, None, store, tuple(func.params))


def _recover_split(func: Any, outer: _Loops, parts: list[Any]) -> TileProgram:
    """A nest over the ranks that makes partial sums, and one that combines and stores slices."""
    (making, made), (taking, taken) = (_outer_loops(each) for each in parts)
    loops = [each for each in made if isinstance(each, ir.For) and _stages(each)]
    if len(made) != 2 or len(loops) != 1 or len(taken) != 2 or len(making) != len(taking) != 1:
        raise refuse_program(
            "function",
            f"nests of {len(made)} and {len(taken)} parts for each rank",
            "a pipelined loop and the copy to the slab, then the sum of slabs and its store",
        )
    contraction = read_contraction(loops[0], (*outer, *making))
    place, slice_var = _places(making)[0], taking[0].loop_var
    copy = tile_nest(made[1], (*outer, *making))
    combine = tile_nest(taken[0], (*outer, *taking))
    exchange = read_exchange(copy, combine, contraction, place, slice_var)
    whole = contraction.result(contraction.left.buffer)
    part = slice_tile(exchange, whole, slice_var)
    store = read_store(tile_nest(taken[1], (*outer, *taking)), (exchange.combined,), part)
    places = _places((*outer, *making))
    # The epilogue counts rows from the tile's first one.
    store = replace(store, tile=replace(store.tile, origin=whole.origin, shape=whole.shape))
    return TileProgram(places, contraction, exchange, store, tuple(func.params))


def _is_bound(node: Any) -> bool:
    return isinstance(node, ir.For) and coordinate(node).startswith("cluster.")


def _stages(loop: Any) -> bool:
    return STAGES in loop.annotations


def _places(loops: _Loops) -> tuple[Place, ...]:
    return tuple(Place(coordinate(each), each.loop_var, int(each.extent)) for each in loops)


def _outer_loops(node: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Bound loops from the outside, and what stands inside them."""
    loops: list[Any] = []
    while isinstance(node, ir.For) and not _stages(node):
        tag = coordinate(node)
        if not tag.startswith(("blockIdx.", "cluster.")) or ir.constant(node.extent) is None:
            raise refuse_program(
                f"loop '{node.loop_var.name}'",
                f"a loop bound to {tag}" if tag else "a serial loop around the pipelined one",
                "loops of constant extent over the grid and the cluster",
            )
        loops.append(node)
        node = node.body
    return tuple(loops), list(node.seq) if isinstance(node, ir.SeqStmt) else [node]
