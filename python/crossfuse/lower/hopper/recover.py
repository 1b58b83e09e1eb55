"""Reads a tile program off a scheduled function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.recover_contraction import check_reduction, merge, read_contraction
from crossfuse.lower.hopper.recover_exchange import read_exchange, slice_tile
from crossfuse.lower.hopper.recover_store import read_store
from crossfuse.lower.hopper.tile_nest import check_start, refuse_program, tile_nest
from crossfuse.lower.hopper.tile_program import Contraction, Place, TileProgram
from crossfuse.lower.tree import coordinate
from crossfuse.schedule.markers import GRID_STAGE, STAGES, staged_blocks

_Loops = tuple[Any, ...]


def is_tile_program(func: Any) -> bool:
    """Whether a schedule asks for the Hopper pipeline: a loop has stages."""
    found: list[Any] = []
    ir.walk(func.body, (ir.For, lambda loop: found.append(loop) if _stages(loop) else None))
    return bool(found)


def recover(func: Any) -> tuple[tuple[TileProgram, ...], ...]:
    """Read the tile programs of a scheduled function, kernel by kernel.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Nests one after another, each of loops over places, inside them loops with stages (two
        loads and a product of tiles each) and the store of the products; between them, if the
        reduction is split over the cluster, the two nests of `dsm_reduce`. Each block has one loop
        for each of its dimensions.

    Returns
    -------
    tuple[tuple[TileProgram, ...], ...]
        Phases of each kernel, in program order: nests that are joined by `grid_stage` are phases of
        one kernel, every other nest is a kernel.

    Raises
    ------
    LoweringRefused
        Naming the block or loop that has another form.
    """
    body = func.body.block.body
    nests = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    made = workspaces(func)
    memory = (*func.params, *made)
    programs = [_recover_nest(each, memory) for each in nests]
    _check_marks(func, programs)
    programs = [replace(each, follows=_follows(each, made)) for each in programs]
    return tuple(map(tuple, _kernels(programs)))


def _check_marks(func: Any, programs: list[TileProgram]) -> None:
    """Every block that is staged stores the result of a nest."""
    marked = staged_blocks(func)
    if len(marked) != sum(each.staged for each in programs):
        names = ", ".join(f"'{each.name_hint}'" for each in marked)
        raise refuse_program(
            f"blocks {names}",
            "grid_stage of a block inside a nest",
            "grid_stage of blocks that store what a nest computes",
        )


def _kernels(programs: list[TileProgram]) -> list[list[TileProgram]]:
    """Programs that pass an intermediate on within a kernel, together."""
    kernels: list[list[TileProgram]] = []
    open_until = -1
    for index, program in enumerate(programs):
        if index > open_until:
            kernels.append([])
        kernels[-1].append(program)
        _check_phase(program, kernels[-1][:-1])
        if program.staged:
            made = program.store.tile.buffer
            readers = [n for n, each in enumerate(programs) if _loads(each, made)]
            open_until = max(open_until, *readers, index)
    return kernels


def _loads(program: TileProgram, buffer: Any) -> bool:
    return any(each.same_as(buffer) for each in _loaded(program))


def _loaded(program: TileProgram) -> list[Any]:
    """Buffers that a program loads, that of the left operand first."""
    contraction = program.contraction
    loaded = [contraction.left.buffer, *(each.right.buffer for each in contraction.products)]
    ir.walk(program.store.value, (ir.TensorLoad, lambda load: loaded.append(load.source)))
    return loaded


def _check_phase(program: TileProgram, before: list[TileProgram]) -> None:
    """Phases of a kernel pass on left operands alone, those that are marked."""
    _, *others = _loaded(program)
    for each in before:
        made = each.store.tile.buffer
        as_left = program.contraction.left.buffer.same_as(made)
        if any(other.same_as(made) for other in others) or (as_left and not each.staged):
            raise refuse_program(
                f"tensor '{made.name}'",
                "an intermediate that a later phase of the same kernel loads",
                "left operands of a product that grid_stage was called for",
            )


def _follows(program: TileProgram, made: tuple[Any, ...]) -> bool:
    """Whether only the left operand is an intermediate."""
    left, *loads = _loaded(program)
    others = any(load.same_as(each) for load in loads for each in made)
    return not others and any(left.same_as(each) for each in made)


def workspaces(func: Any) -> tuple[Any, ...]:
    """Intermediates in global memory, which one kernel stores and a later one loads."""
    buffers = func.body.block.alloc_buffers
    return tuple(each for each in buffers if str(each.scope()) == "global")


def _recover_nest(node: Any, memory: tuple[Any, ...]) -> TileProgram:
    outer, parts = _outer_loops(node)
    if len(parts) == 2 and all(_is_bound(each) for each in parts):
        return _recover_split(memory, outer, parts)
    loops = [each for each in parts if isinstance(each, ir.For) and _stages(each)]
    others = [each for each in parts if not any(each.same_as(loop) for loop in loops)]
    if not loops or len(others) != 1:
        raise refuse_program(
            "function",
            f"{len(loops)} loops with stages and {len(others)} other nests in a CTA",
            "pipelined loops, then the store of their products",
        )
    contraction = merge([read_contraction(each, outer) for each in loops])
    check_reduction(contraction, None)
    accumulators = tuple(each.accumulator for each in contraction.products)
    nest = tile_nest(others[0], outer)
    store = read_store(nest, accumulators, contraction.result(contraction.left.buffer))
    contraction = _with_rows(contraction, store.tile.shape[0])
    staged = GRID_STAGE in nest.block.annotations
    return TileProgram(_places(outer), contraction, None, store, memory, staged=staged)


def _with_rows(contraction: Contraction, rows: int) -> Contraction:
    """The contraction of as many rows as its store has: TVM leaves out what no tensor has."""
    left = replace(contraction.left, shape=(rows, contraction.depth))
    return replace(contraction, left=left)


def _recover_split(memory: tuple[Any, ...], outer: _Loops, parts: list[Any]) -> TileProgram:
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
    check_reduction(contraction, place)
    copy = tile_nest(made[1], (*outer, *making))
    combine = tile_nest(taken[0], (*outer, *taking))
    exchange = read_exchange(copy, combine, contraction, place, slice_var)
    whole = contraction.result(contraction.left.buffer)
    part = slice_tile(exchange, whole, slice_var)
    nest = tile_nest(taken[1], (*outer, *taking))
    store = read_store(nest, (exchange.combined,), part)
    places = _places((*outer, *making))
    # The epilogue counts rows from the tile's first one.
    store = replace(store, tile=replace(store.tile, origin=whole.origin, shape=whole.shape))
    staged = GRID_STAGE in nest.block.annotations
    return TileProgram(places, contraction, exchange, store, memory, staged=staged)


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
        check_start(node)
        loops.append(node)
        node = node.body
    return tuple(loops), list(node.seq) if isinstance(node, ir.SeqStmt) else [node]
