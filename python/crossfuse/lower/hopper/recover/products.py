"""Reads what a CTA does by itself: pipelined loops over one left operand, then one store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Gather, KeptTile, Place, Store, Tile, covers
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program, tile_nest
from crossfuse.lower.hopper.program.tile_program import Contraction, TileProgram
from crossfuse.lower.hopper.recover.contraction import (
    check_reduction,
    first_of_reduction,
    read_contraction,
)
from crossfuse.lower.hopper.recover.store import (
    Loops,
    has_stages,
    inner_block,
    places_of,
    read_store,
)
from crossfuse.lower.hopper.recover.sums import is_partial, read_partial
from crossfuse.markers import GRID_STAGE

# Several loops over the same left tiles (as of a gated layer), read as one that loads them once.


def merge(contractions: list[Contraction]) -> Contraction:
    """Several loops that load the same left tiles, as one that loads them once.

    Refuses loops whose steps, left tiles or shapes differ.
    """
    first, *others = contractions
    known = ir.sym.Analyzer()
    products = list(first.products)
    for other in others:
        moved = _on_step(other, first.step)
        same = (
            other.steps == first.steps
            and moved.left.buffer.same_as(first.left.buffer)
            and covers(moved.left, first.left, known)
            and covers(moved.result(first.left.buffer), first.result(first.left.buffer), known)
        )
        if not same:
            raise refuse_program(
                f"loop '{other.step.name}'",
                f"{other.steps} steps of tiles of '{other.left.buffer.name}'",
                f"the {first.steps} steps and left tiles of loop '{first.step.name}', so that both "
                "are loaded once",
            )
        products += moved.products
    stages = max(each.stages for each in contractions)
    constant = all(each.constant for each in contractions)
    return replace(first, products=tuple(products), stages=stages, constant=constant)


def _on_step(contraction: Contraction, step: Any) -> Contraction:
    """The same loop with another variable."""

    def moved(tile: Tile) -> Tile:
        origin = (ir.substitute(each, {contraction.step: step}) for each in tile.origin)
        return replace(tile, origin=tuple(origin))

    products = tuple(replace(each, right=moved(each.right)) for each in contraction.products)
    return replace(contraction, step=step, left=moved(contraction.left), products=products)


def pipelined(parts: list[Any]) -> tuple[list[Any], Any]:
    """Loops with stages, and the one nest that stores what they compute; refuses anything else."""
    loops = [each for each in parts if isinstance(each, ir.For) and has_stages(each)]
    others = [each for each in parts if not ir.among(each, loops)]
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
    read: Callable[[TileNest, tuple[Any, ...], Tile], Store] = read_store,
    *,
    takes: Gather | KeptTile | None = None,
) -> tuple[Contraction, Store, TileNest]:
    """Read pipelined loops and the store of their products.

    `read` reads the store, as `read_store` does; `takes` is where the left operand comes from if
    the cluster has gathered it or this CTA has it in registers.
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
    """The contraction with as many rows as its store has: TVM leaves out what no tensor has."""
    left = replace(contraction.left, shape=(rows, contraction.depth))
    return replace(contraction, left=left)


# A chain whose intermediate stays in registers: an elementwise block between two loops.

Read = tuple[Contraction, Store, TileNest]


def is_kept(parts: list[Any]) -> bool:
    """Whether one of a CTA's nests stores to registers."""
    return any(map(_stores_locally, parts))


def _stores_locally(node: Any) -> bool:
    body = getattr(inner_block(node), "body", None)
    return isinstance(body, ir.BufferStore) and str(body.buffer.scope()) == "local"


def recover_kept(
    memory: tuple[Any, ...], outer: Loops, parts: list[Any]
) -> tuple[TileProgram, ...]:
    """Read the nests of a CTA whose intermediate stays in registers, as two phases.

    `parts` are loops with stages and the store of their products to registers, then loops that
    multiply what is there and the store of their products. The first phase keeps its tile, the
    second multiplies it.
    """
    first, kept, rest = read_kept(outer, parts)
    loops, store_nest = pipelined(rest)
    read_second = read_partial if is_partial(store_nest) else read_store
    second = read_products(loops, store_nest, outer, read_second, takes=kept)
    check_taken(kept, second[0])
    rows = max(first[0].rows, second[0].rows)
    places = places_of(outer)
    return tuple(phase_program(memory, places, each, rows) for each in (first, second))


def read_kept(outer: Loops, parts: list[Any]) -> tuple[Read, KeptTile, list[Any]]:
    """Read the first products of a CTA's nests: them, the tile in registers, and the nests behind.

    The nests are those of `recover_kept`.
    """
    end = next(i for i, each in enumerate(parts) if _stores_locally(each)) + 1
    first = read_products(*pipelined(parts[:end]), outer, _read_kept)
    kept = first[1].tile
    assert isinstance(kept, KeptTile)
    return first, kept, parts[end:]


def phase_program(
    memory: tuple[Any, ...], places: tuple[Place, ...], read: Read, rows: int
) -> TileProgram:
    """One phase of a chain on the chip: tiles of both phases have as many rows."""
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
    """Refuse a second product that does not sum all columns in registers, of the same rows."""
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
