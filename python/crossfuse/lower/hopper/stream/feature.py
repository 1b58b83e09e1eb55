"""A stream of tiles that makes the left operand of a product in the same kernel.

::

    loading      warp 0      weights, from the first instant on
                 warp 1      left tiles, each once the flag of its box is raised
                 warps 2, 3  queries and keys; values
    multiplying              the stream: its boxes, and their flags; then the product

Each has shared memory and barriers of its own, so that weights are on their way while the stream is
at work: nothing orders the two but the flags. Loads are served in order, and nobody waits for
weights yet: but for a few they are asked for behind the first keys. To have L2 fetch those that
the ring has no room for did not pay: of 8 MB of weights nothing was won on an H100, and of 32 MB L2
lost them again, which took 4 to 6 us.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import Device
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.features.feature import ConsumerPart, Feature
from crossfuse.lower.hopper.pipeline import SharedMemory, Throttle, prepare
from crossfuse.lower.hopper.plan.phase import PhasePlan, box_bytes
from crossfuse.lower.hopper.program.tile import with_parameters
from crossfuse.lower.hopper.statements import (
    Warmup,
    branches,
    declare_coordinates,
    run,
    set_registers,
    when,
)
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.consumer import Adder, Consumer, Scorer
from crossfuse.lower.hopper.stream.copies import emit_loading
from crossfuse.lower.hopper.stream.merge import SplitConsumer
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan, launched_registers, plan_stream
from crossfuse.lower.hopper.stream.program import StreamProgram
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import Rule
from crossfuse.planner.kernels.memory import (
    ALIGNMENT,
    BARRIER,
    BEFORE_ROWS,
    BESIDE_STREAM,
    LEAST_STAGES,
    REGISTERS,
    SHARED_REGISTERS,
    Arena,
    Piece,
)

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.kernel import KernelPlan
    from crossfuse.lower.hopper.roles import Body

_refused = Rule("grid-stage")

#: First of the two warps that load for the stream.
_FIRST_WARP = 2


class StreamedPart(ConsumerPart):
    """A warpgroup goes through its tiles of the stream before those of the product.

    The warm-up of the product comes before both: the first keys are on their way then, while left
    tiles are waited for as soon as the stream is over.
    """

    def warm(self, warmup: Warmup) -> None:
        """Make the tiles of the stream, which nothing waits for but the product."""
        with warmup.skipped():
            self._stream()

    def _stream(self) -> None:
        if self.body.plan.early:
            run(ir.script.ptx.griddepcontrol.wait())
        stream = self.feature.of_body(self.body)
        if stream.plan.mailbox is None:
            Consumer(stream).emit()
            return
        consumer = SplitConsumer(stream)
        with when(consumer.tiles.is_left):
            consumer.emit()


@dataclass(frozen=True)
class Streamed(Feature):
    """The left operand of the first phase is made by a stream of tiles."""

    asked_by: ClassVar = "streamed"
    part: ClassVar = StreamedPart

    stream: StreamPlan

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int], device: Device) -> Streamed:
        """Of the first phase."""
        program = phases[0].program.streamed
        assert program is not None
        return cls(share_memory(program, phases, device))

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:  # type: ignore[override]
        """Descriptors of the stream's operands, and of what it stores."""
        return self.stream.tensor_maps

    @property
    def before_tiles(self) -> tuple[Piece, ...]:  # type: ignore[override]
        """All that the stream has in shared memory, as one piece."""
        return (Piece("stream", self.stream.arena.size, ALIGNMENT),)

    def behind_all(self, stages: int) -> tuple[Piece, ...]:
        """The barrier that completes when the first keys are asked for."""
        return (Piece("weights_gate", BARRIER),)

    def throttle(self, body: Body) -> Throttle:
        """Most weights are loaded behind the first keys."""
        most, gate = body.plan.on_their_way, body.memory.barrier("weights_gate")
        first = min(most - 1, max(1, BEFORE_ROWS // body.plan.asked_for))
        return Throttle(body.right, most, first, gate)

    def settled(self, plan: KernelPlan, device: Device) -> KernelPlan:
        """Launch enough CTAs for the tiles of both, and divide the stream's among them."""
        order, start = self.stream.order, plan.arena["stream"].offset
        room = device.resident_clusters(plan.cluster_size)
        if self.stream.receives and order.turns > room:
            raise _refused(
                f"clusters of {plan.cluster_size} on {device.name}",
                found=f"{order.turns} tiles whose keys CTAs share",
                limit=f"{room} clusters that run at the same time, each with one tile",
                instead="take fewer CTAs a tile (CascadeTiles.cluster), or leave grid_stage out",
            )
        clusters = max(plan.clusters, min(order.turns, room))
        regions = self.stream.arena.regions
        arena = Arena(tuple(replace(each, offset=each.offset + start) for each in regions))
        stream = replace(self.stream, order=replace(order, ctas=clusters), arena=arena)
        made = replace(self, stream=stream)
        return replace(plan, clusters=clusters).with_feature(self, made)

    def of_body(self, body: Body) -> StreamBody:
        """What the stream's roles share."""
        phase = body.plan.phases[0]
        images = dict(zip(self.stream.program.parameters, phase.program.parameters, strict=True))
        plan = replace(self.stream, program=with_parameters(self.stream.program, images))
        assert phase.awaits is not None
        memory = SharedMemory(self.stream.arena, body.memory.data)
        return StreamBody.declared(
            *(plan, body.where, body.maps, memory),
            writer=body.placed(phase.awaits),
            gate=body.memory.barrier("weights_gate"),
        )

    def initialise(self, body: Body) -> None:
        """Initialise the barriers of its rings."""
        stream = self.of_body(body)
        stream.initialise(stream.gate)

    def beside_loads(self, body: Body) -> None:
        """Load queries, keys and values, which the kernel before may have made."""
        with when(body.where.warp >= _FIRST_WARP):
            if body.plan.early:
                run(ir.script.ptx.griddepcontrol.wait())
            emit_loading(self.of_body(body), _FIRST_WARP)


def share_memory(
    program: StreamProgram, phases: tuple[PhasePlan, ...], device: Device
) -> StreamPlan:
    """Plan a stream beside the fewest stages of a product; half of the memory is enough for it.

    Refused if warpgroups share the columns of its sums.
    """
    least = LEAST_STAGES * max(sum(each.size for each in x.operands) for x in phases)
    boxes = box_bytes(phases) * phases[0].consumers
    left = replace(device, max_shared_bytes=device.max_shared_bytes - least - boxes - BESIDE_STREAM)
    plan = plan_stream(program, left)
    if plan.states is not None:
        raise _refused(
            f"sums '{program.sums.name}'",
            found="states of CTAs that share keys, which a second kernel merges",
            limit="states that the CTAs of a cluster merge",
            instead='take CascadeTiles(merge="dsm"), or leave grid_stage out',
        )
    if plan.adders:
        raise _refused(
            f"sums '{program.sums.name}'",
            found=f"{program.output.columns} columns, which {plan.adders} warpgroups share",
            limit="sums of as many columns as a warpgroup holds beside scores and weights",
            instead="take fewer keys a tile, or leave grid_stage out",
        )
    while not program.stream.stages and plan.stages > LEAST_STAGES:
        if plan.arena.size <= device.max_shared_bytes // 2:
            break
        fewer = replace(program.stream, stages=plan.stages - 1)
        plan = plan_stream(replace(program, stream=fewer), left)
    return plan


# Composes the kernel of a stream: one warpgroup loads, the others multiply and store.


def emit_stream(
    plan: StreamPlan, images: dict[Any, Any], buffers: dict[str, Any], maps: dict[str, Any]
) -> None:
    """Write the body of a kernel of its own."""
    plan = replace(plan, program=with_parameters(plan.program, images))
    states = None if plan.states is None else buffers[plan.states.name]
    where = declare_coordinates(plan)
    memory = SharedMemory.declared(plan.arena)
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
