"""What nests pass on to one another: which are phases of one kernel, and which follow a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile_nest import refuse_program
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.rows.program import RowProgram


def with_rows(programs: list[TileProgram], rows: list[RowProgram]) -> list[TileProgram]:
    """Programs with what makes their left operands, which is a phase of the same kernel."""
    for made in rows:
        found = _places(programs, made.buffer)
        if found != [(0, 0)]:
            raise refuse_program(
                f"tensor '{made.buffer.name}'",
                f"rows that {len(found)} operands of products or epilogues are",
                "rows that are the left operand of the first product, and nothing else",
            )
        operands = sum(len(each.both) for each in programs[0].contraction.products)
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


def _check_correction(program: TileProgram) -> None:
    """Sums are corrected by what makes the rows chunk by chunk, and by nothing else."""
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
    """Which programs load a buffer, and where in the order of what they load."""
    return [
        (number, place)
        for number, each in enumerate(programs)
        for place, load in enumerate(_loaded(each))
        if load.same_as(buffer)
    ]


def kernels_of(programs: list[TileProgram]) -> list[list[TileProgram]]:
    """Programs that pass an intermediate on within a kernel, together."""
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
            readers = [n for n, each in enumerate(programs) if _loads(each, made)]
            open_until = max(open_until, *readers, index)
    return kernels


def _loads(program: TileProgram, buffer: Any) -> bool:
    return any(each.same_as(buffer) for each in _loaded(program))


def _loaded(program: TileProgram) -> list[Any]:
    """Buffers that a program loads, that of the left operand first."""
    contraction = program.contraction
    products = [each for product in contraction.products for each in product.both]
    further = [each.source for each in ir.buffer_loads(program.store.value)]
    return [contraction.left.buffer, *(each.right.buffer for each in products), *further]


def _check_phase(program: TileProgram, before: list[TileProgram]) -> None:
    """Phases of a kernel pass on left operands alone, those that are marked."""
    _, *others = _loaded(program)
    for each in before:
        made = each.store.tile.buffer
        marked = each.staged or each.keeps
        as_left = program.contraction.left.buffer.same_as(made)
        if any(other.same_as(made) for other in others) or (as_left and not marked):
            raise refuse_program(
                f"tensor '{made.name}'",
                "an intermediate that a later phase of the same kernel loads",
                "left operands of a product that grid_stage was called for",
            )


def follows(program: TileProgram, made: tuple[Any, ...]) -> bool:
    """Whether only the left operand is an intermediate."""
    left, *loads = _loaded(program)
    others = any(load.same_as(each) for load in loads for each in made)
    return not others and any(left.same_as(each) for each in made)
