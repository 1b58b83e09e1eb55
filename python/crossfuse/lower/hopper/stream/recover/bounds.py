"""How far a stream goes: its bounds for every place, by enumeration."""

from __future__ import annotations

from itertools import product
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.stream.program.parts import Stream
from crossfuse.lower.hopper.stream.recover.statements import refuse_stream
from crossfuse.markers import STREAM


def stream_of(loop: Any, places: tuple[Place, ...], parted: bool = False) -> tuple[Stream, Any]:
    """Read the loop of a stream.

    Parameters
    ----------
    loop : tvm.tirx.For
        The loop.
    places : tuple[Place, ...]
        Coordinates around it.
    parted : bool
        Whether CTAs share the keys. One may have no part of them: its state is that of no keys.

    Returns
    -------
    tuple[Stream, tvm.tirx.For]
        The stream, and a loop over all values that its variable takes anywhere.

    Raises
    ------
    LoweringRefused
        If it has no turn for some place that shares no keys, or its bounds are no functions of
        places.
    """
    used = {each for bound in (loop.min, loop.extent) for each in ir.variables(bound)}
    moving = [each for each in places if each.var in used]
    if len(moving) != len(used):
        raise refuse_stream(
            f"loop '{loop.loop_var.name}'",
            f"bounds {loop.min} and {loop.extent}",
            "functions of the coordinates of CTAs",
        )
    firsts, ends = [], []
    for indices in product(*(range(each.extent) for each in moving)):
        first, count = _bounds(loop, moving, indices)
        if count < 1 and not parted:
            where = ", ".join(
                f"{each.var.name} = {i}" for each, i in zip(moving, indices, strict=True)
            )
            raise refuse_stream(
                f"loop '{loop.loop_var.name}'",
                f"{count} tiles of keys for {where}",
                "one tile at least: a kernel multiplies the first one before it looks further",
                "let the loop go through one tile there, whose keys are all masked",
            )
        firsts.append(first)
        ends.append(first + count)
    stages = ir.constant(loop.annotations[STREAM]) or 0
    bounds = (min(firsts), max(ends))
    kind = str(loop.loop_var.ty)
    ranged = ir.for_like(
        loop,
        loop.body,
        min=ir.tirx.IntImm(kind, bounds[0]),
        extent=ir.tirx.IntImm(kind, bounds[1] - bounds[0]),
    )
    return Stream(loop.loop_var, loop.min, loop.extent, stages, bounds), ranged


def _bounds(loop: Any, moving: list[Place], indices: tuple[int, ...]) -> tuple[int, int]:
    """First value and number of turns for one place."""
    values = dict(zip((each.var for each in moving), indices, strict=True))

    def value(var: Any) -> Any:
        return ir.tirx.IntImm(str(var.ty), values[var]) if var in values else var

    known = ir.sym.Analyzer()
    found = [
        ir.constant(known.simplify(ir.substitute(each, value))) for each in (loop.min, loop.extent)
    ]
    first, count = found
    assert first is not None and count is not None
    return first, count
