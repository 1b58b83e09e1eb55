"""A stream for few rows of queries: each warp multiplies keys of its own, from memory to registers.

Attention of one token has a row for each head that shares keys, four or eight of the 64 rows that a
warpgroup multiplies. Here keys go down the tensor cores' fragments and rows across, and nothing
passes through shared memory but maxima of rows and, at the end, sums::

    warp:                                   keys of its own, of every tile of the CTA
        K = first keys;  V = first values           registers, 16 bytes a load
        for each tile:
            S = K Q^T;  K = next keys               mma.m16n8k16
            m = maximum of S over all warps         shared memory
            P = exp2(S - m)
            O = O c + V^T P;  V = next values
    CTA:    O = sum of all warps                    shared memory, in the order of warps
    cluster: states of all CTAs merge               DSM

Loads of a tile are on their way while the one before is multiplied, and SMs hold several CTAs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import MMA_GROUPS, MMA_LANES, MMA_ROWS, WARP, WARPGROUP, Device
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.pipeline import SharedMemory
from crossfuse.lower.hopper.program.tile import with_parameters
from crossfuse.lower.hopper.statements import (
    Variable,
    at,
    declare_coordinates,
    let,
    registers,
    run,
    when,
)
from crossfuse.lower.hopper.stream.body import SPAN, VECTOR, Lanes, StreamBody, SumsDown
from crossfuse.lower.hopper.stream.merge import Merger, store_pair, with_row
from crossfuse.lower.hopper.stream.plan.kernel import (
    RegisterPlan,
    StreamKernel,
    TileOrder,
    order_tiles,
    plan_registers,
)
from crossfuse.lower.hopper.stream.plan.memory import Mailbox, plan_mailbox
from crossfuse.lower.hopper.stream.program import Box, Kind, StreamProgram, ranges
from crossfuse.lower.hopper.stream.seen_keys import seen_keys, share_elements
from crossfuse.lower.hopper.stream.values import Elements, RowState, Values
from crossfuse.lower.image import BufferSpec, TensorMap
from crossfuse.lower.mma import load_vector, multiply_down, multiply_vectors, transpose
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.memory import COLUMN_STEP, DEPTH_STEP, ROWS, Arena, WarpStream

# Decides all that a kernel needs to know whose warps stream keys each by itself.


@dataclass(frozen=True)
class WarpPlan(StreamKernel):
    """The decisions of a kernel: each CTA has one tile of rows, or shares its keys in a cluster."""

    program: StreamProgram
    size: WarpStream
    registers: RegisterPlan
    order: TileOrder
    arena: Arena
    #: CTAs that an SM holds: registers are limited accordingly.
    resident: int
    #: Layout of what CTAs of a cluster hand over; None if none share keys.
    mailbox: Mailbox | None = None
    #: None: nothing is left to a second kernel.
    states: BufferSpec | None = None
    rings: ClassVar[tuple[tuple[str, int], ...]] = ()
    readers: ClassVar[tuple[int, ...]] = ()
    tensor_maps: ClassVar[tuple[TensorMap, ...]] = ()

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.size.threads

    @property
    def consumers(self) -> int:
        """Warpgroups of a CTA, all of which multiply."""
        return self.threads // WARPGROUP

    @property
    def receives(self) -> bool:
        """Whether CTAs of a cluster hand their states to one another."""
        return self.mailbox is not None

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return 1 if self.mailbox is None else self.mailbox.size

    @property
    def clusters(self) -> int:
        """Clusters that are launched."""
        return self.order.turns

    @property
    def scores(self) -> int:
        """Registers of a thread for scores."""
        return self.size.scores

    @property
    def words(self) -> int:
        """Registers of a thread for weights of 16 bits."""
        return self.size.scores // 2

    @property
    def sums(self) -> int:
        """Registers of a thread for the second product."""
        return self.size.sums


def has_few_rows(program: StreamProgram) -> bool:
    """Whether warps multiply a stream's tiles by themselves: a warpgroup has 64 rows at least."""
    return program.tile[0] <= max(ROWS)


def plan_warps(program: StreamProgram, device: Device) -> WarpPlan:
    """Plan the kernel of a stream of few rows; refuses tiles that registers cannot take."""
    program = replace(share_elements(program), seen=seen_keys(program))
    registers, mailbox = plan_registers(program), plan_mailbox(program)
    rows, keys = program.tile
    columns, depth = program.output.columns, program.queries.columns
    size = WarpStream(rows, keys, depth, columns, registers.count)
    broken = size.broken()
    if program.beside is not None or (program.split is not None and program.split.in_memory):
        broken = "CTAs that share more, or later, than the keys of a cluster"
    if broken:
        raise refuse(
            "warp-stream",
            f"scores '{program.scores.name}'",
            found=broken,
            limit=f"tiles of {' or '.join(map(str, ROWS))} rows and 64, 128 or 256 keys, of "
            f"multiples of {DEPTH_STEP} elements with values of multiples of {COLUMN_STEP} that "
            "registers hold; clusters that merge in distributed shared memory",
            instead="take fewer keys a tile, or 64 rows, which a warpgroup multiplies",
        )
    inbox = 0 if mailbox is None else mailbox.bytes
    arena = size.arena(len(registers.rows), inbox)
    order = order_tiles(program, device)
    order = TileOrder(order.outer, order.inner, order.uneven, False, 0)
    order = replace(order, ctas=order.turns)
    resident = size.resident(arena.size, device)
    return WarpPlan(program, size, registers, order, arena, resident, mailbox)


#: Indices of larger tensors do not fit 32 bits.
_MOST_INDEX = 1 << 31


def emit_warps(plan: WarpPlan, images: dict[Any, Any]) -> None:
    """Write the body of a kernel."""
    plan = replace(plan, program=with_parameters(plan.program, images))
    where = declare_coordinates(plan)
    body = StreamBody.declared(plan, where, {}, SharedMemory.declared(plan.arena))
    if plan.receives:
        with when(ir.script.And(where.warpgroup == 0, where.thread < WARP)):
            body.initialise()
            mbarrier.publish_initialised()
        mbarrier.say_started()
    _Stream(plan, body).emit()


class _Fragments:
    """Rows of a tensor in registers, some of which each lane loads 16 bytes of."""

    def __init__(self, name: str, box: Box, count: int, program: StreamProgram) -> None:
        self.box, self.program = box, program
        self.words = registers(name, count, "uint32")
        end = box.shape[box.axis]
        first, known = box.origin[box.axis], ranges(program)
        self._whole = bool(known.can_prove(first >= 0)) and bool(
            known.can_prove(first + box.rows <= end)
        )

    def vector(self, number: int) -> Any:
        """Address of the 16 bytes of a load."""
        return ir.script.address_of(self.words[number * MMA_LANES])

    def load(self, number: int, row: Any, column: Any, places: dict[Any, Any]) -> None:
        """Load 16 bytes of a row of the box from a column on; zeros beyond the tensor."""
        box = self.box
        indices = [at(each, places) for each in box.origin]
        indices[box.axis] = indices[box.axis] + row
        indices[-1] = indices[-1] + column
        inside = ir.tirx.IntImm("bool", 1)
        if not self._whole:
            place = indices[box.axis]
            inside = ir.script.And(place >= 0, place < box.shape[box.axis])
        if prod(box.shape) >= _MOST_INDEX:
            indices = [ir.script.Cast("int64", each) for each in indices]
        address = ir.script.address_of(box.buffer[tuple(indices)])
        run(load_vector(self.vector(number), address, inside))


class _OfAllWarps:
    """Combines what the warps of a CTA have of its rows; each call is a barrier of the CTA."""

    def __init__(self, plan: WarpPlan, body: StreamBody, warp: Any, lanes: Lanes) -> None:
        size = plan.size
        self.rows, self.warps, self.warp, self.lanes = size.rows, size.warps, warp, lanes
        count = 2 * self.rows * self.warps
        start = plan.arena["partial"].offset
        self._partial = body.memory.view("partial", "float32", count, start)
        # Who still reads what was combined before is not overtaken: there are two places.
        self._place = Variable("place_of_partial", "int32", 0)

    def __call__(self, found: list[Any], is_top: bool) -> list[Any]:
        """Combine a value of each of a thread's rows, in the order of warps."""
        place, rows = self._place, self.lanes.rows
        with when(self.lanes.lane < MMA_LANES):
            for row, value in zip(rows, found, strict=True):
                index = place.value + (row * self.warps + self.warp)
                ir.script.buffer_store(self._partial, value, [index])
        run(ir.script.cuda.cta_sync())
        combine = ir.script.max if is_top else lambda a, b: a + b
        wholes = []
        for row in rows:
            of_warps = [
                self._partial[place.value + (row * self.warps + each)] for each in range(self.warps)
            ]
            wholes.append(let("of_all_warps", reduce(combine, of_warps)))
        place.set(self.rows * self.warps - place.value)
        return wholes


class _Stream:
    """A warp's way through the keys of its CTA, and what the CTA makes of all its warps."""

    def __init__(self, plan: WarpPlan, body: StreamBody) -> None:
        self.body, self.plan, self.program = body, plan, plan.program
        size, lane = self.plan.size, body.where.lane
        self.size = size
        warp = self.warp = let("warp", body.where.warpgroup * 4 + body.where.warp)
        self.group, self.quarter = let("group", lane // MMA_LANES), let("lane", lane % MMA_LANES)
        first = let("first_key", warp * size.of_warp)
        self.lanes = Lanes.of_keys(body.where, first, size.of_warp, size.fragments)
        self.elements = Elements(self.plan)
        layout = self.lanes.layout
        count = 2 * size.fragments
        across = _OfAllWarps(plan, body, warp, self.lanes)
        self.rows = RowState(self.plan.registers.rows, "", layout, count, across)
        self.tiles = body.tiles()
        self.sums = registers("sums", size.sums, "float32")
        of_queries, of_keys, of_values = size.loaded
        program = self.program
        self.queries = _Fragments("queries", program.queries, of_queries, program)
        self.keys = _Fragments("keys", program.keys, of_keys, program)
        self.values = _Fragments("values", program.values, of_values, program)

    def emit(self) -> None:
        """Write all of it."""
        handing = _Handing(self) if self.plan.receives else None
        if handing is not None:
            handing.begin()
        for register in range(self.size.sums):
            ir.script.buffer_store(self.sums, ir.script.float32(0), [register])
        self.tiles.take()
        for step in self.program.before:
            self.rows.run(step, self._at())
        self._load_queries()
        with when(self.tiles.has_block):
            self._load_keys(self.tiles.values)
            self._load_values(self.tiles.values)
        with ir.script.While(self.tiles.has_block):
            self._tile()
        collected = _Collected(self)
        if handing is None:
            collected.store()
        else:
            handing.hand_over(collected)

    def _at(self) -> Values:
        return self.elements.values(self.rows, self.lanes, self.tiles.values)

    def _tile(self) -> None:
        """Take in a tile of keys, and ask for the next one."""
        asked = self.elements.ask(self._at())
        self._score()
        self.tiles.look_ahead()
        more = let("more", ir.script.Not(self.tiles.is_last_block))
        with when(more):
            self._load_keys(self.tiles.next_values)
        self.elements.run(self.rows, asked)
        lanes = self._lanes_of_sums()
        values = Values.of_sums(
            self.program, lanes, self.tiles.values, self.rows.register, self.sums
        )
        for step in self.program.carries:
            values.store(self.sums, step.value, self.size.sums)
        self.elements.pack(self._at())
        self._add()
        with when(more):
            self._load_values(self.tiles.next_values)
        self.tiles.step()

    def _lanes_of_sums(self) -> Lanes:
        layout = SumsDown(self.size.fragments)
        return Lanes(self.lanes.rows, self.group * VECTOR, 0, self.lanes.lane, layout)

    def _load_queries(self) -> None:
        """Load the rows: those behind the last one that is stored are never looked at."""
        last = self.program.output.rows - 1
        steps = self.size.depth // DEPTH_STEP
        for fragment in range(self.size.fragments):
            row = ir.script.min(self.group + fragment * MMA_GROUPS, last)
            for step in range(steps):
                column = self.quarter * VECTOR + step * DEPTH_STEP
                self.queries.load(fragment * steps + step, row, column, self.tiles.values)

    def _load_keys(self, places: dict[Any, Any]) -> None:
        steps = self.size.depth // DEPTH_STEP
        for eight in range(self.size.of_warp // MMA_GROUPS):
            row = self.lanes.first + (self.group + eight * MMA_GROUPS)
            for step in range(steps):
                column = self.quarter * VECTOR + step * DEPTH_STEP
                self.keys.load(eight * steps + step, row, column, places)

    def _load_values(self, places: dict[Any, Any]) -> None:
        """Load values: of 16 keys a lane has two neighbours, and those eight behind them."""
        spans = self.size.columns // SPAN
        for block in range(self.size.of_warp // MMA_ROWS):
            for span in range(spans):
                for number in range(4):
                    inside = block * MMA_ROWS + number // 2 * MMA_GROUPS + number % 2
                    row = self.lanes.first + (self.quarter * 2 + inside)
                    column = self.group * VECTOR + span * SPAN
                    self.values.load((block * spans + span) * 4 + number, row, column, places)

    def _score(self) -> None:
        """Multiply keys by queries."""
        size, scores = self.size, self.elements.scores
        steps = size.depth // DEPTH_STEP
        for register in range(size.scores):
            ir.script.buffer_store(scores, ir.script.float32(0), [register])
        for block in range(size.of_warp // MMA_ROWS):
            for fragment in range(size.fragments):
                sums = ir.script.address_of(scores[(block * size.fragments + fragment) * 4])
                for step in range(steps):
                    pair = [self.keys.vector((2 * block + e) * steps + step) for e in range(2)]
                    rows = self.queries.vector(fragment * steps + step)
                    run(multiply_vectors(self.program.dtype, sums, pair[0], pair[1], rows))

    def _add(self) -> None:
        """Multiply values by the weights of their keys."""
        size, words = self.size, self.elements.words
        for word in range(self.plan.words):
            ir.script.buffer_store(words, transpose(words[word]), [word])
        spans = size.columns // SPAN
        for block in range(size.of_warp // MMA_ROWS):
            for span in range(spans):
                vectors = self.values.vector((block * spans + span) * 4)
                for fragment in range(size.fragments):
                    first = (block * size.fragments + fragment) * 2
                    sums = (span * 4 * size.fragments + fragment) * 4
                    run(
                        multiply_down(
                            self.program.dtype,
                            ir.script.address_of(self.sums[sums]),
                            vectors,
                            (words[first], words[first + 1]),
                            4 * size.fragments,
                        )
                    )


class _Collected:
    """What all warps of a CTA have of its rows and columns, pair by pair of columns."""

    def __init__(self, stream: _Stream) -> None:
        self.stream, self.plan, self.program = stream, stream.plan, stream.program
        self.size, body = stream.size, stream.body
        arena, memory = self.plan.arena, body.memory
        self.thread = let("thread_of_cta", body.where.warpgroup * WARPGROUP + body.where.thread)
        for buffer in self.plan.registers.deferred:
            stream.rows.gather(buffer)
        count = self.size.warps * self.size.sums * WARP
        self._sums = memory.view("sums_of_warps", "float32", count, arena["sums"].offset)
        self._buffers = self.plan.registers.rows
        rows = max(1, len(self._buffers)) * self.size.rows
        self._rows = memory.view("values_of_rows", "float32", rows, arena["rows"].offset)
        lane, first = stream.lanes.lane, stream.warp * self.size.sums
        for register in range(self.size.sums):
            index = (first + register) * WARP + lane
            ir.script.buffer_store(self._sums, stream.sums[register], [index])
        with when(ir.script.And(stream.warp == 0, lane < MMA_LANES)):
            for number, buffer in enumerate(self._buffers):
                for half, row in enumerate(stream.lanes.rows):
                    value = stream.rows.register(buffer, half)
                    ir.script.buffer_store(self._rows, value, [number * self.size.rows + row])
        run(ir.script.cuda.cta_sync())

    @property
    def places(self) -> dict[Any, Any]:
        """Values of the places of the tile."""
        return self.stream.tiles.places

    def of_row(self, row: Any) -> Values:
        """Expressions of a row."""
        return self._values(row, 0, ())

    def units(self) -> Iterator[tuple[Any, Any, Values]]:
        """Each row and pair of columns of this thread, with its expressions.

        Lanes read their own sums: no two of them meet in a bank.
        """
        fragments, warps = self.size.fragments, self.size.warps
        count = self.size.sums // 2
        lane = self.stream.lanes.lane
        with ir.script.serial(0, -(-count // warps)) as turn:
            ir.IRBuilder.name("turn", turn)
            unit = let("unit", turn * warps + self.stream.warp)
            block, half = unit // 2, unit % 2
            fragment = block % fragments
            four = block // fragments
            row = let("unit_row", lane % MMA_LANES * 2 + (fragment * MMA_GROUPS + half))
            column = let(
                "unit_column", lane // MMA_LANES * VECTOR + four // 4 * SPAN + four % 4 * 2
            )
            exists = row < self.program.output.rows
            if count % warps:
                exists = ir.script.And(exists, unit < count)
            with when(exists):
                pair = registers("pair", 2, "float32")
                for each in range(2):
                    register = block * 4 + 2 * each + half
                    found = [
                        self._sums[(warp * self.size.sums + register) * WARP + lane]
                        for warp in range(warps)
                    ]
                    ir.script.buffer_store(pair, reduce(lambda a, b: a + b, found), [each])
                yield row, column, self._values(row, column, pair)

    def store(self) -> None:
        """Store results."""
        for row, column, values in self.units():
            with when(with_row(ir.tirx.IntImm("bool", 1), row, self.program, self.places)):
                store_pair(self.program, self._finished(values), row, column, self.places)

    def _finished(self, values: Values) -> Values:
        """The same expressions, with what is made of a row behind the stream."""
        made: dict[Any, Any] = {}

        def of_row(buffer: Any, half: int) -> Any:
            return made[buffer] if buffer in made else values.rows(buffer, half)

        finished = replace(values, rows=of_row)
        for step in self.program.after:
            made[step.target] = let(str(step.target.name), finished.of_row(step.value, 0))
        return finished

    def _values(self, row: Any, column: Any, pair: Any) -> Values:
        def of_row(buffer: Any, half: int) -> Any:
            for number, each in enumerate(self._buffers):
                if each.same_as(buffer):
                    return self._rows[number * self.size.rows + row]
            return None

        lanes = Lanes((row, row), column, 0, 0)
        return Values(self.program, lanes, self.places, of_row, lambda _, register: pair[register])


class _Handing(Merger):
    """Hands over what a CTA has collected, and merges a slice of what the cluster has."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__(stream.body, stream.body.where.warpgroup, stream.lanes, stream.sums)
        self.size = stream.size

    def hand_over(self, collected: _Collected) -> None:
        """Send all to its owners, and merge."""
        mbarrier.await_started()
        rows, mailbox = self.size.rows, self.mailbox
        turns = -(-rows * mailbox.size // self.size.threads)
        with ir.script.serial(0, turns) as turn:
            ir.IRBuilder.name("turn", turn)
            sent = let("sent", turn * self.size.threads + collected.thread)
            row, rank = let("sent_row", sent % rows), let("to", sent // rows)
            with when(ir.script.And(row < mailbox.rows, rank < mailbox.size)):
                owner = self._owner(rank)
                for pair, both in enumerate(self.pairs_of_row(0, collected.of_row(row))):
                    owner.push(mailbox.of_row(self.rank, row, pair), both)
        (step,) = (each for each in self.split.slabs if each.kind is not Kind.ROW)
        for unit_row, column, values in collected.units():
            owner = self._owner(let("owner", column // mailbox.columns))
            made = [values.of_element(step.value, each) for each in range(2)]
            owner.push(mailbox.element(self.rank, unit_row, column % mailbox.columns), made)
        self._merge(collected.places)
