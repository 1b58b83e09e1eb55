"""The loading roles: one thread keeps the ring of right tiles full, another that of left tiles.

Right tiles are weights, which depend on nothing: their thread runs on into the next phase while
left tiles wait for the preceding kernel, or for flags of the preceding phase.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.coordinates import at, grid_places
from crossfuse.lower.hopper.flags import FlagReader
from crossfuse.lower.hopper.pipeline import Cursor, Throttle
from crossfuse.lower.hopper.plan.operands import Operand
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.recover.contraction import first_of_reduction
from crossfuse.lower.hopper.rows.chunks import emit_chunks, emit_flags, factor_bytes, load_factors
from crossfuse.lower.hopper.rows.emit import emit_rows
from crossfuse.lower.hopper.rows.plan import FIRST_WARP, FLAG_WARP, ON_THEIR_WAY
from crossfuse.lower.hopper.statements import Variable, branches, let, run, when
from crossfuse.lower.hopper.tma import load_tile
from crossfuse.lower.hopper.warmup import hidden


def emit_loading(body: Body) -> None:
    """Emit the role of the warpgroup that loads."""
    thread = body.where.thread
    if body.chunks is not None:
        _emit_with_chunks(body)
        return
    with when(thread == 0):
        _emit_rights(body)
    # Flags are looked at by a whole warp.
    with when(body.where.warp == 1 if body.plan.is_persistent else thread == 32):
        _emit_lefts(body)
    rows, flags = body.plan.rows, body.plan.phases[0].awaits
    if rows is not None and flags is not None and not rows.by_warpgroups:
        with when(body.where.warp >= FIRST_WARP):
            emit_rows(body, rows, flags)
    if body.help is not None:
        with when(thread == FIRST_WARP * WARP):
            body.help.watch()
    if body.plan.cluster_size > 1:
        mbarrier.leave_cluster()


def _emit_with_chunks(body: Body) -> None:
    """Rows are made chunk by chunk: one warp raises flags, and another loads both operands."""
    (phase,) = body.plan.phases
    with when(body.where.warp == 0):
        _emit_both(body, phase)
    with when(body.where.thread == FLAG_WARP * WARP):
        emit_flags(body, phase)
    with when(body.where.warp >= FIRST_WARP):
        emit_chunks(body, phase)
    if body.plan.cluster_size > 1:
        mbarrier.leave_cluster()


def _emit_both(body: Body, phase: PhasePlan) -> None:
    """Load each step's right tile, then its left one; the first right tiles before any left."""
    assert phase.left is not None
    launch = _launches_before(body)
    left, right = Cursor(body.left), Cursor(body.right)
    steps = phase.program.contraction.steps
    ahead = min(body.right.stages, steps)
    early = Variable("early", "int32", ahead)
    first = body.where.places | grid_places(phase.program, body.where.cluster)
    with (
        when(ir.script.And(body.where.lane == 0, body.where.cluster < phase.program.tiles)),
        ir.script.serial(0, ahead) as step,
    ):
        values = first | {phase.program.contraction.step: step}
        _load(body, phase, "right", right, phase.rights, values)
        right.advance()
    reader = _reader(body, phase, launch)
    assert reader is not None
    with body.each_tile(phase) as places:
        _start(reader, phase, places)
        with body.each_step(phase) as (step, number):
            with when(body.where.lane == 0), branches(early.value > 0) as (there, missing):
                with there:
                    early.set(early.value - 1)
                with missing:
                    _load(body, phase, "right", right, phase.rights, places | step)
                    right.advance()
            reader.wait(at(_last_column(phase), places, step))
            with when(body.where.lane == 0):
                _load(body, phase, "left", left, phase.lefts, places | step, number)
            left.advance()
    _count_launch(body, launch)


def _start(reader: FlagReader, phase: PhasePlan, places: dict[Any, Any]) -> None:
    """Begin waiting with the flags of a tile."""
    assert phase.left is not None
    first = first_of_reduction(phase.program.contraction)
    row = at(phase.left.tile.origin[0], places)
    if phase.tails[0]:
        # A tile below the tensor has no flags, and loads zeros: any will do.
        row = ir.script.min(row, phase.left.tile.extents[0] - 1)
    reader.start(row, at(first, places))


def _last_column(phase: PhasePlan) -> Any:
    """The last column of a step's left tile."""
    assert phase.left is not None
    tile = phase.left.tile
    return tile.origin[1] + (tile.shape[1] - 1)


def _count_launch(body: Body, launch: Any) -> None:
    with when(body.where.lane == 0):
        ir.script.buffer_store(body.flags, launch + ir.script.uint32(1), [_own_count(body)])


def _emit_rights(body: Body) -> None:
    cursor = Cursor(body.right)
    plan = body.plan
    if plan.head is None:
        throttle = Throttle(body.right, plan.on_their_way, plan.on_their_way_first, body.rows_made)
    else:
        begin = ON_THEIR_WAY, 2 * plan.head.steps
        throttle = Throttle(body.right, plan.on_their_way, begin=begin)
    for number, phase in enumerate(plan.phases):
        body.timeline.stamp_here("weights asked for", number)
        # In front of a head this loop is waited for: it is short, and not unrolled.
        last = None if plan.head is None else hidden(_steps(phase))
        with body.each_tile(phase) as places, body.each_step(phase, 0, last) as (step, _):
            throttle()
            _load(body, phase, "right", cursor, phase.rights, places | step)
            cursor.advance()


def _steps(phase: PhasePlan) -> Any:
    return ir.script.int32(phase.program.contraction.steps)


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
        told = None
        if phase is plan.phases[0] and body.rows_made is not None:
            told = Variable("told", "int32", 0)
        with body.each_tile(phase) as places:
            if reader is not None:
                _start(reader, phase, places)
            first = 0 if phase is not plan.phases[0] else _emit_raw(body, phase, cursor, places)
            with body.each_step(phase, first) as (step, _):
                if reader is not None:
                    reader.wait(at(_last_column(phase), places, step))
                if told is not None:
                    _tell_once(body, told)
                with when(body.where.lane == 0) if plan.is_persistent else nullcontext():
                    _load(body, phase, "left", cursor, phase.lefts, places | step)
                cursor.advance()
    for each in plan.features:
        each.loaded(body, launch)
    if plan.is_persistent:
        _count_launch(body, launch)


def _emit_raw(body: Body, phase: PhasePlan, cursor: Cursor, places: dict[Any, Any]) -> int:
    """Load the raw tiles of a head; returns their number.

    They wait for no other CTA, but for the rows of this one: the warpgroup that makes these needs
    the same elements first, which are in L2 then.
    """
    head = body.plan.head
    if head is None or phase.left is None:
        return 0
    mbarrier.wait(body.own_made, 0)
    # Code that runs once is fetched from L2: of a number that it knew, the compiler would make as
    # many copies.
    raw = replace(phase.left, map=head.raw)
    with body.each_step(phase, 0, hidden(ir.script.int32(head.steps))) as (step, _):
        with when(body.where.lane == 0):
            _load(body, phase, "left", cursor, (raw,), places | step)
        cursor.advance()
    return head.steps


def _tell_once(body: Body, told: Variable) -> None:
    """Signal the loader of right tiles that the rows of the first left tile are made."""
    with when(told.value == 0):
        told.set(1)
        with when(body.where.lane == 0):
            mbarrier.arrive(body.rows_made)


def _load(
    body: Body,
    phase: PhasePlan,
    name: str,
    cursor: Cursor,
    operands: tuple[Operand, ...],
    values: dict[Any, Any],
    number: Any = None,
) -> None:
    """Load tiles into the next stage of a ring, once all consumers have read what it holds.

    With the `number` of a step, the factors of its chunk too.
    """
    plan, ring = (body.plan.left, body.left) if name == "left" else (body.plan.right, body.right)
    address = body.region(name)
    cursor.wait_empty()
    full = ring.full(cursor.stage)
    size = sum(each.size for each in operands)
    mbarrier.expect(full, size if number is None else size + factor_bytes(phase, number))
    if number is not None:
        load_factors(body, phase, values, number, cursor.stage, full)
    load = partial(_load_tiles, body, phase, values, cursor.stage * plan.pitch, address, full)
    features = body.plan.features if name == "right" else ()
    if not any(each.load_rights(body, phase, load) for each in features):
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
    """Load tiles back to back into a stage, which starts at an offset of the ring."""
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
    ending = None if body.help is None else body.help.ending
    return FlagReader(body.placed(flags), launch, ending)
