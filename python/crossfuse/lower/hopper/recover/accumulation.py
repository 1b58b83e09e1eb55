"""Partial tiles that TMA adds in the L2 cache: one matrix of sums takes the place of all parts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.markers import ACCUMULATE, ACCUMULATIONS

#: Of names of buffers that sums are added in.
_SUMS = "crossfuse_sums_"


def read_accumulation(nest: TileNest, parts: int) -> int:
    """How many clusters add to each tile that a nest of partial tiles stores; 0 if none does.

    Parameters
    ----------
    nest : TileNest
        The nest.
    parts : int
        Parts of the reduction.

    Raises
    ------
    LoweringRefused
        If they are to be added in a way that there is not, or there is one part.
    """
    how = nest.block.annotations.get(ACCUMULATE)
    if how is None:
        return 0
    if str(how) not in ACCUMULATIONS:
        raise refuse_program(
            nest.where,
            f"partial tiles added by '{how}'",
            f"{ACCUMULATE} of {' or '.join(ACCUMULATIONS)}, or none: in the order of the parts",
        )
    if parts < 2:
        raise refuse_program(
            nest.where, f"{ACCUMULATE} of {parts} part", "at least 2 parts that TMA adds"
        )
    return parts


def accumulated(programs: list[TileProgram]) -> list[TileProgram]:
    """Programs in which parts that TMA adds have one matrix, as large as the output.

    Raises
    ------
    LoweringRefused
        If no nest takes their sum.
    """
    images: dict[Any, Any] = {}
    for program in programs:
        if program.store.adds:
            partial = program.store.tile.buffer
            if program.summed is None:
                raise refuse_program(
                    f"tensor '{partial.name}'",
                    f"{program.store.adds} partial tiles that TMA adds, and no sum of them",
                    "a nest that adds all parts and stores what the epilogue makes of their sum",
                )
            images[partial] = _sums_of(partial)
    return [_on_sums(each, images) for each in programs]


def _sums_of(partial: Any) -> Any:
    """The matrix that takes the place of [part, row, column]."""
    name = _SUMS + re.sub(r"\W", "_", str(partial.name))
    return ir.tirx.decl_buffer(list(partial.ty.shape)[1:], "float32", name, layout=None)


def _on_sums(program: TileProgram, images: dict[Any, Any]) -> TileProgram:
    parameters = tuple(images.get(each, each) for each in program.parameters)
    program = replace(program, parameters=parameters)
    summed = program.summed
    if not program.store.adds or summed is None:
        return program
    sums = images[program.store.tile.buffer]
    store = replace(program.store, tile=replace(program.store.tile, buffer=sums), part=None)
    summed = replace(summed, partial=sums, parameters=parameters, accumulated=True)
    return replace(program, store=store, summed=summed)
