"""Merges states where CTAs share the keys of some rows: in a cluster, or a second kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.flags import fence_copies
from crossfuse.lower.hopper.program.tile import with_parameters
from crossfuse.lower.hopper.statements import (
    at,
    declare_coordinates,
    let,
    registers,
    run,
    strides,
    unravel,
    when,
)
from crossfuse.lower.hopper.stream.body import Lanes, StreamBody
from crossfuse.lower.hopper.stream.consumer import Consumer
from crossfuse.lower.hopper.stream.plan.kernel import StreamKernel, StreamPlan
from crossfuse.lower.hopper.stream.plan.memory import Mailbox
from crossfuse.lower.hopper.stream.program import Kind, Step, StreamProgram
from crossfuse.lower.hopper.stream.values import RowState, Values
from crossfuse.lower.image import BufferSpec, TensorMap
from crossfuse.planner.kernels.memory import FLOAT_BYTES, Arena

# What a CTA that shares keys hands over of its state, from registers.

#: Rows between both rows of a thread.
_HALF = 8


class Handing(ABC):
    """Hands over the state of one warpgroup; its subclasses know where to."""

    def __init__(self, body: StreamBody, warpgroup: Any, lanes: Lanes, sums: Any) -> None:
        self.body, self.plan, self.program = body, body.plan, body.plan.program
        assert self.plan.mailbox is not None and self.program.split is not None
        self.mailbox, self.split = self.plan.mailbox, self.program.split
        self.warpgroup, self.lanes, self.sums = warpgroup, lanes, sums

    @abstractmethod
    def begin(self) -> None:
        """Write what comes before the stream."""

    @abstractmethod
    def finish(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Write what comes after the stream."""

    @abstractmethod
    def _send(self, half: int, values: Values) -> None:
        """Hand over the values and the sums of a row."""

    def send(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Hand over the state of all rows that the tile has."""
        for buffer in self.plan.registers.deferred:
            rows.gather(buffer)

        values = Values.of_sums(self.program, self.lanes, places, rows.register, self.sums)
        for half in range(2):
            if self.plan.consumers == 1 and half * _HALF >= self.mailbox.rows:
                continue
            with when(self.lanes.rows[half] < self.mailbox.rows):
                self._send(half, values)

    def pairs_of_row(self, half: int, values: Values) -> list[tuple[Any, Any]]:
        """Values of a row that are handed over, two by two; behind an odd number of them is 0."""
        steps = [each for each in self.split.slabs if each.kind is Kind.ROW]
        made = [let(str(each.name), values.of_row(each.value, half)) for each in steps]
        made += [ir.script.float32(0)] * (2 * self.mailbox.pairs - len(made))
        return list(zip(made[::2], made[1::2], strict=True))

    def pairs_of_elements(self, half: int, values: Values) -> Iterator[tuple[int, list[Any]]]:
        """Sums of a row that are handed over, two by two, with the column from the thread's first.

        One after another: what a pair is made of is written when it is asked for.
        """
        (step,) = (each for each in self.split.slabs if each.kind is not Kind.ROW)
        for register in range(0, self.plan.sums, 2):
            if self.lanes.layout.row(register) == half:
                both = [values.of_element(step.value, register + each) for each in range(2)]
                yield self.lanes.layout.column(register), both


# What a thread merges of the states of CTAs that share keys, wherever they lie.


def with_row(exists: Any, row: Any, program: StreamProgram, places: dict[Any, Any]) -> Any:
    """A condition, and that a row of a tile is inside the tensor that is stored to."""
    box = program.output
    if not box.shape[box.axis] % box.rows:
        return exists
    inside = at(box.origin[box.axis], places) + row < box.shape[box.axis]
    return ir.script.And(exists, inside)


class Unit:
    """Two neighbouring columns of a row, merged by one thread.

    `at_row` is the row of the tile and the first of both columns. `load` writes the load of two
    floats: into which registers, from which one on, and from which offset in the mailbox. The
    states of `ahead` CTAs are loaded before any of them is merged.
    """

    def __init__(
        self,
        program: StreamProgram,
        mailbox: Mailbox,
        at_row: tuple[Any, Any],
        places: dict[Any, Any],
        load: Callable[[Any, int, Any], None],
        ahead: int = 1,
    ) -> None:
        assert program.split is not None
        self.program, self.mailbox, self.split, self.places = (
            program,
            mailbox,
            program.split,
            places,
        )
        self.row, self.column = at_row
        self._load_pair, self._ahead, self._first = load, ahead, 0
        steps = (*self.split.before, *self.split.steps, *program.after)
        self._registers: dict[Any, Any] = {}
        for each in steps:
            if each.target not in self._registers:
                count = 1 if each.kind is Kind.ROW else 2
                self._registers[each.target] = registers(str(each.target.name), count, "float32")
        self._slabs = {
            each: registers(str(each.name), 2 * ahead, "float32")
            for each in (*self.mailbox.of_rows[::2], self.mailbox.of_elements)
        }
        # Nothing here asks for the first row of a warpgroup, or for a lane.
        lanes = Lanes((self.row, self.row), self.column, 0, 0)
        self.values = Values(program, lanes, places, self._of_row, self._of_element)

    def _of_row(self, buffer: Any, half: int) -> Any:
        for number, each in enumerate(self.mailbox.of_rows):
            if each.same_as(buffer):
                first = self.mailbox.of_rows[number - number % 2]
                return self._slabs[first][self._first + number % 2]
        found = self._registers.get(buffer)
        return None if found is None or list(map(int, found.ty.shape)) != [1] else found[0]

    def _of_element(self, buffer: Any, register: int) -> Any:
        if buffer.same_as(self.mailbox.of_elements):
            return self._slabs[buffer][self._first + register]
        return self._registers[buffer][register]

    def run(self) -> None:
        """Write everything about it."""
        self._steps(self.split.before)
        for first in range(0, self.mailbox.size, self._ahead):
            slots = range(first, min(first + self._ahead, self.mailbox.size))
            for slot in slots:
                self._load(slot, 2 * (slot - first))
            for slot in slots:
                self._first = 2 * (slot - first)
                self._steps(self.split.steps)
        self._steps(self.program.after)
        store_pair(self.program, self.values, self.row, self.column, self.places)

    def _steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            target = self._registers[step.target]
            if step.kind is Kind.ROW:
                ir.script.buffer_store(target, self.values.of_row(step.value, 0), [0])
            else:
                self.values.store(target, step.value, 2)

    def _load(self, slot: int, register: int) -> None:
        """Load what a CTA has handed over."""
        places = [
            (first, self.mailbox.of_row(slot, self.row, pair))
            for pair, first in enumerate(self.mailbox.of_rows[::2])
        ]
        places.append((self.mailbox.of_elements, self.mailbox.element(slot, self.row, self.column)))
        for slab, offset in places:
            self._load_pair(self._slabs[slab], register, offset)


def store_pair(
    program: StreamProgram, values: Values, row: Any, column: Any, places: dict[Any, Any]
) -> None:
    """Store the results of two neighbouring columns of a row."""
    box = program.output
    first = [at(each, places) for each in box.origin]
    for register in range(2):
        indices = list(first)
        indices[box.axis] = indices[box.axis] + row
        indices[-1] = indices[-1] + column + register
        ir.script.buffer_store(box.buffer, values.of_element(program.result, register), indices)


# Partial states of a cluster merge: each CTA receives a slice of all of them, and merges that.
#
# Values leave registers for the mailboxes of their owners, whose barriers count the bytes. As in
# `crossfuse.lower.hopper.features.exchange`, a CTA sends to itself, too, and states merge in the
# order of ranks, so that results are the same in every run.

#: Columns of a block of registers.
_BLOCK = 8


class Merger(Handing):
    """Sends what one warpgroup has to the mailboxes of a cluster, and merges what it owns."""

    def __init__(self, body: StreamBody, warpgroup: Any, lanes: Lanes, sums: Any) -> None:
        super().__init__(body, warpgroup, lanes, sums)
        self.rank = body.where.rank
        self.buffer = body.memory.region("inbox")

    def begin(self) -> None:
        """Tell the barrier of this CTA how many bytes will arrive."""
        left = self.mailbox.all_columns - self.rank * self.mailbox.columns
        width = ir.script.max(0, ir.script.min(self.mailbox.columns, left))
        first = ir.script.And(self.warpgroup == 0, self.body.where.thread == 0)
        with when(first):
            mbarrier.expect(self.body.received, self.mailbox.expected(width))

    def finish(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Hand the state over, and merge a slice of all states."""
        if self.body.writer is None:
            mbarrier.await_started()
        self.send(rows, places)
        self._merge(places)
        if self.body.writer is not None:
            fence_copies()
            mbarrier.meet_warpgroup(self.warpgroup)
            with when(self.body.where.thread == 0):
                self.body.raise_flag(places)

    def _send(self, half: int, values: Values) -> None:
        """Send values of a row to all CTAs, its four threads some each; sums to their owners."""
        pairs = self.pairs_of_row(half, values)
        for first in range(0, self.mailbox.size, 4):
            rank = let("to", first + self.body.where.lane % 4)
            with when(rank < self.mailbox.size) if self.mailbox.size % 4 else nullcontext():
                owner = self._owner(rank)
                for pair, values_of_row in enumerate(pairs):
                    offset = self.mailbox.of_row(self.rank, self.lanes.rows[half], pair)
                    owner.push(offset, values_of_row)
        known: dict[int, mbarrier.Peer] = {}
        width = self.mailbox.columns
        for first, both in self.pairs_of_elements(half, values):
            column = self.lanes.column + first
            inside = column - first // width * width
            if width % _BLOCK:
                owner = self._owner(let("owner", column // width))
                inside = column % width
            else:
                rank = first // width
                owner = known[rank] if rank in known else self._owner(ir.script.int32(rank))
                known[rank] = owner
            owner.push(self.mailbox.element(self.rank, self.lanes.rows[half], inside), both)

    def _owner(self, rank: Any) -> mbarrier.Peer:
        """The CTA of the cluster that owns a slice: its mailbox and its barrier."""
        names = ("inbox_of", "received_by")
        return mbarrier.Peer(names, self.buffer(0), self.body.received, rank)

    def _merge(self, places: dict[Any, Any]) -> None:
        """Merge the slices of all CTAs, a pair of columns a thread and turn."""
        mbarrier.wait_cluster(self.body.received, 0)
        across = self.mailbox.columns // 2
        count = self.mailbox.rows * across
        threads = self.plan.consumers * WARPGROUP
        me = let("thread_of_tile", self.warpgroup * WARPGROUP + self.body.where.thread)
        with ir.script.serial(0, -(-count // threads)) as turn:
            ir.IRBuilder.name("turn", turn)
            unit = let("unit", turn * threads + me)
            row, column = let("unit_row", unit // across), let("unit_column", unit % across * 2)
            with when(self._is_stored(unit < count, row, column, places)):
                unit_of = Unit(self.program, self.mailbox, (row, column), places, self._load)
                unit_of.run()

    def _load(self, target: Any, first: int, offset: Any) -> None:
        load = ir.script.ptx["ld.shared.v2.f32"]
        run(load(target[first], target[first + 1], self.buffer(offset)))

    def _is_stored(self, exists: Any, row: Any, column: Any, places: dict[Any, Any]) -> Any:
        """Whether there is such a unit, inside the tensor."""
        found = with_row(exists, row, self.program, places)
        if self.mailbox.size * self.mailbox.columns > self.mailbox.all_columns:
            inside = self.rank * self.mailbox.columns + column < self.mailbox.all_columns
            found = ir.script.And(found, inside)
        return found


# Partial states in global memory: parts of a stream store them, and a second kernel merges them.
#
# The second kernel is launched while the first one runs, and waits for its end (programmatic
# dependent launch). A thread merges two columns of a row: it loads what all CTAs have stored at
# once, and merges in the order of the parts, as the CTAs of a cluster do.


@dataclass(frozen=True)
class MergePlan(StreamKernel):
    """The decisions of a kernel that merges states."""

    program: StreamProgram
    #: How the states of a tile of rows are laid out.
    mailbox: Mailbox
    #: The states of all tiles, in global memory.
    states: BufferSpec
    early: ClassVar = True
    cluster_size: ClassVar = 1
    threads: ClassVar = WARPGROUP
    arena: ClassVar = Arena()
    tensor_maps: ClassVar[tuple[TensorMap, ...]] = ()

    @property
    def units(self) -> int:
        """Pairs of columns of a tile of rows, one for each thread."""
        return self.mailbox.rows * (self.mailbox.columns // 2)

    @property
    def turns(self) -> int:
        """CTAs of a tile of rows."""
        return -(-self.units // self.threads)

    @property
    def clusters(self) -> int:
        """CTAs of the grid."""
        return self.states.shape[0] * self.turns


def plan_merge(stream: StreamPlan) -> MergePlan | None:
    """Plan the kernel that merges what a stream's parts store; None if they store nothing."""
    if stream.mailbox is None or stream.states is None:
        return None
    return MergePlan(stream.program, stream.mailbox, stream.states)


def emit_merge(plan: MergePlan, images: dict[Any, Any], buffers: dict[str, Any]) -> None:
    """Write the body of a kernel that merges."""
    states = buffers[plan.states.name]
    program = with_parameters(plan.program, images)
    where = declare_coordinates(plan)
    tile = let("tile", where.cluster // plan.turns)
    places = unravel(program.tile_places, tile, 0)
    unit = let("unit", where.cluster % plan.turns * plan.threads + where.thread)
    across = plan.mailbox.columns // 2
    row, column = let("unit_row", unit // across), let("unit_column", unit % across * 2)

    def load(target: Any, first: int, offset: Any) -> None:
        place = states.ptr_to([tile, offset // FLOAT_BYTES])
        run(ir.script.ptx["ld.global.v2.f32"](target[first], target[first + 1], place))

    # Launched while the parts are still at work.
    run(ir.script.ptx.griddepcontrol.wait())
    with when(with_row(unit < plan.units, row, program, places)):
        ahead = plan.mailbox.size
        Unit(program, plan.mailbox, (row, column), places, load, ahead).run()


class StateWriter(Handing):
    """Stores what one warpgroup has, for the kernel that merges it."""

    def begin(self) -> None:
        """Do nothing: no CTA waits for the state."""

    def finish(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Store the state."""
        tiles = self.program.tile_places
        steps = strides(tiles)
        number = sum((places[each.var] * steps[each.var] for each in tiles), start=0)
        self._tile = let("tile", ir.script.Cast("int32", number))
        self._slot = let("slot", ir.script.Cast("int32", places[self.split.place.var]))
        self.send(rows, places)

    def _send(self, half: int, values: Values) -> None:
        """Store the values of a row, by one of its four threads, and its sums."""
        pairs = self.pairs_of_row(half, values)
        with when(self.body.where.lane % 4 == 0):
            for pair, values_of_row in enumerate(pairs):
                offset = self.mailbox.of_row(self._slot, self.lanes.rows[half], pair)
                self._put(offset, *values_of_row)
        for first, both in self.pairs_of_elements(half, values):
            column = self.lanes.column + first
            self._put(self.mailbox.element(self._slot, self.lanes.rows[half], column), *both)

    def _put(self, offset: Any, *both: Any) -> None:
        place = self.body.states.ptr_to([self._tile, offset // FLOAT_BYTES])
        run(ir.script.ptx["st.global.v2.f32"](place, *both))


# The multiplying role where CTAs share the keys of a tile of rows.


class SplitConsumer(Consumer):
    """One multiplying warpgroup of a CTA that has a part of the keys, or none of them."""

    def emit(self) -> None:
        """Write its part, and hand the state over; in a cluster merge a slice of all states."""
        kind = Merger if self.plan.receives else StateWriter
        handing = kind(self.body, self.warpgroup, self.lanes, self.multiplier.sums)
        handing.begin()
        # The state of no keys, if there are none.
        self.multiplier.clear()
        self.tiles.take()
        self._start_rows()
        with when(self.tiles.has_block):
            self.ping_pong.begin()
            self._begin()
            with ir.script.While(ir.script.Not(self.tiles.is_last_block)):
                self.tiles.step()
                self._multiply()
                self._carry()
                self.keep.set(ir.script.uint32(1))
            self._add_last()
        handing.finish(self.rows, self.tiles.places)
