"""Reads a chain whose intermediate stays in the cluster: the nests that `dsm_shuffle` leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Gather, Place, Store
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program, tile_nest
from crossfuse.lower.hopper.program.tile_program import Contraction, TileProgram
from crossfuse.lower.hopper.recover.places import Loops, is_bound, outer_loops, places_of
from crossfuse.lower.hopper.recover.products import pipelined, read_products, with_rows
from crossfuse.lower.hopper.recover.ring import all_at_once, is_ring
from crossfuse.lower.hopper.recover.slice import read_slice
from crossfuse.lower.hopper.recover.store import read_store
from crossfuse.lower.hopper.recover.sum import is_partial, read_partial
from crossfuse.markers import DSM_COPIES, DSM_COPY, DSM_SHUFFLE, GRID_STAGE

_Read = tuple[Contraction, Store, TileNest]


def is_gathered(node: Any) -> bool:
    """Whether a nest over the CTAs of a cluster begins with the copy of all slices."""
    if not is_bound(node):
        return False
    _, parts = outer_loops(node)
    return _copied(parts[0]) is not None


def _copied(node: Any) -> Any:
    """The block of a nest that `dsm_shuffle` marked, or None."""
    while isinstance(node, ir.For):
        node = node.body.seq[0] if is_ring(node) else node.body
    marked = isinstance(node, ir.SBlockRealize) and DSM_SHUFFLE in node.block.annotations
    return node.block if marked else None


def recover_gathered(
    memory: tuple[Any, ...], outer: Loops, parts: list[Any]
) -> tuple[TileProgram, ...]:
    """Read both nests over the CTAs of a cluster.

    Parameters
    ----------
    memory : tuple
        Everything in global memory.
    outer : tuple
        Loops over clusters.
    parts : list
        The nest that makes slices, and the one that copies all of them and multiplies.

    Returns
    -------
    tuple[TileProgram, ...]
        The phase that gives its slices to the cluster, and the one that takes them.

    Raises
    ------
    LoweringRefused
        Naming the block that has another form.
    """
    (making, made), (taking, taken) = (outer_loops(each) for each in parts)
    if len(making) != 1 or len(taking) != 1:
        raise refuse_program(
            "function",
            f"{len(making)} and {len(taking)} loops over a cluster",
            "one cluster axis around either product",
        )
    ring = is_ring(taken[0])
    if ring:
        taken = [*all_at_once(taken[0]), *taken[1:]]
    copy = tile_nest(taken[0], (*outer, *taking))
    gather = _read_gather(copy, places_of(making)[0], ring)
    reader = partial(read_slice, gather=gather)
    first = read_products(*pipelined(made), (*outer, *making), reader)
    loops, store_nest = pipelined(taken[1:])
    read_second = read_partial if is_partial(store_nest) else read_store
    second = read_products(loops, store_nest, (*outer, *taking), read_second, takes=gather)
    _check_columns(copy, first, second)
    rows = max(first[0].rows, second[0].rows)
    _check_rows(copy, second[0].left.origin[0], rows)
    programs = []
    for (contraction, store, nest), around in ((first, making), (second, taking)):
        store = replace(store, tile=replace(store.tile, shape=(rows, store.tile.shape[1])))
        where = places_of((*outer, *around))
        staged = GRID_STAGE in nest.block.annotations
        contraction = with_rows(contraction, rows)
        programs.append(TileProgram(where, contraction, None, store, memory, staged=staged))
    return tuple(programs)


def _read_gather(nest: TileNest, place: Place, ring: bool) -> Gather:
    """The copy of all slices, at once or one after another."""
    block = nest.block
    body, order = block.body, str(block.annotations.get(DSM_SHUFFLE))
    plain = (
        isinstance(body, ir.BufferStore)
        and isinstance(body.value, ir.TensorLoad)
        and len(body.indices) == len(body.value.indices) in (3, 4)
        and all(a.same_as(b) for a, b in zip(body.indices, body.value.indices, strict=True))
    )
    if not plain or order != ("ring" if ring else "all-gather"):
        raise refuse_program(
            nest.where,
            f"slices in {order} order" if plain else "a statement that is no plain copy",
            "one slice after another in the order of dsm_shuffle(..., ring=True), or all of them "
            "by dsm_shuffle(..., ring=False), outside the loop with stages",
        )
    copies = str(block.annotations.get(DSM_COPY, DSM_COPIES[0]))
    if copies not in DSM_COPIES:
        raise refuse_program(
            nest.where, f"slices sent by '{copies}'", f"{DSM_COPY} of {' or '.join(DSM_COPIES)}"
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
    return Gather(place, slab, body.buffer, ring, copies == "bulk")


def _check_columns(copy: TileNest, first: _Read, second: _Read) -> None:
    """A column means the same where it is made, where it is copied, and where it is multiplied."""
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
    """The rows that are copied are those that are multiplied."""
    index = copy.block.body.indices[-2]
    loop = copy.moved(index)
    zero = ir.tirx.IntImm("int32", 0)
    first = ir.substitute(
        copy.placed(index),
        lambda var: zero if loop is not None and var.same_as(loop.loop_var) else var,
    )
    count = 1 if loop is None else int(loop.extent)
    extent = int(copy.block.body.buffer.ty.shape[-2])
    if not copy.known.can_prove_equal(first, origin) or count not in (rows, extent):
        raise refuse_program(
            copy.where, f"{count} rows from {first}", f"the {rows} rows from {origin}"
        )
