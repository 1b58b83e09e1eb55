"""The loading roles: one thread keeps the ring of right tiles full, another that of left tiles.

Right tiles are weights, which nobody waits for: their thread runs ahead into the next phase while
left tiles wait for the kernel before, or for flags of the phase before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.flags import FlagReader
from crossfuse.lower.hopper.load import load_tile
from crossfuse.lower.hopper.operand import Operand
from crossfuse.lower.hopper.phase import PhasePlan
from crossfuse.lower.hopper.recover_contraction import first_of_reduction
from crossfuse.lower.hopper.ring import Cursor, Throttle
from crossfuse.lower.hopper.rows.emit import FIRST_WARP, emit_rows
from crossfuse.lower.hopper.statements import branches, let, run, when
from crossfuse.lower.hopper.sums import await_parts


def emit_loading(body: Body) -> None:
    """Write the warpgroup that loads."""
    thread = body.where.thread
    with when(thread == 0):
        _emit_rights(body)
    # Flags are looked at by a whole warp.
    with when(body.where.warp == 1 if body.plan.is_persistent else thread == 32):
        _emit_lefts(body)
    rows, flags = body.plan.rows, body.plan.phases[0].awaits
    if rows is not None and flags is not None:
        with when(body.where.warp >= FIRST_WARP):
            emit_rows(body, rows, flags)
    if body.plan.cluster_size > 1:
        mbarrier.leave_cluster()


def _emit_rights(body: Body) -> None:
    cursor = Cursor(body.right)
    throttle = Throttle(body.right, body.plan.on_their_way, body.plan.on_their_way_first)
    for number, phase in enumerate(body.plan.phases):
        body.timeline.stamp_here("weights asked for", number)
        with body.each_tile(phase) as places, body.each_step(phase) as (step, _):
            throttle()
            _load(body, phase, "right", cursor, phase.rights, places | step)
            cursor.advance()


def _emit_lefts(body: Body) -> None:
    plan = body.plan
    if plan.early:
        run(ir.script.ptx.griddepcontrol.wait())
    launch = _launches_before(body) if plan.is_persistent else None
    cursor = Cursor(body.left)
    for phase in plan.phases:
        if phase.left is None:
            continue
        reader = _reader(body, phase, launch)
        with body.each_tile(phase) as places:
            if reader is not None:
                first = first_of_reduction(phase.program.contraction)
                row = at(phase.left.tile.origin[0], places)
                if phase.tails[0]:
                    # A tile below the tensor has no flags, and loads zeros: any will do.
                    row = ir.script.min(row, phase.left.tile.extents[0] - 1)
                reader.start(row, at(first, places))
            with body.each_step(phase) as (step, _):
                if reader is not None:
                    last = phase.left.tile.origin[1] + (phase.left.tile.shape[1] - 1)
                    reader.wait(at(last, places, step))
                with when(body.where.lane == 0) if plan.is_persistent else nullcontext():
                    _load(body, phase, "left", cursor, phase.lefts, places | step)
                cursor.advance()
    if plan.summed is not None:
        flags = plan.phases[-1].raises
        assert flags is not None
        with body.each_tile(plan.phases[-1]) as places:
            values = places | body.places_of_sum(plan.summed)
            await_parts(plan.summed, body.placed(flags), launch, values)
            with when(body.where.lane == 0):
                mbarrier.arrive(body.summed)
    if plan.is_persistent:
        with when(body.where.lane == 0):
            ir.script.buffer_store(body.flags, launch + ir.script.uint32(1), [_own_count(body)])


def _load(
    body: Body,
    phase: PhasePlan,
    name: str,
    cursor: Cursor,
    operands: tuple[Operand, ...],
    values: dict[Any, Any],
) -> None:
    """Load tiles into the next stage of a ring, once everybody has read what it holds."""
    plan, ring = (body.plan.left, body.left) if name == "left" else (body.plan.right, body.right)
    address = body.region(name)
    cursor.wait_empty()
    full = ring.full(cursor.stage)
    mbarrier.expect(full, sum(each.size for each in operands))
    load = partial(_load_tiles, body, phase, values, cursor.stage * plan.pitch, address, full)
    if name == "right" and phase.others:
        exchange = phase.program.exchange
        assert exchange is not None
        with branches(body.where.places[exchange.place.var] == 0) as (one, other):
            with one:
                load(operands)
            with other:
                load(phase.others)
        return
    load(operands)


def _load_tiles(
    body: Body,
    phase: PhasePlan,
    values: dict[Any, Any],
    stage: Any,
    address: Callable[[Any], Any],
    full: Any,
    operands: tuple[Operand, ...],
) -> None:
    """Load tiles one behind the other into a stage, which starts at an offset of the ring."""
    start = 0
    for operand in operands:
        first = stage + start
        load_tile(
            phase.program,
            operand,
            body.maps[operand.map.name],
            body.where,
            values,
            lambda offset, first=first: address(first + offset),
            full,
        )
        start += operand.size


def _own_count(body: Body) -> Any:
    """Where this CTA counts the launches that it has seen."""
    cta = body.where.cluster * body.plan.cluster_size + body.where.rank
    return body.plan.flag_count + cta


def _launches_before(body: Body) -> Any:
    """How often the kernel ran before on these flags: nothing is cleared between launches."""
    launches = let("launches_before", body.flags[_own_count(body)])
    run(ir.script.cuda.warp_sync())  # one lane counts this launch before the others are done
    return launches


def _reader(body: Body, phase: PhasePlan, launch: Any) -> FlagReader | None:
    flags = phase.awaits
    if flags is None:
        return None
    return FlagReader(body.placed(flags), launch)
