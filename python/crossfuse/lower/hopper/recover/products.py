"""Reads what a CTA does by itself: pipelined loops over one left operand, then one store.

And chains of two of them, whose intermediate stays in registers, or in the cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import (
    Gather,
    GatheredTile,
    KeptTile,
    Place,
    Store,
    Tile,
    TileNest,
    covers,
    refuse_program,
    tile_nest,
)
from crossfuse.lower.hopper.program.tile_program import Contraction, TileProgram
from crossfuse.lower.hopper.recover.contraction import (
    check_reduction,
    first_of_reduction,
    is_zero,
    read_contraction,
)
from crossfuse.lower.hopper.recover.store import (
    Loops,
    accumulator_loads,
    inner_block,
    is_bound,
    is_partial,
    outer_loops,
    places_of,
    read_partial,
    read_store,
)
from crossfuse.lower.tree import bounds, implies, is_call
from crossfuse.markers import DSM_SHUFFLE, GRID_STAGE, has_stages

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


# A chain whose intermediate stays in the cluster: the nests that `dsm_shuffle` leaves.

# The store of a slice that stays in the cluster.


def read_slice(
    nest: TileNest, accumulators: tuple[Any, ...], wanted: Tile, gather: Gather
) -> Store:
    """Read the elementwise store of the accumulators to the CTA's slab of a gather.

    The tile of the store is counted in columns of what the cluster gathers; its value is written in
    those of the product.
    """
    body = nest.block.body
    plain = isinstance(body, ir.BufferStore) and body.buffer.same_as(gather.slab)
    loads = accumulator_loads(nest, accumulators) if plain else []
    if not loads or nest.block.init is not None:
        raise refuse_program(
            nest.where, "no elementwise store to the slab", "slab[rank, i, j] = f(C[i, j], ...)"
        )
    row, inner = gather.side_by_side(body.indices)
    slab = nest.tile(body.buffer, (row, inner))
    tile = GatheredTile(slab.buffer, slab.origin, slab.shape, gather)
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
    """Refuse an accumulator that is not the one at the row and the column that are stored."""
    tile = nest.tile(load.source, load.indices[-2:])
    moved = [(nest.moved(a), nest.moved(b)) for a, b in zip(load.indices[-2:], stored, strict=True)]
    together = all((a is None) == (b is None) and (a is None or a.same_as(b)) for a, b in moved)
    if not together or not covers(tile, replace(wanted, buffer=tile.buffer), nest.known):
        raise refuse_program(
            nest.where, f"the accumulator at {list(load.indices)}", "the element that is stored"
        )


def _without_zeros(nest: TileNest, load: Any) -> tuple[Any, int | None]:
    """The value that is stored, and the product's column from which on it is zero, or None.

    A slab may be wider than the product; zeros anywhere but beyond the product's columns are
    refused.
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
    if not isinstance(inner, ir.Var) or ir.mentions(rest, inner):
        raise refuse_program(nest.where, f"column {inner}", "one variable for the column")
    image = ir.Var("column", str(inner.ty))
    moved = known.simplify(ir.substitute(value, {inner: image - rest}))
    for other in ir.variables(rest):
        if ir.mentions(moved, other):
            raise refuse_program(
                nest.where, f"a value that depends on '{other.name}'", "on row and column alone"
            )
    return image, moved


def is_gathered(node: Any) -> bool:
    """Whether a nest over the CTAs of a cluster begins with the copy of all slices."""
    if not is_bound(node):
        return False
    _, parts = outer_loops(node)
    return _copied(parts[0]) is not None


def _copied(node: Any) -> Any:
    """The block of a nest that `dsm_shuffle` marked, or None."""
    while isinstance(node, ir.For):
        node = ir.sequence(node.body)[0]
    marked = isinstance(node, ir.SBlockRealize) and DSM_SHUFFLE in node.block.annotations
    return node.block if marked else None


def recover_gathered(
    memory: tuple[Any, ...], outer: Loops, parts: list[Any]
) -> tuple[TileProgram, ...]:
    """Read both nests over the CTAs of a cluster: one gives slices, one takes them.

    `parts` are the nest that makes slices, and the one that copies all of them and multiplies them.
    """
    (making, made), (taking, taken) = (outer_loops(each) for each in parts)
    if len(making) != 1 or len(taking) != 1:
        raise refuse_program(
            "function",
            f"{len(making)} and {len(taking)} loops over a cluster",
            "one cluster axis around either product",
        )
    _check_order(_copied(taken[0]))
    copy = tile_nest(taken[0], (*outer, *taking))
    gather = _read_gather(copy, places_of(making)[0])
    reader = partial(read_slice, gather=gather)
    first = read_products(*pipelined(made), (*outer, *making), reader)
    loops, store_nest = pipelined(taken[1:])
    read_second = read_partial if is_partial(store_nest) else read_store
    second = read_products(loops, store_nest, (*outer, *taking), read_second, takes=gather)
    _check_columns(copy, first, second)
    rows = max(first[0].rows, second[0].rows)
    _check_rows(copy, second[0].left.origin[0], rows)
    return tuple(
        phase_program(memory, places_of((*outer, *around)), each, rows)
        for each, around in ((first, making), (second, taking))
    )


def _check_order(block: Any) -> None:
    """Refuse slices that are multiplied one after another."""
    if str(block.annotations[DSM_SHUFFLE]) != "all-gather":
        raise refuse_program(
            f"block '{block.name_hint}'",
            f"slices in {block.annotations[DSM_SHUFFLE]} order",
            "all of them by dsm_shuffle(..., ring=False), outside the loop with stages",
        )


def _read_gather(nest: TileNest, place: Place) -> Gather:
    """The copy of all slices at once."""
    body = nest.block.body
    plain = (
        isinstance(body, ir.BufferStore)
        and isinstance(body.value, ir.TensorLoad)
        and len(body.indices) in (3, 4)
        and ir.are_same(body.indices, body.value.indices)
    )
    if not plain:
        raise refuse_program(
            nest.where,
            "a statement that is no plain copy",
            "the copy of all slices by dsm_shuffle(..., ring=False)",
        )
    slab = body.value.source
    ranks, columns = (nest.moved(body.indices[each]) for each in (0, -1))
    shape = tuple(int(each) for each in slab.ty.shape)
    found = tuple(1 if each is None else int(each.extent) for each in (ranks, columns))
    if found != (shape[0], shape[-1]) or shape[0] != place.extent:
        raise refuse_program(
            nest.where,
            f"{found[0]} slices of {found[1]} columns",
            f"all {place.extent} slices of the cluster, {shape[-1]} columns each",
        )
    nest.check_predicate(body.buffer)
    return Gather(place, slab, body.buffer)


def _check_columns(copy: TileNest, first: Read, second: Read) -> None:
    """Refuse a column that does not mean the same where it is made, copied and multiplied."""
    known = copy.known
    (making, made, made_nest), (taking, _, _) = first, second
    offset = making.result(made.tile.buffer).origin[1] - made.tile.origin[1]
    parts = [
        [nest.known.simplify(nest.placed(each)) for each in nest.block.body.indices[1:-2]]
        for nest in (made_nest, copy)
    ]
    same = all(known.can_prove_equal(a, b) for a, b in zip(*parts, strict=True))
    if not same or not known.can_prove_equal(offset, taking.offset):
        raise refuse_program(
            copy.where,
            f"columns that are made from {offset} on and multiplied from {taking.offset} on",
            "the columns that the cluster makes, in their order",
        )


def _check_rows(copy: TileNest, origin: Any, rows: int) -> None:
    """Refuse a copy of other rows than those that are multiplied."""
    index = copy.block.body.indices[-2]
    loop = copy.moved(index)
    first = ir.at_zero(copy.placed(index), *([] if loop is None else [loop.loop_var]))
    count = 1 if loop is None else int(loop.extent)
    extent = int(copy.block.body.buffer.ty.shape[-2])
    if not copy.known.can_prove_equal(first, origin) or count not in (rows, extent):
        raise refuse_program(
            copy.where, f"{count} rows from {first}", f"the {rows} rows from {origin}"
        )
