"""Reads what a CTA does by itself: pipelined loops over one left operand, then one store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Gather, KeptTile, Store, Tile
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program, tile_nest
from crossfuse.lower.hopper.program.tile_program import Contraction
from crossfuse.lower.hopper.recover.contraction import check_reduction, read_contraction
from crossfuse.lower.hopper.recover.merge import merge
from crossfuse.lower.hopper.recover.places import Loops, has_stages
from crossfuse.lower.hopper.recover.store import read_store

ReadStore = Callable[[TileNest, tuple[Any, ...], Tile], Store]


def pipelined(parts: list[Any]) -> tuple[list[Any], Any]:
    """Loops with stages, and the nest that stores what they compute.

    Raises
    ------
    LoweringRefused
        If there is anything else.
    """
    loops = [each for each in parts if isinstance(each, ir.For) and has_stages(each)]
    others = [each for each in parts if not any(each.same_as(loop) for loop in loops)]
    if not loops or len(others) != 1:
        raise refuse_program(
            "function",
            f"{len(loops)} loops with stages and {len(others)} other nests in a CTA",
            "pipelined loops, then the store of their products",
        )
    return loops, others[0]


def read_products(
    loops: list[Any],
    store: Any,
    outer: Loops,
    read: ReadStore = read_store,
    *,
    takes: Gather | KeptTile | None = None,
) -> tuple[Contraction, Store, TileNest]:
    """Read pipelined loops and the store of their products.

    Parameters
    ----------
    loops : list
        Loops with stages.
    store : Any
        The nest behind them.
    outer : tuple
        Loops around both.
    read : Callable
        Reads the store, as `read_store` does.
    takes : Gather | KeptTile | None
        Where the left operand comes from, if the cluster has gathered it or this CTA has kept it.
    """
    contraction = merge([read_contraction(each, outer, takes) for each in loops])
    if not isinstance(takes, KeptTile):  # of which a CTA makes a part
        check_reduction(contraction, None)
    accumulators = tuple(each.accumulator for each in contraction.products)
    nest = tile_nest(store, outer)
    wanted = contraction.result(contraction.left.buffer)
    found = read(nest, accumulators, wanted)
    return with_rows(contraction, found.tile.shape[0]), found, nest


def with_rows(contraction: Contraction, rows: int) -> Contraction:
    """The contraction of as many rows as its store has: TVM leaves out what no tensor has."""
    left = replace(contraction.left, shape=(rows, contraction.depth))
    return replace(contraction, left=left)
