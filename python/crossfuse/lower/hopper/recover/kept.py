"""Reads a chain whose intermediate stays in registers: an elementwise block between two loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import KeptTile, Place, Store, Tile
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program
from crossfuse.lower.hopper.program.tile_program import Contraction, TileProgram
from crossfuse.lower.hopper.recover.contraction import first_of_reduction
from crossfuse.lower.hopper.recover.places import Loops, has_stages, places_of
from crossfuse.lower.hopper.recover.products import pipelined, read_products, with_rows
from crossfuse.lower.hopper.recover.store import read_store
from crossfuse.lower.hopper.recover.sum import is_partial, read_partial
from crossfuse.markers import GRID_STAGE

Read = tuple[Contraction, Store, TileNest]


def is_kept(parts: list[Any]) -> bool:
    """Whether one of a CTA's nests stores to registers."""
    return any(_stores_locally(each) for each in parts)


def _stores_locally(node: Any) -> bool:
    while isinstance(node, ir.For) and not has_stages(node):
        node = node.body
    body = node.block.body if isinstance(node, ir.SBlockRealize) else None
    return isinstance(body, ir.BufferStore) and str(body.buffer.scope()) == "local"


def recover_kept(
    memory: tuple[Any, ...], outer: Loops, parts: list[Any]
) -> tuple[TileProgram, ...]:
    """Read the nests of a CTA.

    Parameters
    ----------
    memory : tuple
        Everything in global memory.
    outer : tuple
        Loops around them.
    parts : list
        Loops with stages and the store of their products to registers, then loops that multiply
        what is there and the store of their products.

    Returns
    -------
    tuple[TileProgram, ...]
        The phase that keeps its tile, and the one that multiplies it.

    Raises
    ------
    LoweringRefused
        Naming the block that has another form.
    """
    first, kept, rest = read_kept(outer, parts)
    loops, store_nest = pipelined(rest)
    read_second = read_partial if is_partial(store_nest) else read_store
    second = read_products(loops, store_nest, outer, read_second, takes=kept)
    check_taken(kept, second[0])
    rows = max(first[0].rows, second[0].rows)
    places = places_of(outer)
    return tuple(kept_program(memory, places, each, rows) for each in (first, second))


def read_kept(outer: Loops, parts: list[Any]) -> tuple[Read, KeptTile, list[Any]]:
    """Read the first products of a CTA's nests.

    Parameters
    ----------
    outer : tuple
        Loops around them.
    parts : list
        As for `recover_kept`.

    Returns
    -------
    tuple
        The products with their store; the tile that is kept; and the nests behind them.
    """
    end = next(i for i, each in enumerate(parts) if _stores_locally(each)) + 1
    first = read_products(*pipelined(parts[:end]), outer, _read_kept)
    kept = first[1].tile
    assert isinstance(kept, KeptTile)
    return first, kept, parts[end:]


def kept_program(
    memory: tuple[Any, ...], places: tuple[Place, ...], read: Read, rows: int
) -> TileProgram:
    """One phase of such a chain; tiles of both have as many rows."""
    contraction, store, nest = read
    store = replace(store, tile=replace(store.tile, shape=(rows, store.tile.shape[1])))
    staged = GRID_STAGE in nest.block.annotations
    contraction = with_rows(contraction, rows)
    return TileProgram(places, contraction, None, store, memory, staged=staged)


def _read_kept(nest: TileNest, accumulators: tuple[Any, ...], wanted: Tile) -> Store:
    """Read an elementwise store to registers."""
    store = read_store(nest, accumulators, wanted)
    tile = store.tile
    end, extent = tile.origin[1] + tile.shape[1], tile.extents[1]
    # The next product takes all of the tile: what an activation makes of zero is left out.
    beyond = None if nest.known.can_prove(end <= extent) else extent
    kept = KeptTile(tile.buffer, tile.origin, tile.shape)
    return replace(store, tile=kept, zeros_from=beyond)


def check_taken(kept: Tile, contraction: Contraction) -> None:
    """The second product sums all columns that are kept, of the same rows.

    Raises
    ------
    LoweringRefused
        Naming the columns that it sums.
    """
    taken = contraction.left
    first, columns = first_of_reduction(contraction), contraction.steps * contraction.depth
    known = ir.sym.Analyzer()
    same = known.can_prove_equal(taken.origin[0], kept.origin[0])
    if not same or not known.can_prove_equal(first, kept.origin[1]) or columns != kept.shape[1]:
        raise refuse_program(
            f"tensor '{kept.buffer.name}'",
            f"{columns} columns from {first} of the rows from {taken.origin[0]}",
            f"all {kept.shape[1]} columns that the CTA keeps, from {kept.origin[1]}, of the rows "
            f"from {kept.origin[0]}",
        )
