"""Reads a tile program off a scheduled function: one phase, or several with flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import RefusedError
from crossfuse.lower.hopper.epilogue.elements import further_of
from crossfuse.lower.hopper.program.tile import Rows, refuse_program, tile_nest
from crossfuse.lower.hopper.program.tile_program import SumProgram, TileProgram
from crossfuse.lower.hopper.recover.contraction import (
    check_reduction,
    read_contraction,
    read_exchange,
    slice_tile,
)
from crossfuse.lower.hopper.recover.products import (
    check_taken,
    is_gathered,
    is_kept,
    phase_program,
    pipelined,
    read_kept,
    read_products,
    recover_gathered,
    recover_kept,
)
from crossfuse.lower.hopper.recover.store import (
    Loops,
    is_bound,
    is_rows,
    is_sum,
    outer_loops,
    places_of,
    read_store,
    read_sum,
    with_sums,
)
from crossfuse.lower.hopper.rows.program import RowProgram
from crossfuse.lower.hopper.rows.recover import read_rows
from crossfuse.lower.hopper.stream.program import StreamProgram
from crossfuse.lower.hopper.stream.recover.function import recover_stream
from crossfuse.lower.image import ROW_COUNT
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import open_blocks
from crossfuse.lower.verify.structure import takes_fewer_rows
from crossfuse.markers import (
    GRID_STAGE,
    ROWS,
    SIDE_BY_SIDE,
    has_stages,
    holds_stream,
    staged_blocks,
)

# Reads which tensors have fewer rows when a function is called with fewer.

_INSTEAD = "leave accept_fewer_rows out, and compile for each number of rows"


def with_fewer_rows(func: Any, programs: list[TileProgram]) -> list[TileProgram]:
    """Programs that know which tensors end before their rows do.

    Rows of a tile of the left operand are those of the tile that is stored: so has every tile
    program. What is left to prove is that its other operands are read row by row, or have no rows;
    refuses outputs whose rows depend on other rows, and tensors with different numbers of rows.
    """
    parameters = tuple(func.params)
    _check_made(programs, parameters)
    by_row, whole = _tensors(programs)
    by_row, whole = (
        [each for each in parameters if ir.among(each, group)] for group in (by_row, whole)
    )
    for each in by_row:
        if ir.among(each, whole):
            found = "rows that several rows of the output need"
            raise _refused(each, found, "tensors that are read row by row, or as a whole")
    _check_extents(by_row)
    rows = Rows(ir.Var(ROW_COUNT, "int32"), tuple(by_row))
    return [_with_rows(each, rows) for each in programs]


def _check_made(programs: Sequence[TileProgram], parameters: Sequence[Any]) -> None:
    """Refuse rows made in the kernel that are made by chunks, or that are results of the call.

    And left operands that a stream makes.
    """
    for stream in (each.streamed for each in programs if each.streamed is not None):
        found = "a left operand that a stream of tiles makes in the kernel"
        raise _refused(stream.output.buffer, found, "operands that the call passes, or rows")
    for made in (each.rows for each in programs if each.rows is not None):
        if made.chunks is not None:
            found = "a left operand that is made in the kernel, chunk by chunk"
            limit = "operands that the call passes, and rows that are made as a whole"
            instead = f"take tiles without a chunk, or {_INSTEAD}"
            raise _refused(made.buffer, found, limit, instead)
        for each in (made.buffer, *made.beside):
            if ir.among(each, parameters):
                found = "what is made row by row beside the product, as a result of the call"
                raise _refused(each, found, "results that the product stores")


def _tensors(programs: Sequence[TileProgram]) -> tuple[list[Any], list[Any]]:
    """Tensors whose rows are those of the output, and those of which any part may be needed."""
    by_row: list[Any] = []
    whole: list[Any] = []
    for program in programs:
        contraction = program.contraction
        by_row += [contraction.left.buffer, program.store.tile.buffer]
        whole += [each.right.buffer for each in contraction.products]
        readers: list[TileProgram | SumProgram] = [program]
        if program.summed is not None:
            by_row.append(program.summed.store.tile.buffer)
            readers.append(program.summed)
        for reader in readers:
            for further in further_of(reader):
                rowwise = _is_row_by_row(further.load, reader.store.row)
                (by_row if rowwise else whole).append(further.load.source)
        if program.rows is not None:
            for load in ir.global_loads(program.rows.statement):
                rowwise = _is_row_by_row(load, program.rows.row)
                (by_row if rowwise else whole).append(load.source)
    return by_row, whole


def _is_row_by_row(load: Any, row: Any) -> bool:
    """Whether a row of the output reads that row of an operand, and no other one."""
    first, *others = load.indices
    if not any(ir.mentions(each, row) for each in load.indices):
        return False
    if first.same_as(row) and not any(ir.mentions(each, row) for each in others):
        return True
    found = f"a load at {list(load.indices)} for row {row}"
    limit = f"'{load.source.name}[{row}, ...]', the same row of an operand"
    raise _refused(load.source, found, limit)


def _check_extents(tensors: Sequence[Any]) -> None:
    """Refuse tensors with different numbers of rows, counted by their first extent.

    All are matrices, or have a number for each row.
    """
    count = int(tensors[0].ty.shape[0])
    for each in tensors:
        shape = tuple(int(extent) for extent in each.ty.shape)
        if len(shape) > 2:
            limit = "rows of one or two dimensions: pixels of images are not counted by one extent"
        elif shape[0] != count:
            limit = f"{count} rows, as of '{tensors[0].name}'"
        else:
            continue
        raise _refused(each, f"shape {shape}", limit)


def _with_rows(program: TileProgram, rows: Rows) -> TileProgram:
    summed = program.summed
    if summed is not None:
        summed = replace(summed, store=replace(summed.store, rows=rows))
    made = program.rows
    if made is not None:
        made = made.with_count(rows.count, rows.tensors)
    return replace(program, store=replace(program.store, rows=rows), summed=summed, rows=made)


def _refused(tensor: Any, found: str, limit: str, instead: str = _INSTEAD) -> RefusedError:
    return refuse(ROWS, f"tensor '{tensor.name}'", found=found, limit=limit, instead=instead)


# What nests pass on to one another: which are phases of one kernel, and which follow a kernel.


def with_rows(programs: list[TileProgram], rows: list[RowProgram]) -> list[TileProgram]:
    """Programs with what makes their left operands, which is a phase of the same kernel.

    Refuses rows that anything but the first product reads as its left operand, and numbers made
    beside them that anything but the epilogue of that product loads.
    """
    for made in rows:
        found = _places(programs, made.buffer)
        if found != [(0, 0)]:
            raise refuse_program(
                f"tensor '{made.buffer.name}'",
                f"rows that {len(found)} operands of products or epilogues are",
                "rows that are the left operand of the first product, and nothing else",
            )
        operands = len(programs[0].contraction.products)
        for each in made.beside:
            found = _places(programs, each)
            if any(number > 0 or place <= operands for number, place in found):
                raise refuse_program(
                    f"tensor '{each.name}'",
                    "numbers of rows that a product or a later epilogue loads",
                    "numbers that the epilogue of the first product loads",
                )
        programs[0] = replace(programs[0], rows=made, follows=False)
    for program in programs:
        _check_correction(program)
    return programs


def with_streams(programs: list[TileProgram], streams: list[StreamProgram]) -> list[TileProgram]:
    """Programs with the stream that makes the left operand of the first one, in the same kernel.

    Refuses several of them, and streams whose results anything else loads.
    """
    for stream in streams:
        made = stream.output.buffer
        found = _places(programs, made)
        if len(streams) > 1 or found != [(0, 0)] or programs[0].rows is not None:
            raise refuse_program(
                f"tensor '{made.name}'",
                f"results of {len(streams)} streams that {len(found)} operands of products or "
                "epilogues are",
                "results of one stream that are the left operand of the first product, and "
                "nothing else",
            )
        programs[0] = replace(programs[0], streamed=stream, follows=False)
    return programs


def _check_correction(program: TileProgram) -> None:
    """Refuse sums that are corrected by other factors than those that the nest of rows makes."""
    correction = program.contraction.correction
    chunks = None if program.rows is None else program.rows.chunks
    if correction is None and chunks is None:
        return
    found = None if correction is None else (correction.factors, correction.chunk)
    made = None if chunks is None else (chunks.factors, chunks.size)
    if found is None or made is None or not found[0].same_as(made[0]) or found[1] != made[1]:
        raise refuse_program(
            f"product of '{program.contraction.left.buffer.name}'",
            f"sums with corrections for {_named(found)}, and rows that make {_named(made)}",
            "factors of chunks that the nest of rows makes, for chunks of one size",
        )


def _named(factors: tuple[Any, int] | None) -> str:
    return "none" if factors is None else f"'{factors[0].name}' of chunks of {factors[1]}"


def _places(programs: list[TileProgram], buffer: Any) -> list[tuple[int, int]]:
    """Which programs load a buffer, and where in the order of what they load (see `_loaded`)."""
    return [
        (number, place)
        for number, each in enumerate(programs)
        for place, load in enumerate(_loaded(each))
        if load.same_as(buffer)
    ]


def kernels_of(programs: list[TileProgram]) -> list[list[TileProgram]]:
    """Programs by kernel: those that pass an intermediate on within a kernel stay together."""
    kernels: list[list[TileProgram]] = []
    open_until = -1
    for index, program in enumerate(programs):
        if index > open_until:
            kernels.append([])
        kernels[-1].append(program)
        _check_phase(program, kernels[-1][:-1])
        if program.gives is not None or program.keeps:
            open_until = max(open_until, index + 1)
        if program.staged:
            made = program.store.tile.buffer
            readers = [n for n, each in enumerate(programs) if ir.among(made, _loaded(each))]
            open_until = max(open_until, *readers, index)
    return kernels


def _loaded(program: TileProgram) -> list[Any]:
    """Buffers that a program loads: left operand, right operands, operands of the epilogue."""
    contraction = program.contraction
    rights = (each.right.buffer for each in contraction.products)
    further = (each.source for each in ir.buffer_loads(program.store.value))
    return [contraction.left.buffer, *rights, *further]


def _check_phase(program: TileProgram, before: list[TileProgram]) -> None:
    """Refuse a phase that takes from its kernel anything but a marked left operand."""
    _, *others = _loaded(program)
    for each in before:
        made = each.store.tile.buffer
        marked = each.staged or each.keeps
        as_left = program.contraction.left.buffer.same_as(made)
        if ir.among(made, others) or (as_left and not marked):
            raise refuse_program(
                f"tensor '{made.name}'",
                "an intermediate that a later phase of the same kernel loads",
                "left operands of a product that grid_stage was called for",
            )


def follows(program: TileProgram, made: tuple[Any, ...]) -> bool:
    """Whether only the left operand is an intermediate of an earlier kernel."""
    left, *loads = _loaded(program)
    return ir.among(left, made) and not any(ir.among(load, made) for load in loads)


# A whole scheduled function, nest by nest.


def recover(func: Any) -> tuple[tuple[TileProgram, ...], ...]:
    """Read the tile programs of a scheduled function, kernel by kernel, in program order.

    The function is nests one after another, each of loops over places (grid and cluster), inside
    them loops with stages (two loads and a product of tiles each) and the store of the products;
    between them, if the reduction is split over the cluster, the two nests of `dsm_reduce`, or
    those of `dsm_shuffle` if an intermediate stays in the cluster. Between loops with stages, an
    elementwise block may store to scope ``local``: its tile stays in registers. A nest without
    stages adds partial tiles that the one before it stores. Each block has one loop for each of its
    dimensions. Nests that are joined by `grid_stage` are phases of one kernel, every other nest is
    a kernel; the block or loop that has another form is refused by name.
    """
    func = open_blocks(func) if holds_stream(func.body) else func
    nests = ir.sequence(func.body.block.body)
    made = workspaces(func)
    memory = (*func.params, *made)
    streams = [recover_stream(each, memory) for each in nests if holds_stream(each)]
    nests = [each for each in nests if not holds_stream(each)]
    rows = [read_rows(func, each) for each in nests if is_rows(each)]
    sums = [read_sum(each, memory) for each in nests if is_sum(each) and not is_rows(each)]
    multiplying = [each for each in nests if not is_sum(each)]
    programs = [program for each in multiplying for program in _recover_nest(each, memory)]
    _check_marks(func, programs, len(rows) + len(streams))
    programs = with_sums(programs, sums)
    programs = [replace(each, follows=follows(each, made)) for each in programs]
    programs = with_rows(programs, rows)
    programs = with_streams(programs, streams)
    if takes_fewer_rows(func):
        programs = with_fewer_rows(func, programs)
    if SIDE_BY_SIDE in func.body.block.annotations:
        _check_apart(programs)
        return (tuple(programs),)
    return tuple(map(tuple, kernels_of(programs)))


def _check_apart(programs: Sequence[TileProgram]) -> None:
    """Refuse nests of one kernel that need what another one makes."""
    made = [each.store.tile.buffer for each in programs]
    for program in programs:
        passed = program.gives is not None or program.keeps or program.splits
        if passed or any(ir.among(each, made) for each in _loaded(program)):
            raise refuse_program(
                f"tensor '{program.store.tile.buffer.name}'",
                "a nest that reads what another one makes, or that shares its reduction",
                "nests side by side that need nothing of each other",
            )


def _check_marks(func: Any, programs: list[TileProgram], rows: int) -> None:
    """Refuse a mark on a block that its lowering does not look at, so that no mark is ignored."""
    marked = staged_blocks(func)
    if len(marked) != rows + sum(each.staged for each in programs):
        names = ", ".join(f"'{each.name_hint}'" for each in marked)
        raise refuse_program(
            f"blocks {names}",
            "grid_stage of a block inside a nest",
            "grid_stage of blocks that store what a nest computes",
        )


def row_tensors(func: Any) -> tuple[Any, ...]:
    """Parameters of which a call may have fewer rows; none unless `accept_fewer_rows` allows it."""
    if not takes_fewer_rows(func):
        return ()
    rows = recover(func)[0][0].store.rows
    assert rows is not None
    return rows.tensors


def workspaces(func: Any) -> tuple[Any, ...]:
    """Intermediates in global memory, which one kernel stores and a later one loads."""
    return tuple(filter(ir.is_global, func.body.block.alloc_buffers))


def _recover_nest(node: Any, memory: tuple[Any, ...]) -> tuple[TileProgram, ...]:
    """The program of a nest; two if an intermediate stays in the cluster or in registers."""
    outer, parts = outer_loops(node)
    if len(parts) == 2 and all(is_bound(each) for each in parts):
        if is_gathered(parts[1]):
            return recover_gathered(memory, outer, parts)
        return _recover_split(memory, outer, parts)
    if is_kept(parts):
        return recover_kept(memory, outer, parts)
    loops, store_nest = pipelined(parts)
    contraction, store, nest = read_products(loops, store_nest, outer)
    staged = GRID_STAGE in nest.block.annotations
    return (TileProgram(places_of(outer), contraction, None, store, memory, staged=staged),)


def _recover_split(
    memory: tuple[Any, ...], outer: Loops, parts: list[Any]
) -> tuple[TileProgram, ...]:
    """A nest over the ranks that makes partial sums, and one that combines and stores slices.

    The partial sums may be those of a chain whose intermediate stays in registers.
    """
    (making, made), (taking, taken) = (outer_loops(each) for each in parts)
    first = kept = None
    if is_kept(made):
        first, kept, made = read_kept((*outer, *making), made)
    loops = [each for each in made if isinstance(each, ir.For) and has_stages(each)]
    if len(made) != 2 or len(loops) != 1 or len(taken) != 2 or len(making) != len(taking) != 1:
        raise refuse_program(
            "function",
            f"nests of {len(made)} and {len(taken)} parts for each rank",
            "a pipelined loop and the copy to the slab, then the sum of slabs and its store",
        )
    contraction = read_contraction(loops[0], (*outer, *making), kept)
    place, slice_var = places_of(making)[0], taking[0].loop_var
    if kept is None:
        check_reduction(contraction, place)
    else:
        check_taken(kept, contraction)
    copy = tile_nest(made[1], (*outer, *making))
    combine = tile_nest(taken[0], (*outer, *taking))
    exchange = read_exchange(copy, combine, contraction, place, slice_var)
    whole = contraction.result(contraction.left.buffer)
    part = slice_tile(exchange, whole, slice_var)
    nest = tile_nest(taken[1], (*outer, *taking))
    store = read_store(nest, (exchange.combined,), part)
    places = places_of((*outer, *making))
    # The epilogue counts rows from the tile's first one.
    store = replace(store, tile=replace(store.tile, origin=whole.origin, shape=whole.shape))
    staged = GRID_STAGE in nest.block.annotations
    second = TileProgram(places, contraction, exchange, store, memory, staged=staged)
    if first is None:
        return (second,)
    return (phase_program(memory, places, first, contraction.rows), second)
