"""Reads what leaves a CTA: an epilogue, partial tiles and their sum; and the axes of the grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.epilogue.elements import READ_TYPES
from crossfuse.lower.hopper.program.tile import (
    Place,
    Store,
    Tile,
    TileNest,
    check_start,
    covers,
    refuse_program,
    tile_nest,
)
from crossfuse.lower.hopper.program.tile_program import UNIT, SumProgram, TileProgram
from crossfuse.lower.hopper.recover.contraction import accumulates, is_zero
from crossfuse.lower.tree import coordinate
from crossfuse.markers import GRID_STAGE, has_stages

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
    tile = _stored_tile(nest, (row, column), wanted, f"store of '{body.buffer.name}'")
    return Store(tile, row, column, body.value)


def _stored_tile(nest: TileNest, indices: tuple[Any, Any], wanted: Tile, where: str) -> Tile:
    """The tile that a nest stores, with the rows of the product; refused if it is another one."""
    tile = nest.tile(nest.block.body.buffer, indices)
    if not covers(tile, replace(wanted, buffer=tile.buffer), nest.known):
        raise refuse_program(
            where,
            f"a tile of {tile.shape} from {list(tile.origin)}",
            f"the product's, {wanted.shape} from {list(wanted.origin)}",
        )
    return replace(tile, shape=(max(tile.shape[0], wanted.shape[0]), wanted.shape[1]))


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


# A reduction that is split over clusters: partial tiles in L2, then their sum.


def is_partial(node: Any) -> bool:
    """Whether a nest stores partial sums: a plain copy that `grid_stage` was called for."""
    block = inner_block(node)
    if block is None or GRID_STAGE not in block.annotations:
        return False
    return isinstance(block.body, ir.BufferStore) and isinstance(block.body.value, ir.TensorLoad)


def read_partial(nest: TileNest, accumulators: tuple[Any, ...], wanted: Tile) -> Store:
    """Read the store of a partial tile: a copy of accumulators to ``partial[part, i, j]``.

    `wanted` is the tile of the accumulators, on any buffer; other copies are refused.
    """
    body = nest.block.body
    load = body.value
    plain = (
        ir.among(load.source, accumulators)
        and len(body.indices) == 3
        and ir.are_same(body.indices, load.indices)
        and str(body.buffer.ty.dtype) == "float32"
    )
    if not plain:
        raise refuse_program(
            nest.where,
            f"a copy to '{body.buffer.name}'",
            "float32 sums at [part, i, j], the place of their accumulators",
        )
    part, row, column = body.indices
    tile = _stored_tile(nest, (row, column), wanted, nest.where)
    matrix = nest.known.simplify(nest.placed(part))
    return Store(tile, row, column, load, matrix)


def is_sum(node: Any) -> bool:
    """Whether a nest multiplies nothing: it has no loop with stages."""
    return not any(map(has_stages, ir.nodes(node, ir.For)))


def is_rows(node: Any) -> bool:
    """Whether a nest makes rows: threads share each, and nothing is pipelined."""
    threads = (coordinate(each) == "threadIdx.x" for each in ir.nodes(node, ir.For))
    return is_sum(node) and any(threads)


def read_sum(node: Any, memory: tuple[Any, ...]) -> SumProgram:
    """Read the nest that adds partial tiles, the last phase of a split reduction.

    It is loops over places, then one over the elements of a CTA's slice; in it the sum over the
    parts and the epilogue, of one element each.
    """
    outer: list[Any] = []
    while isinstance(node, ir.For) and is_place(node):
        outer.append(node)
        node = node.body
    body = node.body if isinstance(node, ir.For) else None
    if not isinstance(body, ir.SeqStmt) or len(body.seq) != 2:
        raise refuse_program(
            "function",
            "a nest without a loop with stages",
            "one loop over elements, with the sum of partial tiles and its store",
        )
    around = (*outer, node)
    adding, storing = (tile_nest(each, around) for each in body.seq)
    partial, parts = _read_parts(adding)
    index = _read_index(adding, storing, node)
    sums = adding.block.body.buffer
    check_loads(storing, (sums,))
    row, column = storing.block.body.indices
    tile = Tile(storing.block.body.buffer, index, (1, 1))
    store = Store(tile, row, column, storing.block.body.value)
    elements = int(node.extent)
    where = places_of(tuple(outer))
    return SumProgram(where, partial, parts, node.loop_var, elements, index, sums, store, memory)


def with_sums(programs: list[TileProgram], sums: list[SumProgram]) -> list[TileProgram]:
    """Programs with the sums of the partial tiles that they store.

    Refuses a sum whose tiles no program stores in the same kernel, on as many places.
    """
    for each in sums:
        makers = [p for p in programs if p.store.tile.buffer.same_as(each.partial)]
        if len(makers) != 1 or not makers[0].staged or not _fits(makers[0], each):
            raise refuse_program(
                f"the sum of '{each.partial.name}'",
                f"{each.parts} parts in {_extents(each.places)} places",
                "partial tiles that the nest before stores on as many places (grid_stage)",
            )
        programs = [replace(p, summed=each) if p is makers[0] else p for p in programs]
    return programs


def _fits(program: TileProgram, summed: SumProgram) -> bool:
    """Whether each slice lies within one tile of every part, and both have the same places."""
    rows, columns = program.store.tile.shape
    known = summed.analyzer
    within = all(
        known.can_prove_equal(ir.tirx.floordiv(index, size), ir.tirx.floordiv(first, size))
        for index, first, size in zip(summed.index, summed.first, (rows, columns), strict=True)
    )
    return (
        within
        and _extents(program.cluster) == _extents(p for p in summed.places if p.in_cluster)
        and program.tiles == prod(p.extent for p in summed.places if not p.in_cluster)
    )


def _extents(places: Iterable[Place]) -> tuple[int, ...]:
    return tuple(each.extent for each in places)


def _read_parts(nest: TileNest) -> tuple[Any, int]:
    """The partial matrices, and their number."""
    block = nest.block
    value = block.body.value if isinstance(block.body, ir.BufferStore) else None
    terms = (value.a, value.b) if isinstance(value, ir.tirx.Add) else ()
    load = terms[1] if len(terms) == 2 and isinstance(terms[1], ir.TensorLoad) else None
    zero = block.init is not None and is_zero(block.init.value)
    if load is None or len(load.indices) != 3 or not zero or not accumulates(block.body):
        raise refuse_program(
            nest.where, f"the statement {value}", "C[i, j] + partial[part, i, j], from 0"
        )
    nest.check_predicate(load.source)
    part, *index = load.indices
    loop = nest.moved(part)
    parts = 1 if loop is None else int(loop.extent)
    every = parts == int(load.source.ty.shape[0])
    first = 0 if loop is None else loop.loop_var
    whole = nest.known.can_prove_equal(nest.placed(part), first)
    if not (every and ir.are_same(index, block.body.indices) and whole):
        raise refuse_program(
            nest.where,
            f"partial sums at {list(load.indices)}",
            f"the element of all {load.source.ty.shape[0]} parts",
        )
    return load.source, parts


def _read_index(adding: TileNest, storing: TileNest, loop: Any) -> tuple[Any, Any]:
    """Row and column of an element; units of neighbours lie in one row.

    A thread takes a unit in one access, so slices are whole units.
    """
    body = storing.block.body
    known = storing.known
    plain = isinstance(body, ir.BufferStore) and len(body.indices) == 2 and not storing.loops
    index = tuple(known.simplify(storing.placed(each)) for each in body.indices) if plain else ()
    added = [adding.known.simplify(adding.placed(each)) for each in adding.block.body.indices]
    if not plain or not all(known.can_prove_equal(a, b) for a, b in zip(added, index, strict=True)):
        raise refuse_program(
            storing.where, f"a store at {list(index)}", f"the element that is summed, {added}"
        )
    storing.check_predicate(body.buffer)
    if not _has_units(index, loop, storing.around) or int(loop.extent) % UNIT:
        raise refuse_program(
            storing.where,
            f"{loop.extent} elements at {list(index)}",
            f"a multiple of {UNIT}, of which {UNIT} are neighbours in a row",
        )
    return index[0], index[1]


def _has_units(index: tuple[Any, ...], loop: Any, around: Loops) -> bool:
    """Whether elements 4 u to 4 u + 3 are neighbours in a row, for every unit u."""
    others = ((each.loop_var, 0, int(each.extent)) for each in around if not each.same_as(loop))
    unit = ir.Var("unit", "int32")
    known = ir.ranged(*others, (unit, 0, -(-int(loop.extent) // UNIT)))

    def placed(expression: Any, number: int) -> Any:
        """An expression for element `number` of a unit."""
        return ir.substitute(expression, {loop.loop_var: unit * UNIT + number})

    def divided(number: int, remains: bool) -> Any:
        def rewrite(node: Any, mutator: Any) -> Any:
            """A unit lies on one side of each multiple of its length, which TVM cannot prove."""
            first, here = placed(node.a, 0), placed(node.a, number)
            moves = known.can_prove_equal(here - first, number)
            aligned = known.can_prove_equal(ir.tirx.floormod(first, UNIT), 0)
            if not moves or not aligned or (ir.constant(node.b) or 1) % UNIT:
                return mutator.default_mutate(node)
            node_type = type(node)
            return node_type(first, node.b) + (number if remains else 0)

        return rewrite

    def moved(expression: Any, number: int) -> Any:
        rewritten = ir.mutate(
            expression,
            (ir.tirx.FloorDiv, divided(number, False)),
            (ir.tirx.FloorMod, divided(number, True)),
        )
        return placed(rewritten, number)

    row, column = index
    return all(
        known.can_prove_equal(moved(row, number), placed(row, 0))
        and known.can_prove_equal(moved(column, number), placed(column, 0) + number)
        for number in range(1, UNIT)
    )
