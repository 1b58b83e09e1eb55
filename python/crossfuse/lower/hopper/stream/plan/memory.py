"""Divides shared memory: slots of queries, stages of keys and of values, and what is passed on."""

from __future__ import annotations

from crossfuse.hardware import Device
from crossfuse.lower.hopper.plan.arena import Arena
from crossfuse.lower.hopper.stream.plan.inbox import Inbox
from crossfuse.lower.hopper.stream.plan.operands import Operands
from crossfuse.lower.hopper.stream.plan.passed import Passed
from crossfuse.lower.hopper.stream.program.stream import StreamProgram
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

#: Stages of keys and values that are of use; where few rows are computed, memory is what counts.
_MOST_STAGES, _MOST_OF_FEW_ROWS = 4, 12
#: Bytes of what is written to keep arithmetic in its place, and of a barrier.
_SCRATCH, _BARRIER = 16, 8


def divide_memory(
    program: StreamProgram, operands: Operands, between: Inbox | Passed | None, device: Device
) -> tuple[int, int, Arena]:
    """Decide slots of queries, stages and places: two slots if they fit, then stages that do.

    Parameters
    ----------
    program : StreamProgram
        What is computed.
    operands : Operands
        Sizes of what is copied.
    between : Inbox | Passed | None
        What CTAs hand over, or warpgroups to one another.
    device : Device
        How much there is.

    Returns
    -------
    tuple[int, int, Arena]
        Slots, stages, and all regions.

    Raises
    ------
    LoweringRefused
        If not even the fewest stages fit, or fewer are asked for than can work.
    """
    wanted = program.stream.stages
    most = _MOST_OF_FEW_ROWS if program.output.rows < WARPGROUP_ROWS else _MOST_STAGES
    least = _least_stages(program, between)
    choices = [wanted] if wanted else range(most, least - 1, -1)
    for slots, stages in sorted(
        # A CTA that shares keys with others has one tile of queries; where warpgroups share
        # columns, results leave from there.
        ((slots, stages) for slots in ((2, 1) if between is None else (1,)) for stages in choices),
        key=lambda each: (each[1] >= 2, each[0], each[1]),
        reverse=True,
    ):
        arena = _arena(program, operands, between, slots, stages)
        if arena.size <= device.max_shared_bytes:
            return slots, stages, arena
    fewest = min(choices)
    raise refuse(
        "shared-memory",
        "kernel",
        found=f"{_arena(program, operands, between, 1, fewest).size} bytes for {fewest} stages of "
        "keys and values",
        limit=f"{device.max_shared_bytes} bytes on {device.name}",
        instead="use fewer stages or smaller tiles",
    )


def _least_stages(program: StreamProgram, between: Inbox | Passed | None) -> int:
    """Stages without which a kernel would wait for ever.

    A warpgroup that does all multiplies keys of a tile before the values of the one before it.
    """
    least = 2 if program.shares_tile and not isinstance(between, Passed) else 1
    wanted = program.stream.stages
    if 0 < wanted < least:
        raise refuse(
            "stream-stages",
            f"loop '{program.stream.var.name}'",
            found=f"{wanted} stage of a tile that is keys and values",
            limit=f"{least}: keys of a tile are multiplied before the values of the one before",
            instead=f"annotate the loop with {least} stages, or 0 for as many as fit",
        )
    return least


def _arena(
    program: StreamProgram,
    operands: Operands,
    between: Inbox | Passed | None,
    slots: int,
    stages: int,
) -> Arena:
    queries, keys, values, output = operands
    pattern, rings = 8 * ROW_BYTES, 1 if program.shares_tile else 2
    of_queries = slots * queries.size
    if between is None:
        leaving = ("boxes", output.size * program.tile[0] // WARPGROUP_ROWS)
    elif isinstance(between, Inbox):
        leaving = ("inbox", 0 if between.in_memory else between.bytes)
    else:
        of_queries, leaving = max(of_queries, output.size), ("passed", between.bytes)
    arena = Arena()
    for name, size in (
        ("queries", of_queries),
        ("keys", stages * keys.size),
        ("values", (rings - 1) * stages * values.size),
        leaving,
        ("barriers", 2 * _BARRIER * (slots + rings * stages) + _BARRIER * (leaving[0] == "inbox")),
        ("scratch", _SCRATCH),
    ):
        arena = arena.with_region(name, size, pattern if name not in ("barriers", "scratch") else 8)
    return arena
