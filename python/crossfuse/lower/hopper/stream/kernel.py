"""Composes the kernel of a stream: one warpgroup loads, the others multiply and store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.coordinates import declare_coordinates
from crossfuse.lower.hopper.pipeline import fetch_descriptors
from crossfuse.lower.hopper.program.tile import with_parameters
from crossfuse.lower.hopper.statements import ONE_CTA, branches, parameter, run, set_registers, when
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.consumer import Adder, Consumer, Scorer
from crossfuse.lower.hopper.stream.copies import emit_loading
from crossfuse.lower.hopper.stream.merge import SplitConsumer, state_parameter
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.plan.registers import launched_registers
from crossfuse.planner.kernels.stream import REGISTERS, SHARED_REGISTERS


def emit_stream(plan: StreamPlan, name: str) -> Any:
    """Write a kernel as TIRx, before TVM's pipeline."""
    with ir.IRBuilder() as builder, ir.script.prim_func():
        ir.script.func_name(name)
        images = {each: parameter(each) for each in plan.program.parameters}
        states = None if plan.states is None else state_parameter(plan.states)
        maps = {
            each.name: ir.script.arg(each.name, ir.script.TensorMap()) for each in plan.tensor_maps
        }
        ir.script.device_entry()
        with ir.script.attr(ONE_CTA):
            of_images = replace(plan, program=with_parameters(plan.program, images))
            _emit_body(of_images, maps, states)
    return builder.get()


def _emit_body(plan: StreamPlan, maps: dict[str, Any], states: Any) -> None:
    where = declare_coordinates(plan)
    memory = ir.script.alloc_buffer((plan.arena.size,), "uint8", scope="shared.dyn", align=1024)
    ir.IRBuilder.name("memory", memory)
    body = StreamBody.declared(plan, where, maps, memory, states=states)
    with when(ir.script.And(where.warpgroup == 0, where.thread < WARP)):
        body.initialise()
        mbarrier.publish_initialised()
    with when(ir.script.And(where.warpgroup == 0, where.thread >= 3 * WARP)):
        fetch_descriptors(plan.tensor_maps, where.lane, maps)
    mbarrier.meet_started(plan.sharers)
    if plan.states is not None:  # who merges may be launched, and waits for the end of this kernel
        run(ir.script.ptx.griddepcontrol.launch_dependents())
    if plan.receives:
        mbarrier.say_started()  # nobody is reached before the keys have been multiplied
    fewer = (SHARED_REGISTERS[plan.adders] if plan.adders else REGISTERS[plan.consumers])[0]
    with branches(where.warpgroup == 0) as (loading, multiplying):
        with loading:
            set_registers("dec", fewer)
            emit_loading(body)
            if plan.receives:
                mbarrier.await_started()
        with multiplying:
            _emit_multiplying(body)
    if plan.sharers > 1:  # until then peers may hand stages back, or fill them
        mbarrier.leave_cluster()
        mbarrier.await_left()


def _emit_multiplying(body: StreamBody) -> None:
    """Write what warpgroups other than the first do."""
    plan = body.plan
    if not plan.adders:
        set_registers("inc", REGISTERS[plan.consumers][1])
        (Consumer if plan.mailbox is None else SplitConsumer)(body).emit()
        return
    _, of_scores, of_sums, _ = SHARED_REGISTERS[plan.adders]
    started = launched_registers(plan.threads)
    with branches(body.where.warpgroup == 1) as (scoring, adding):
        with scoring:
            set_registers("inc" if of_scores > started else "dec", of_scores)
            Scorer(body).emit()
        with adding:
            set_registers("inc", of_sums)
            Adder(body).emit()
