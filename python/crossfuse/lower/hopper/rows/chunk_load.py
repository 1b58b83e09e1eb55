"""Factors of a chunk: they come with the left tile of its first step, a slot in each stage."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import run, when
from crossfuse.lower.hopper.tma import load_name

#: Bytes of a factor.
FACTOR = 4


def steps_of_chunk(phase: PhasePlan) -> int:
    """Steps of the reduction that make a chunk."""
    assert phase.chunks is not None
    return phase.chunks.loop.size // phase.program.contraction.depth


def factor_bytes(phase: PhasePlan, step: Any) -> Any:
    """Bytes of the factors that come with a step."""
    if phase.chunks is None:
        return 0
    begins = step % steps_of_chunk(phase) == 0
    return ir.script.Select(begins, FACTOR * phase.chunks.tile, 0)


def load_factors(
    body: Body, phase: PhasePlan, values: dict[Any, Any], step: Any, stage: Any, full: Any
) -> None:
    """Load the factors of a chunk for the rows of a tile, if a step begins one.

    Parameters
    ----------
    body : Body
        Of the kernel.
    phase : PhasePlan
        The product.
    values : dict
        Values of all variables of the left tile's origin.
    step : Any
        Number of the step.
    stage : Any
        Stage of the left tile.
    full : Any
        Barrier that counts their bytes, see `factor_bytes`.
    """
    if phase.chunks is None:
        return
    left = phase.program.contraction.left
    row, column = (at(each, values) for each in left.origin)
    address = ir.script.address_of(body.maps[phase.chunks.factors.name])
    to = body.region("factors")(stage * (FACTOR * phase.chunks.tile))
    with when(step % steps_of_chunk(phase) == 0):
        chunk = column // phase.chunks.loop.size
        run(ir.script.ptx[load_name(2)](to, address, row, chunk, full))
