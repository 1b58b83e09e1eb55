"""Composes a kernel of its roles: one warpgroup loads, the others multiply and store."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.consumer import emit_multiplying
from crossfuse.lower.hopper.coordinates import Coordinates, declare_coordinates
from crossfuse.lower.hopper.kernel_parts import (
    ONE_CTA,
    fetch_descriptors,
    parameter,
    ring_barriers,
    set_registers,
)
from crossfuse.lower.hopper.plan.kernel import KernelPlan
from crossfuse.lower.hopper.producer import emit_loading
from crossfuse.lower.hopper.rows.emit import fetch_rows, meet_and_make_rows
from crossfuse.lower.hopper.rows.head import HeadRows
from crossfuse.lower.hopper.rows.helping import Help
from crossfuse.lower.hopper.rows.plan import BESIDE_HEAD, ChunkBarriers
from crossfuse.lower.hopper.statements import branches, run, when
from crossfuse.lower.hopper.timeline import Timeline, timeline_buffer
from crossfuse.lower.image import ROW_COUNT
from crossfuse.markers import FAST


def emit_kernel(plan: KernelPlan, name: str) -> Any:
    """Emit a kernel as TIRx, before TVM's pipeline."""
    with ir.IRBuilder() as builder, ir.script.prim_func():
        ir.script.func_name(name)
        if plan.rows is not None and plan.rows.fast:
            ir.script.func_attr({FAST: 1})
        parameters = dict.fromkeys(each for p in plan.phases for each in p.program.parameters)
        images = {each: parameter(each) for each in parameters}
        rows = plan.phases[0].program.store.rows
        if rows is not None:
            images[rows.count] = ir.script.arg(ROW_COUNT, ir.script.int32())
        flags, stamps, factors = (
            [
                ir.script.arg(each.name, ir.script.Buffer(list(each.shape), each.dtype))
                for each in group
            ]
            for group in (
                plan.state,
                (timeline_buffer(plan),) if plan.timed else (),
                plan.workspaces,
            )
        )
        maps = {
            each.name: ir.script.arg(each.name, ir.script.TensorMap()) for each in plan.tensor_maps
        }
        ir.script.device_entry()
        with ir.script.attr(ONE_CTA):
            phases = tuple(
                replace(each, program=each.program.with_parameters(images)) for each in plan.phases
            )
            kept = [each[0] if each else None for each in (flags, stamps, factors)]
            _emit_body(replace(plan, phases=phases), maps, *kept)
    return builder.get()


def _emit_body(
    plan: KernelPlan, maps: dict[str, Any], flags: Any, stamps: Any, factors: Any
) -> None:
    where = declare_coordinates(plan)
    timeline = Timeline(plan, where, stamps)
    timeline.begin()
    body = replace(_declared(plan, where, maps, flags, timeline), factors=factors)
    fetch_rows(plan, where)
    if plan.helps:
        _emit_roles_at_once(body)
    else:
        _emit_roles(body)
    if plan.cluster_size > 1:
        # Peers may still write this CTA's stages and arrive at its barriers.
        mbarrier.await_left()
    timeline.stamp("end")


def _emit_roles(body: Body) -> None:
    """All warps prepare the kernel, then each takes its role."""
    _prepare(body)
    meet_and_make_rows(body)
    body.timeline.stamp("cluster met")
    _let_next_begin()
    fewer, more = body.plan.registers
    with branches(body.where.warpgroup == 0) as (loading, multiplying):
        with loading:
            set_registers("dec", fewer)
            emit_loading(body)
        with multiplying:
            set_registers("inc", more)
            emit_multiplying(body)


def _emit_roles_at_once(body: Body) -> None:
    """In a cluster: the loading warps prepare the kernel while the others begin with rows."""
    fewer, more = body.plan.registers
    if body.plan.cluster_size == 1:
        _prepare(body)
        mbarrier.meet_started(1)
    with branches(body.where.warpgroup == 0) as (loading, multiplying):
        with loading:
            set_registers("dec", fewer)
            if body.plan.cluster_size > 1:
                _prepare(body)
                mbarrier.meet_started(body.plan.cluster_size)
            _let_next_begin()
            emit_loading(body)
        with multiplying:
            if body.plan.head is not None:
                _emit_beside_rows(body)
            else:
                set_registers("inc", more)
                _begin(body)
                emit_multiplying(body)


def _emit_beside_rows(body: Body) -> None:
    """One warpgroup makes rows, the others multiply."""
    with branches(body.where.warpgroup > body.plan.consumers) as (making, multiplying):
        with making:
            set_registers("dec", BESIDE_HEAD[2])
            _begin(body)
            HeadRows(body).emit()
        with multiplying:
            set_registers("inc", body.plan.registers[1])
            _begin(body)
            emit_multiplying(body)


def _begin(body: Body) -> None:
    """Signal the cluster that these threads run; they wait for the others later."""
    if body.plan.cluster_size > 1:
        mbarrier.say_started()


def _prepare(body: Body) -> None:
    where = body.where
    with when(ir.script.And(where.warpgroup == 0, where.thread < WARP)):
        _initialise(body)
        mbarrier.publish_initialised()
    with when(ir.script.And(where.warpgroup == 0, where.thread >= 3 * WARP)):
        fetch_descriptors(body.plan.tensor_maps, where.lane, body.maps)


def _let_next_begin() -> None:
    # The next kernel may be launched; it waits for the end of this one where it needs it.
    run(ir.script.ptx.griddepcontrol.launch_dependents())


def _declared(
    plan: KernelPlan, where: Coordinates, maps: dict[str, Any], flags: Any, timeline: Timeline
) -> Body:
    """Declare the shared memory of a kernel, with its barriers."""
    arena = plan.arena
    memory = ir.script.alloc_buffer((arena.size,), "uint8", scope="shared.dyn", align=1024)
    ir.IRBuilder.name("memory", memory)

    def barrier(name: str, number: Any = 0) -> Any:
        return memory.ptr_to([arena[name].offset + number * 8])

    stages = plan.left.stages
    left = ring_barriers(arena, memory, "left_barriers", stages, 0)
    right = ring_barriers(arena, memory, "right_barriers", plan.right.stages, 16 * stages)
    rows_made = None
    if plan.holds_weights_back or plan.helps:
        rows_made = barrier("rows_barrier")
    chunks = None
    if plan.phases[0].chunks is not None:
        chunks = ChunkBarriers(plan.phases[0].chunks, partial(barrier, "row_barriers"))
    barriers = (left, right, rows_made)
    own_made = barrier("own_rows_barrier") if plan.head is not None else None
    body = Body(plan, where, maps, memory, *barriers, flags, timeline, chunks, own_made=own_made)
    if not plan.helps:
        return body
    return replace(body, help=Help(rows_made, *(barrier("help", each) for each in range(3))))


def _initialise(body: Body) -> None:
    """Initialise all barriers, by one warp."""
    plan, thread = body.plan, body.where.thread
    body.left.initialise(plan.consumers * plan.left.sharers, thread)
    body.right.initialise(plan.consumers * plan.right.sharers, thread)
    if body.chunks is not None:
        body.chunks.initialise(thread)
    for barrier in (body.rows_made, body.own_made):
        if barrier is not None:
            with when(thread == 0):
                mbarrier.initialise(barrier, 1)
    if body.help is not None:
        with when(thread == 0):
            body.help.initialise(len(plan.makers))
    for each in plan.features:
        each.initialise(body)
