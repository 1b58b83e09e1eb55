"""Reads the epilogue of a tile program, and the axes of the grid that its tiles lie along."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.epilogue.operands import READ_TYPES
from crossfuse.lower.hopper.program.tile import Place, Store, Tile, covers
from crossfuse.lower.hopper.program.tile_nest import TileNest, check_start, refuse_program
from crossfuse.lower.tree import coordinate
from crossfuse.markers import STAGES

# The epilogue of a tile program.


def read_store(nest: TileNest, accumulators: tuple[Any, ...], wanted: Tile) -> Store:
    """Read the epilogue: an elementwise store of accumulators to the tile that they are of.

    `wanted` is that tile, on any buffer; a store of another one is refused.
    """
    body = nest.block.body
    plain = isinstance(body, ir.BufferStore) and len(body.indices) == 2
    if not plain or nest.block.init is not None:
        raise refuse_program(
            nest.where, "no elementwise store of a matrix", "out[i, j] = f(C[i, j], ...)"
        )
    row, column = body.indices
    check_loads(nest, accumulators)
    tile = nest.tile(body.buffer, body.indices)
    if not covers(tile, replace(wanted, buffer=tile.buffer), nest.known):
        raise refuse_program(
            f"store of '{tile.buffer.name}'",
            f"a tile of {tile.shape} from {list(tile.origin)}",
            f"the product's, {wanted.shape} from {list(wanted.origin)}",
        )
    shape = (max(tile.shape[0], wanted.shape[0]), wanted.shape[1])
    return Store(replace(tile, shape=shape), row, column, body.value)


def accumulator_loads(nest: TileNest, accumulators: tuple[Any, ...]) -> list[Any]:
    """Loads of accumulators in the value that a nest stores.

    Its other loads must be of global memory and of a type of `READ_TYPES`; others are refused.
    """
    loads = ir.buffer_loads(nest.block.body.value)
    ours = [each for each in loads if ir.among(each.source, accumulators)]
    for load in loads:
        if ir.among(load, ours):
            continue
        if not ir.is_global(load.source):
            raise refuse_program(
                nest.where, f"a load of '{load.source.name}'", "the accumulator and parameters"
            )
        if str(load.source.ty.dtype) not in READ_TYPES:
            raise refuse_program(
                nest.where,
                f"a load of '{load.source.name}' of {load.source.ty.dtype}",
                f"further operands of {', '.join(READ_TYPES)}",
            )
    return ours


def check_loads(nest: TileNest, accumulators: tuple[Any, ...]) -> None:
    """Refuse a store of anything but the accumulators of the element that is stored."""
    for load in accumulator_loads(nest, accumulators):
        if not ir.are_same(load.indices, nest.block.body.indices):
            raise refuse_program(
                nest.where, f"the accumulator at {list(load.indices)}", "the element that is stored"
            )


# The loops over places: clusters of the grid, and the CTAs of a cluster.

Loops = tuple[Any, ...]


def is_bound(node: Any) -> bool:
    """Whether a node is a loop over the CTAs of a cluster."""
    return isinstance(node, ir.For) and coordinate(node).startswith("cluster.")


def is_place(loop: Any) -> bool:
    """Whether a loop of constant extent counts clusters or the CTAs of one."""
    bound = coordinate(loop).startswith(("blockIdx.", "cluster."))
    return bound and ir.constant(loop.extent) is not None


def has_stages(loop: Any) -> bool:
    """Whether a loop runs as a pipeline."""
    return STAGES in loop.annotations


def inner_block(node: Any) -> Any:
    """The block inside of loops without stages; None if something else is."""
    while isinstance(node, ir.For) and not has_stages(node):
        node = node.body
    return node.block if isinstance(node, ir.SBlockRealize) else None


def places_of(loops: Loops) -> tuple[Place, ...]:
    """The coordinates that loops count, outermost first."""
    return tuple(Place(coordinate(each), each.loop_var, int(each.extent)) for each in loops)


def outer_loops(node: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Bound loops from the outside, and what stands inside them."""
    loops: list[Any] = []
    while isinstance(node, ir.For) and not has_stages(node):
        tag = coordinate(node)
        if not is_place(node):
            raise refuse_program(
                f"loop '{node.loop_var.name}'",
                f"a loop bound to {tag}" if tag else "a serial loop around the pipelined one",
                "loops of constant extent over the grid and the cluster",
            )
        check_start(node)
        loops.append(node)
        node = node.body
    return tuple(loops), ir.sequence(node)
