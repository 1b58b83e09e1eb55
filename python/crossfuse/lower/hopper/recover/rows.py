"""Reads which tensors have fewer rows when a function is called with fewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import RefusedError
from crossfuse.lower.hopper.epilogue.operands import further_of
from crossfuse.lower.hopper.program.tile import Rows
from crossfuse.lower.hopper.program.tile_program import SumProgram, TileProgram
from crossfuse.lower.hopper.rows.program import RowProgram
from crossfuse.lower.image import ROW_COUNT
from crossfuse.lower.refusal import refuse
from crossfuse.markers import ROW_COUNTS, ROWS, marked_blocks

_INSTEAD = "leave accept_fewer_rows out, and compile for each number of rows"


def takes_fewer_rows(func: Any) -> bool:
    """Whether `accept_fewer_rows` was called for a function.

    Refuses a mark with another value, or on another block than the root.
    """
    marked = marked_blocks(func, ROWS)
    root = getattr(func.body, "block", None)
    for block in marked:
        value = str(block.annotations[ROWS])
        if value not in ROW_COUNTS or not block.same_as(root):
            raise refuse(
                ROWS,
                f"block '{block.name_hint}'",
                found=f"'{value}'",
                limit=f"{' or '.join(map(repr, ROW_COUNTS))} of the root block",
                instead="call sch.accept_fewer_rows()",
            )
    return bool(marked)


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
        [each for each in parameters if any(each.same_as(other) for other in group)]
        for group in (by_row, whole)
    )
    for each in by_row:
        if any(each.same_as(other) for other in whole):
            found = "rows that several rows of the output need"
            raise _refused(each, found, "tensors that are read row by row, or as a whole")
    _check_extents(by_row)
    rows = Rows(ir.Var(ROW_COUNT, "int32"), tuple(by_row))
    return [_with_rows(each, rows) for each in programs]


def _check_made(programs: Sequence[TileProgram], parameters: Sequence[Any]) -> None:
    """Refuse rows made in the kernel that are made by chunks, or that are results of the call."""
    for made in (each.rows for each in programs if each.rows is not None):
        if made.chunks is not None:
            found = "a left operand that is made in the kernel, chunk by chunk"
            limit = "operands that the call passes, and rows that are made as a whole"
            instead = f"take tiles without a chunk, or {_INSTEAD}"
            raise _refused(made.buffer, found, limit, instead)
        for each in (made.buffer, *made.beside):
            if any(each.same_as(parameter) for parameter in parameters):
                found = "what is made row by row beside the product, as a result of the call"
                raise _refused(each, found, "results that the product stores")


def _tensors(programs: Sequence[TileProgram]) -> tuple[list[Any], list[Any]]:
    """Tensors whose rows are those of the output, and those of which any part may be needed."""
    by_row: list[Any] = []
    whole: list[Any] = []
    for program in programs:
        contraction = program.contraction
        by_row += [contraction.left.buffer, program.store.tile.buffer]
        products = (each for product in contraction.products for each in product.both)
        whole += [each.right.buffer for each in products]
        readers: list[TileProgram | SumProgram] = [program]
        if program.summed is not None:
            by_row.append(program.summed.store.tile.buffer)
            readers.append(program.summed)
        for reader in readers:
            for further in further_of(reader):
                rowwise = _is_row_by_row(further.load, reader.store.row)
                (by_row if rowwise else whole).append(further.load.source)
        if program.rows is not None:
            for load in _loads_of(program.rows):
                rowwise = _is_row_by_row(load, program.rows.row)
                (by_row if rowwise else whole).append(load.source)
    return by_row, whole


def _loads_of(rows: RowProgram) -> list[Any]:
    """What making a row loads from global memory."""
    loads: list[Any] = []
    ir.walk(rows.statement, (ir.TensorLoad, loads.append))
    return [each for each in loads if str(each.source.scope()) == "global"]


def _is_row_by_row(load: Any, row: Any) -> bool:
    """Whether a row of the output reads that row of an operand, and no other one."""
    first, *others = load.indices

    def has_row(index: Any) -> bool:
        return any(each.same_as(row) for each in ir.variables(index))

    if not any(map(has_row, load.indices)):
        return False
    if first.same_as(row) and not any(map(has_row, others)):
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
