"""From a tile program to a kernel image, past TVM's pipeline for general kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import Device, tvm_target
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.features.feature import Timeline, events, timeline_buffer
from crossfuse.lower.hopper.pipeline import SharedMemory, prepare
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.program.tile import identifier, with_parameters
from crossfuse.lower.hopper.recover.function import recover, workspaces
from crossfuse.lower.hopper.reduced import recover_reduced
from crossfuse.lower.hopper.roles import Body, emit_loading, emit_multiplying
from crossfuse.lower.hopper.statements import (
    branches,
    ctas_of_sm,
    declare_coordinates,
    parameter,
    run,
    set_registers,
)
from crossfuse.lower.hopper.stream.feature import emit_stream
from crossfuse.lower.hopper.stream.merge import MergePlan, emit_merge, plan_merge
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan, plan_stream
from crossfuse.lower.hopper.stream.program import StreamProgram
from crossfuse.lower.hopper.stream.recover.function import recover_streams
from crossfuse.lower.hopper.stream.warps import WarpPlan, emit_warps, has_few_rows, plan_warps
from crossfuse.lower.image import (
    ROW_COUNT,
    BufferSpec,
    KernelImage,
    Launch,
    Placement,
    SharedMemoryPlan,
)
from crossfuse.lower.pipeline import kernel_pipeline
from crossfuse.lower.refusal import refuse
from crossfuse.markers import (
    FAST,
    constant_parameters,
    holds_stream,
    is_reduced,
    staged_blocks,
    starts_early,
)
from crossfuse.planner.kernels.memory import STAGE_BARRIERS

#: What kernels are made of, and how they are launched.
_Plan = KernelPlan | StreamPlan | WarpPlan | MergePlan


def _emit(plan: _Plan, name: str) -> Any:
    """Write a kernel as TIRx, before TVM's pipeline: its parameters, then the body of its kind."""
    with ir.IRBuilder() as builder, ir.script.prim_func():
        ir.script.func_name(name)
        if plan.fast:
            ir.script.func_attr({FAST: 1})
        images = {each: parameter(each) for each in plan.parameters}
        if plan.row_count is not None:
            images[plan.row_count] = ir.script.arg(ROW_COUNT, ir.script.int32())
        stamps = [timeline_buffer(plan)] if isinstance(plan, KernelPlan) and plan.timed else []
        buffers = {
            each.name: ir.script.arg(each.name, ir.script.Buffer(list(each.shape), each.dtype))
            for each in (*plan.state, *stamps, *plan.workspaces)
        }
        maps = {
            each.name: ir.script.arg(each.name, ir.script.TensorMap()) for each in plan.tensor_maps
        }
        ir.script.device_entry()
        if isinstance(plan, MergePlan):
            emit_merge(plan, images, buffers)
        elif isinstance(plan, WarpPlan):
            with ir.script.attr(ctas_of_sm(plan.resident)):
                emit_warps(plan, images)
        else:
            with ir.script.attr(ctas_of_sm(1)):
                if isinstance(plan, StreamPlan):
                    emit_stream(plan, images, buffers, maps)
                else:
                    _emit_products(plan, images, buffers, maps)
    return builder.get()


# A kernel of products by its roles: one warpgroup loads, the others multiply and store.


def _emit_products(
    plan: KernelPlan, images: dict[Any, Any], buffers: dict[str, Any], maps: dict[str, Any]
) -> None:
    phases = tuple(
        replace(each, program=with_parameters(each.program, images)) for each in plan.phases
    )
    where = declare_coordinates(plan, phases)
    timeline = Timeline(plan, where, buffers[timeline_buffer(plan).name] if plan.timed else None)
    plan = replace(plan, phases=phases)
    timeline.begin()
    memory = SharedMemory.declared(plan.arena)
    left = memory.ring("left", plan.left.stages, 0)
    right = memory.ring("right", plan.right.stages, STAGE_BARRIERS * plan.left.stages)
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
    plan, thread = body.plan, body.where.thread

    def initialise() -> None:
        body.left.initialise(plan.consumers * plan.left.sharers, thread)
        body.right.initialise(plan.consumers * plan.right.sharers, thread)
        for each in plan.features:
            each.initialise(body)

    prepare(body.where, initialise, plan.tensor_maps, body.maps)


def _let_next_begin() -> None:
    # The next kernel may be launched; it waits for the end of this one where it needs it.
    run(ir.script.ptx.griddepcontrol.launch_dependents())


def generate(
    func: Any,
    buffers: tuple[BufferSpec, ...],
    device: Device,
    name: str,
    timeline: bool = False,
) -> tuple[KernelImage, SharedMemoryPlan, tuple[tuple[str, ...], ...]]:
    """Lower a scheduled tile program, which has a pipelined loop (see `recover`).

    `timeline` has kernels record when they did what, in one more output each. Gives CUDA with its
    launches, the plan of shared memory, and with a timeline the events of each kernel. Refused if
    tensor cores or TMA cannot take the tiles.
    """
    plans = plans_of(func, device)
    timed = [_timed(each, name) for each in plans] if timeline else []
    plans, buffers = timed or plans, (*buffers, *map(timeline_buffer, timed))
    cuda, launches = _emitted(plans, device, name)
    taken = {each for plan in plans for each in plan.parameters}
    own = dict.fromkeys(each for plan in plans for each in plan.workspaces)
    spaces = (*(_spec(each) for each in workspaces(func) if each in taken), *own)
    kept = tuple(each for plan in plans for each in plan.state)
    image = KernelImage(name, cuda, buffers, launches, spaces, kept)
    return image, _shared_memory(plans), tuple(map(events, timed))


def plans_of(func: Any, device: Device) -> Sequence[_Plan]:
    """Plan the kernels of a scheduled tile program, which are not emitted; see `generate`."""
    if holds_stream(func.body) and not is_reduced(func) and not staged_blocks(func):
        return [plan for each in recover_streams(func) for plan in _plans_of_stream(each, device)]
    programs = recover_reduced(func) if is_reduced(func) else recover(func)
    constant = constant_parameters(func) if starts_early(func) else None
    return [plan_kernel(each, device, number, constant) for number, each in enumerate(programs)]


def _plans_of_stream(program: StreamProgram, device: Device) -> list[_Plan]:
    """Plan the kernel of a stream, and that which merges its parts."""
    if has_few_rows(program):
        return [plan_warps(program, device)]
    plan = plan_stream(program, device)
    merge = plan_merge(plan)
    return [plan] if merge is None else [plan, merge]


def _timed(plan: _Plan, name: str) -> KernelPlan:
    """A plan that records a timeline; refused for streams, which have no phases."""
    if isinstance(plan, KernelPlan):
        return replace(plan, timed=True)
    raise refuse(
        "timeline",
        f"function '{name}'",
        found="a stream of tiles",
        limit="kernels of products one behind the other, which have phases to tell apart",
        instead="profile it with Nsight Compute",
    )


def _emitted(plans: Sequence[_Plan], device: Device, name: str) -> tuple[str, tuple[Launch, ...]]:
    """CUDA of kernels, after TVM's pipeline, and how they are launched."""
    kernels: list[tuple[str, Any]] = []
    for number, plan in enumerate(plans):
        of = name if len(plans) == 1 else f"{name}_{number}"
        kernels.append(_device_function(_emit(plan, of), device, of))
    launches = (_launch(plan, *kernel) for plan, kernel in zip(plans, kernels, strict=True))
    return _cuda(kernels), tuple(launches)


def _spec(buffer: Any) -> BufferSpec:
    """A buffer in global memory that is no parameter of the function."""
    shape = tuple(int(extent) for extent in buffer.ty.shape)
    return BufferSpec(identifier(buffer), shape, str(buffer.ty.dtype), True)


def _shared_memory(plans: Sequence[_Plan]) -> SharedMemoryPlan:
    """Regions of shared memory of all kernels."""
    placements = [
        Placement(region.name, region.offset, region.size, number, number)
        for number, plan in enumerate(plans)
        for region in plan.arena.regions
    ]
    return SharedMemoryPlan(tuple(placements), max(plan.arena.size for plan in plans))


def _device_function(func: Any, device: Device, name: str) -> tuple[str, Any]:
    module = ir.IRModule({name: func.with_attr("global_symbol", name)})
    module = ir.tirx.transform.BindTarget(tvm_target(device))(module)
    module = kernel_pipeline()(module)
    ((var, kernel),) = [
        each
        for each in module.functions.items()
        if "tirx.kernel_launch_params" in (each[1].attrs or {})
    ]
    return str(var.name_hint), kernel


def _cuda(kernels: list[tuple[str, Any]]) -> str:
    """CUDA text of all kernels, with the helpers that they share."""
    _, _, finalize = ir.tirx.get_tir_pipeline("tirx")
    module = finalize()(ir.IRModule(dict(kernels)))
    return ir.cuda_text(module, kernels[0][1].attrs["target"])


def _launch(plan: _Plan, symbol: str, kernel: Any) -> Launch:
    size = plan.cluster_size
    return Launch(
        symbol,
        (plan.clusters * size, 1, 1),
        (plan.threads, 1, 1),
        (size, 1, 1),
        plan.arena.size,
        tuple(str(each.name).removesuffix("_ptr") for each in kernel.params),
        plan.tensor_maps,
        plan.early,
        plan.is_persistent and not plan.helps,
        plan.helps,
    )
