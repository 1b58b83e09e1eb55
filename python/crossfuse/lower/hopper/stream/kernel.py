"""Composes the kernel of a stream: one warpgroup loads, the others multiply and store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.coordinates import declare_coordinates
from crossfuse.lower.hopper.pipeline import prepare
from crossfuse.lower.hopper.program.tile import with_parameters
from crossfuse.lower.hopper.statements import branches, run, set_registers
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.consumer import Adder, Consumer, Scorer
from crossfuse.lower.hopper.stream.copies import emit_loading
from crossfuse.lower.hopper.stream.merge import SplitConsumer
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.plan.registers import launched_registers
from crossfuse.planner.kernels.stream import REGISTERS, SHARED_REGISTERS


def emit_stream(
    plan: StreamPlan, images: dict[Any, Any], buffers: dict[str, Any], maps: dict[str, Any]
) -> None:
    """Write the body of a kernel of its own."""
    plan = replace(plan, program=with_parameters(plan.program, images))
    states = None if plan.states is None else buffers[plan.states.name]
    where = declare_coordinates(plan)
    memory = ir.script.alloc_buffer((plan.arena.size,), "uint8", scope="shared.dyn", align=1024)
    ir.IRBuilder.name("memory", memory)
    body = StreamBody.declared(plan, where, maps, memory, states=states)
    prepare(where, body.initialise, plan.tensor_maps, maps)
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
