"""Composes a kernel of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.coordinates import Coordinates, declare_coordinates, grid_places
from crossfuse.lower.hopper.epilogue import Epilogue
from crossfuse.lower.hopper.exchange import SplitReduction, initialise_exchange
from crossfuse.lower.hopper.load import load_tile
from crossfuse.lower.hopper.plan import REGISTERS, KernelPlan, operand_names
from crossfuse.lower.hopper.ring import Cursor, Release, Ring
from crossfuse.lower.hopper.statements import Variable, branches, run, when
from crossfuse.lower.hopper.wgmma import Multiplier

_ONE_CTA = {"tirx.launch_bounds_min_blocks_per_sm": 1}


@dataclass(frozen=True)
class _Body:
    """What all roles of a kernel share."""

    plan: KernelPlan
    where: Coordinates
    maps: dict[str, Any]
    memory: Any
    ring: Ring
    received: Any

    def region(self, name: str) -> Callable[[Any], Any]:
        """A function from an offset in a region to an address."""
        start = self.plan.arena[name].offset
        return lambda offset: self.memory.ptr_to([start + offset])


def emit_kernel(plan: KernelPlan, name: str) -> Any:
    """Write a kernel.

    Parameters
    ----------
    plan : KernelPlan
        From `plan_kernel`.
    name : str
        Name of the function.

    Returns
    -------
    tvm.tirx.PrimFunc
        One warpgroup loads, the others multiply and store; TIRx, before TVM's pipeline.
    """
    with ir.IRBuilder() as builder, ir.script.prim_func():
        ir.script.func_name(name)
        images = {each: _parameter(each) for each in plan.program.parameters}
        maps = {
            each.name: ir.script.arg(each.name, ir.script.TensorMap()) for each in tensor_maps(plan)
        }
        ir.script.device_entry()
        with ir.script.attr(_ONE_CTA):
            _emit_body(replace(plan, program=plan.program.with_parameters(images)), maps)
    return builder.get()


def _parameter(buffer: Any) -> Any:
    """Declare a parameter as TIRx has them, with a layout."""
    shape = [int(each) for each in buffer.ty.shape]
    return ir.script.arg(str(buffer.name), ir.script.Buffer(shape, str(buffer.ty.dtype)))


def tensor_maps(plan: KernelPlan) -> tuple[Any, ...]:
    """Descriptors that the kernel takes."""
    stored = () if plan.store.map is None else (plan.store.map,)
    return (*(each.map for each in plan.operands), *stored)


def _emit_body(plan: KernelPlan, maps: dict[str, Any]) -> None:
    where = declare_coordinates(plan)
    memory = ir.script.alloc_buffer((plan.arena.size,), "uint8", scope="shared.dyn", align=1024)
    ir.IRBuilder.name("memory", memory)
    barriers = ir.script.decl_buffer(
        (2 * plan.stages,),
        "uint64",
        data=memory.data,
        scope="shared.dyn",
        byte_offset=plan.arena["barriers"].offset,
    )
    ir.IRBuilder.name("barriers", barriers)
    ring = Ring(plan.stages, barriers)
    received = None
    if plan.program.exchange is not None:
        received = memory.ptr_to([plan.arena["received_barrier"].offset])
    body = _Body(plan, where, maps, memory, ring, received)
    size = plan.program.cluster_size
    releases = plan.consumers * (size if plan.is_multicast else 1)
    with when(ir.script.And(where.warpgroup == 0, where.thread == 0)):
        ring.initialise(releases)
        if received is not None:
            initialise_exchange(plan, received)
        mbarrier.publish_initialised()
    mbarrier.meet_cluster(size)
    if not plan.early:
        # The next kernel may be launched; it waits for the end of this one where it needs it.
        run(ir.script.ptx.griddepcontrol.launch_dependents())
    with branches(where.warpgroup == 0) as (loading, multiplying):
        with loading:
            _emit_loading(body)
        with multiplying:
            _emit_multiplying(body)
    if size > 1:
        # Peers may still write this CTA's stages and arrive at its barriers.
        mbarrier.meet_cluster(size)


def _emit_loading(body: _Body) -> None:
    plan = body.plan
    _set_registers(plan, "dec", REGISTERS[plan.consumers][0])
    everything = range(len(plan.operands))
    rights = everything[1:]
    with when(body.where.thread == 0):
        cursor = Cursor(body.ring)
        ahead = _load_ahead(body, rights) if plan.early else 0
        with _each_tile(body) as places, _each_step(plan) as (step, number):
            values = places | step
            with when(number >= ahead) if ahead else nullcontext():
                cursor.wait_empty()
                full = cursor.expect(plan.stage_bytes)
                _load(body, cursor.stage, values, rights if ahead else everything, full)
            if ahead:
                _load(body, cursor.stage, values, everything[:1], body.ring.full(cursor.stage))
            cursor.advance()


def _load_ahead(body: _Body, rights: range) -> int:
    """Load right tiles while the kernel before may still run, then wait for it.

    Returns how many steps have theirs.
    """
    plan = body.plan
    places = body.where.places | grid_places(plan, body.where.cluster)
    ahead = min(plan.stages, plan.program.contraction.steps)
    for number in range(ahead):
        mbarrier.expect(body.ring.full(number), plan.stage_bytes)
        step = {plan.program.contraction.step: ir.script.int32(number)}
        _load(body, number, places | step, rights, body.ring.full(number))
    run(ir.script.ptx.griddepcontrol.wait())
    return ahead


def _load(body: _Body, stage: Any, values: dict[Any, Any], which: range, full: Any) -> None:
    """Load tiles of some operands into a stage."""
    plan = body.plan
    names = operand_names(len(plan.operands))
    for index in which:
        operand = plan.operands[index]
        address, start = body.region(names[index]), stage * operand.size
        load_tile(
            plan,
            operand,
            body.maps[operand.map.name],
            body.where,
            values,
            lambda offset, address=address, start=start: address(start + offset),
            full,
        )


def _emit_multiplying(body: _Body) -> None:
    plan, where = body.plan, body.where
    _set_registers(plan, "inc", REGISTERS[plan.consumers][1])
    warpgroup = where.warpgroup - 1
    regions = [body.region(each) for each in operand_names(len(plan.operands))]
    multiplier = Multiplier(plan, regions, warpgroup)
    stored = plan.store.map
    epilogue = Epilogue(
        plan,
        where,
        warpgroup,
        multiplier.accumulators,
        None if stored is None else body.region("boxes"),
        None if stored is None else body.maps[stored.name],
    )
    cursor = Cursor(body.ring)
    release = Release(
        body.ring, where.thread, plan.program.cluster_size if plan.is_multicast else 1
    )
    with _each_tile(body) as places:
        with _each_step(plan) as (_, number):
            cursor.wait_full()
            multiplier.start(cursor.stage, number == 0)
            multiplier.wait(pending=1)
            with when(number > 0):
                release(cursor.previous)
            cursor.advance()
        multiplier.wait(pending=0)
        release(cursor.previous)
        if plan.program.exchange is None:
            epilogue.store(places)
        else:
            reduction = SplitReduction(
                plan, where, warpgroup, body.region("received"), body.received
            )
            reduction.combine(multiplier.accumulators)
            epilogue.store(places, reduction.owns)
    epilogue.finish()


@contextmanager
def _each_tile(body: _Body) -> Iterator[dict[Any, Any]]:
    """Statements for each tile of this cluster; yields the values of all places."""
    plan = body.plan
    if plan.clusters == plan.program.tiles:
        yield body.where.places | grid_places(plan, body.where.cluster)
        return
    tile = Variable("tile", "int32", body.where.cluster)
    with ir.script.While(tile.value < plan.program.tiles):
        yield body.where.places | grid_places(plan, tile.value)
        tile.set(tile.value + plan.clusters)


@contextmanager
def _each_step(plan: KernelPlan) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Statements for each step of the reduction; yields the step variable's value, and number."""
    contraction = plan.program.contraction
    with ir.script.serial(0, contraction.steps) as number:
        ir.IRBuilder.name("step", number)
        yield {contraction.step: number}, number


def _set_registers(plan: KernelPlan, direction: str, count: int) -> None:
    """Move registers between warpgroups."""
    if count:
        run(getattr(ir.script.ptx.setmaxnreg, direction).sync.aligned.u32(count))
