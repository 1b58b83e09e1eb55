"""Composes a kernel of its roles: one warpgroup loads, the others multiply and store."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.consumer import emit_multiplying
from crossfuse.lower.hopper.coordinates import Coordinates, declare_coordinates
from crossfuse.lower.hopper.pipeline import ring_barriers
from crossfuse.lower.hopper.plan.kernel import KernelPlan
from crossfuse.lower.hopper.producer import emit_loading
from crossfuse.lower.hopper.statements import ONE_CTA, branches, parameter, run, set_registers, when
from crossfuse.lower.hopper.timeline import Timeline, timeline_buffer
from crossfuse.lower.hopper.tma import fetch_descriptors
from crossfuse.lower.image import ROW_COUNT
from crossfuse.markers import FAST


def emit_kernel(plan: KernelPlan, name: str) -> Any:
    """Emit a kernel as TIRx, before TVM's pipeline."""
    with ir.IRBuilder() as builder, ir.script.prim_func():
        ir.script.func_name(name)
        if any(each.fast for each in plan.features):
            ir.script.func_attr({FAST: 1})
        parameters = dict.fromkeys(each for p in plan.phases for each in p.program.parameters)
        images = {each: parameter(each) for each in parameters}
        rows = plan.phases[0].program.store.rows
        if rows is not None:
            images[rows.count] = ir.script.arg(ROW_COUNT, ir.script.int32())
        stamps = [timeline_buffer(plan)] if plan.timed else []
        buffers = {
            each.name: ir.script.arg(each.name, ir.script.Buffer(list(each.shape), each.dtype))
            for each in (*plan.state, *stamps, *plan.workspaces)
        }
        maps = {
            each.name: ir.script.arg(each.name, ir.script.TensorMap()) for each in plan.tensor_maps
        }
        ir.script.device_entry()
        with ir.script.attr(ONE_CTA):
            phases = tuple(
                replace(each, program=each.program.with_parameters(images)) for each in plan.phases
            )
            where = declare_coordinates(plan, phases)
            timeline = Timeline(plan, where, buffers[stamps[0].name] if stamps else None)
            _emit_body(replace(plan, phases=phases), where, maps, buffers, timeline)
    return builder.get()


def _emit_body(
    plan: KernelPlan,
    where: Coordinates,
    maps: dict[str, Any],
    buffers: dict[str, Any],
    timeline: Timeline,
) -> None:
    timeline.begin()
    memory = ir.script.alloc_buffer((plan.arena.size,), "uint8", scope="shared.dyn", align=1024)
    ir.IRBuilder.name("memory", memory)
    stages = plan.left.stages
    left = ring_barriers(plan.arena, memory, "left_barriers", stages, 0)
    right = ring_barriers(plan.arena, memory, "right_barriers", plan.right.stages, 16 * stages)
    body = Body(plan, where, maps, memory, left, right, buffers, timeline)
    for each in plan.features:
        each.prefetch(body)
    (_emit_roles_at_once if plan.helps else _emit_roles)(body)
    if plan.cluster_size > 1:
        # Peers may still write this CTA's stages and arrive at its barriers.
        mbarrier.await_left()
    timeline.stamp("end")


def _emit_roles(body: Body) -> None:
    """All warps prepare the kernel, then each takes its role."""
    _prepare(body)
    _meet(body)
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


def _meet(body: Body) -> None:
    """Wait until the CTAs of the cluster have started."""
    if body.plan.cluster_size == 1:
        mbarrier.meet_started(1)
    else:
        mbarrier.say_started()
    for each in body.plan.features:
        each.meeting(body)
    if body.plan.cluster_size > 1:
        mbarrier.await_started()


def _emit_roles_at_once(body: Body) -> None:
    """In a cluster: the loading warps prepare the kernel while the others begin."""
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
        with multiplying, ExitStack() as others:
            for each in body.plan.features:
                others.enter_context(each.apart(body))
            set_registers("inc", more)
            if body.plan.cluster_size > 1:
                mbarrier.say_started()  # they wait for the cluster later
            emit_multiplying(body)


def _prepare(body: Body) -> None:
    """Initialise all barriers by one warp, and fetch descriptors by another."""
    plan, where = body.plan, body.where
    with when(ir.script.And(where.warpgroup == 0, where.thread < WARP)):
        body.left.initialise(plan.consumers * plan.left.sharers, where.thread)
        body.right.initialise(plan.consumers * plan.right.sharers, where.thread)
        for each in plan.features:
            each.initialise(body)
        mbarrier.publish_initialised()
    with when(ir.script.And(where.warpgroup == 0, where.thread >= 3 * WARP)):
        fetch_descriptors(plan.tensor_maps, where.lane, body.maps)


def _let_next_begin() -> None:
    # The next kernel may be launched; it waits for the end of this one where it needs it.
    run(ir.script.ptx.griddepcontrol.launch_dependents())
