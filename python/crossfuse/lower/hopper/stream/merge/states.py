"""Partial states in global memory: parts of a stream store them, and a second kernel merges them.

The second kernel is launched while the first one runs, and waits for its end (programmatic
dependent launch). A thread merges two columns of a row: it loads what all CTAs have stored at once,
and merges in the order of the parts, as the CTAs of a cluster do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.coordinates import declare_coordinates, strides, unravel
from crossfuse.lower.hopper.kernel_parts import parameter
from crossfuse.lower.hopper.plan.arena import Arena
from crossfuse.lower.hopper.statements import let, run, when
from crossfuse.lower.hopper.stream.merge.handing import Handing
from crossfuse.lower.hopper.stream.merge.unit import Unit, with_row
from crossfuse.lower.hopper.stream.plan.inbox import Inbox
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.program.stream import StreamProgram
from crossfuse.lower.hopper.stream.rows import RowState
from crossfuse.lower.hopper.stream.values import Values, column_of, half_of
from crossfuse.lower.image import BufferSpec, TensorMap

_FLOAT = 4


@dataclass(frozen=True)
class MergePlan:
    """The decisions of a kernel that merges states.

    Attributes
    ----------
    stream : StreamPlan
        Of the kernel that stores them.
    inbox : Inbox
        How those of a tile of rows are laid out.
    states : BufferSpec
        Those of all tiles.
    """

    stream: StreamPlan
    inbox: Inbox
    states: BufferSpec
    # As other plans have them.
    cluster_size: int = 1
    consumers: int = 0
    threads: int = WARPGROUP
    arena: Arena = field(default_factory=Arena)
    phases: tuple[Any, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()
    early: bool = True
    is_persistent: bool = False
    helps: bool = False

    @property
    def program(self) -> StreamProgram:
        """What is merged."""
        return self.stream.program

    @property
    def units(self) -> int:
        """Pairs of columns of a tile of rows."""
        return self.inbox.rows * (self.inbox.columns // 2)

    @property
    def turns(self) -> int:
        """CTAs of a tile of rows."""
        return -(-self.units // self.threads)

    @property
    def clusters(self) -> int:
        """CTAs."""
        return self.states.shape[0] * self.turns


def plan_merge(stream: StreamPlan) -> MergePlan | None:
    """Plan the kernel that merges what a stream's parts store; None if they store nothing."""
    if stream.inbox is None or stream.states is None:
        return None
    return MergePlan(stream, stream.inbox, stream.states)


def emit_merge(plan: MergePlan, name: str) -> Any:
    """Write the kernel.

    Parameters
    ----------
    plan : MergePlan
        From `plan_merge`.
    name : str
        Name of the function.

    Returns
    -------
    tvm.tirx.PrimFunc
        TIRx, before TVM's pipeline.
    """
    with ir.IRBuilder() as builder, ir.script.prim_func():
        ir.script.func_name(name)
        images = {each: parameter(each) for each in plan.program.parameters}
        states = state_parameter(plan.states)
        ir.script.device_entry()
        of_images = replace(plan, stream=replace(plan.stream, program=plan.program.on(images)))
        _emit_body(of_images, images, states)
    return builder.get()


def state_parameter(states: BufferSpec) -> Any:
    """Declare the buffer of states as a parameter of the kernel that is written."""
    return ir.script.arg(states.name, ir.script.Buffer(list(states.shape), states.dtype))


def _emit_body(plan: MergePlan, images: dict[Any, Any], states: Any) -> None:
    where = declare_coordinates(plan)
    tile = let("tile", where.cluster // plan.turns)
    places = unravel(plan.program.tile_places, tile, 0)
    unit = let("unit", where.cluster % plan.turns * plan.threads + where.thread)
    across = plan.inbox.columns // 2
    row, column = let("unit_row", unit // across), let("unit_column", unit % across * 2)

    def load(target: Any, first: int, offset: Any) -> None:
        place = states.ptr_to([tile, offset // _FLOAT])
        run(ir.script.ptx["ld.global.v2.f32"](target[first], target[first + 1], place))

    # Launched while the parts are still at work.
    run(ir.script.ptx.griddepcontrol.wait())
    with when(with_row(unit < plan.units, row, plan.program, places)):
        ahead = plan.inbox.size
        Unit(plan.program, plan.inbox, (row, column), places, load, ahead).run(images)


class StateWriter(Handing):
    """Stores what one warpgroup has, for the kernel that merges it."""

    def begin(self) -> None:
        """Nobody is told."""

    def finish(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Store the state."""
        tiles = self.program.tile_places
        steps = strides(tiles)
        number = sum((places[each.var] * steps[each.var] for each in tiles), start=0)
        self._tile = let("tile", ir.script.Cast("int32", number))
        self._slot = let("slot", ir.script.Cast("int32", places[self.split.place.var]))
        self.send(rows, places)

    def _send_rows(self, half: int, values: Values, places: dict[Any, Any]) -> None:
        """One of the four threads of a row stores its values."""
        made = [let(str(each.name), values.of_row(each.value, half)) for each in self.of_rows]
        made += [ir.script.float32(0)] * (2 * self.inbox.pairs - len(made))
        with when(self.body.where.lane % 4 == 0):
            for pair in range(self.inbox.pairs):
                offset = self.inbox.of_row(self._slot, self.lanes.rows[half], pair)
                self._put(offset, made[2 * pair], made[2 * pair + 1])

    def _send_elements(self, half: int, values: Values, places: dict[Any, Any]) -> None:
        for register in range(0, self.plan.sums, 2):
            if half_of(register) != half:
                continue
            column = self.lanes.column + column_of(register)
            both = [values.of_element(self.of_elements.value, register + each) for each in range(2)]
            self._put(self.inbox.element(self._slot, self.lanes.rows[half], column), *both)

    def _put(self, offset: Any, *both: Any) -> None:
        place = self.body.states.ptr_to([self._tile, offset // _FLOAT])
        run(ir.script.ptx["st.global.v2.f32"](place, *both))
