"""Sums of parts: exchanged in a cluster, or added up through L2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP, WARPGROUP_ROWS, Device
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.epilogue.elements import Elements, Units, further_of
from crossfuse.lower.hopper.features.feature import ConsumerPart, Ending, Feature, TileSums
from crossfuse.lower.hopper.flags import PlacedFlags
from crossfuse.lower.hopper.plan.phase import WARP_ROWS, PhasePlan
from crossfuse.lower.hopper.program.tile_program import UNIT, SumProgram
from crossfuse.lower.hopper.statements import (
    Coordinates,
    Variable,
    Warmup,
    at,
    let,
    registers,
    run,
    unravel,
    when,
)
from crossfuse.planner.kernels.memory import BARRIER, EXCHANGE_BARRIERS, Piece

if TYPE_CHECKING:
    from crossfuse.lower.hopper.roles import Body

_WARPS = WARPGROUP_ROWS // WARP_ROWS
#: Barriers: one completes when no CTA of the cluster needs its tiles any more, the other when all
#: partial sums are there.
_FREE, _RECEIVED = 0, 1
#: Events of an exchange, see `timeline`.
EXCHANGED = "peers multiplied", "received"


class SplitReduction(Ending):
    """Push-and-add reduce-scatter of one warpgroup's accumulators.

    PTX has no float32 addition into remote shared memory. So each thread pushes its registers into
    the receive buffer of the CTA whose slice they belong to, its own too, and all threads of a CTA
    add what has been received, in the order of the ranks. The buffer lies where right tiles were,
    so nobody sends before all CTAs have multiplied theirs::

        before                 push                        after
        CTA 0: p00 p01         CTA 0 <-- p00, p10          CTA 0: p00 + p10
        CTA 1: p10 p11         CTA 1 <-- p01, p11          CTA 1:           p01 + p11
    """

    def __init__(self, sums: TileSums) -> None:
        super().__init__(sums)
        exchange = self.plan.program.exchange
        assert exchange is not None
        self.exchange = exchange
        self.size = exchange.place.extent
        self.rank = self.where.places[exchange.place.var]
        self.buffer = self.body.memory.region("received")
        self.count = 4 if self.plan.has_whole_warps else 2
        self.elements = Elements(self.plan.program, self.plan.tails)
        #: Address of the barrier that all partial sums complete.
        self.received = self.body.memory.barrier("exchange_barriers", _RECEIVED)
        self.parts = [part for block in range(self.plan.blocks) for part in self._parts(block)]

    def _parts(self, below: int) -> list[_Slice]:
        """Contiguous accumulators of a block of rows, with one owner and a place in its slice."""
        index = self.warpgroup * self.plan.blocks + below
        warp = let("warp_of_tile", index * _WARPS + self.where.warp)
        start = self.plan.first_sum(below, 0)
        parts = self._parts_of_warps(warp) if self.count == 4 else self._parts_of_rows(warp)
        return [replace(each, first=start + each.first) for each in parts]

    def _parts_of_rows(self, warp: Any) -> list[_Slice]:
        """Parts that are pairs within a row."""
        rows = [
            let("row_of_tile", warp * WARP_ROWS + self.where.lane // 4 + 8 * half)
            for half in (0, 1)
        ]
        if not self.exchange.rows:
            return [
                self._part_of_pair(rows, first) for first in range(0, self.plan.accumulators, 2)
            ]
        # A row has one owner: what depends on it is computed once.
        height = self.exchange.rows
        inside = [let("inside", row < height * self.size) for row in rows]
        owners = [self._owner(self._known(row // height)) for row in rows]
        starts = [let("start", row % height * self.exchange.width * 4) for row in rows]
        parts = []
        for first in range(0, self.plan.accumulators, 2):
            half = first // 2 % 2
            column = first // 4 * 8 + self.where.lane % 4 * 2
            exists = self._exists(inside[half], column)
            parts.append(_Slice(first, owners[half], starts[half] + column * 4, exists))
        return parts

    def _parts_of_warps(self, warp: Any) -> list[_Slice]:
        """Parts that are blocks of eight columns, in the layout of the fragments."""
        warps = self.exchange.rows // WARP_ROWS
        blocks = self.plan.accumulators // 4
        owner = self._owner(let("owner", warp // warps))
        start = let("start", warp % warps * (blocks * 32 * 16) + self.where.lane * 16)
        return [
            _Slice(4 * block, owner, start + block * (32 * 16), None) for block in range(blocks)
        ]

    def _part_of_pair(self, rows: list[Any], first: int) -> _Slice:
        """Two neighbours of a row that slices divide, so that each pair has an owner of its own."""
        column = first // 4 * 8 + self.where.lane % 4 * 2
        elements = self.exchange.elements
        position = rows[first // 2 % 2] * self.exchange.width + column
        exists = self._exists(position < elements * self.size, column)
        owner = self._owner(self._known(position // elements))
        return _Slice(first, owner, position % elements * 4, exists)

    def _known(self, rank: Any) -> Any:
        """A rank clamped to the cluster: without an owner nothing is sent, so any will do."""
        return ir.script.min(rank, self.size - 1)

    def _exists(self, inside: Any, column: Any) -> Any:
        """Whether an element of the tile exists in the tensor."""
        if self.exchange.width >= self.plan.columns:
            return inside
        return ir.script.And(inside, column < self.exchange.width)

    def end(self, values: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
        """Send partial sums to their owners; add and store the slice that this CTA owns.

        `leave` is called when this thread has sent everything.
        """
        units = self._units(values)
        if self.elements.further:
            units.start(let("first_unit", self._thread()))
        with self.warmup.skipped():
            self._announce()
        self.note(EXCHANGED[0])
        for part in self.parts:
            exists = when(part.exists) if part.exists is not None else nullcontext()
            with self.warmup.skipped(), exists:
                self._push(part)
        with self.warmup.skipped():
            if leave is not None:
                leave()
            mbarrier.wait_cluster(self.received, 0)
        self.note(EXCHANGED[1])
        row, column = (let("first", each) for each in self.origin(values))
        total = registers("total", self.count, "float32")
        received = registers("received", self.count, "float32")
        threads, count = units.threads, units.count
        me = let("thread_of_tile", self._thread())
        with ir.script.serial(0, -(-count // threads)) as turn:
            ir.IRBuilder.name("turn", turn)
            unit = let("unit", turn * threads + me)
            with when(unit < count) if count % threads else nullcontext():
                self._add(unit, total, received)
                self._store(unit, row, column, total, units)
                units.advance(unit)

    def _thread(self) -> Any:
        """Number of this thread among those that multiply."""
        return self.warpgroup * WARPGROUP + self.where.thread

    def _units(self, values: Mapping[Any, Any]) -> Units:
        """Prefetches what the epilogue of this CTA's slice reads besides its sums."""
        row, column = self.origin(values)
        return Units(
            self.elements,
            self.plan.slice_bytes // (4 * self.count),
            self.plan.consumers * WARPGROUP,
            self.count // 2,
            lambda unit: self._places(unit, row, column),
            self.warmup,
        )

    def _add(self, unit: Any, total: Any, received: Any) -> None:
        """Sums of a unit over all CTAs; a unit has as many contiguous elements as a push."""
        for slot in range(self.size):
            self._load(slot, unit, received if slot else total)
            for i in range(self.count) if slot else ():
                ir.script.buffer_store(total, total[i] + received[i], [i])

    def _load(self, slot: int, unit: Any, target: Any) -> None:
        """Load the partial sums of a unit that one CTA sent."""
        address = self.buffer(slot * self.plan.slice_bytes + unit * (4 * self.count))
        load = ir.script.ptx[f"ld.shared.v{self.count}.f32"]
        with self.warmup.skipped():
            run(load(*[target[i] for i in range(self.count)], address))

    def _places(self, unit: Any, row: Any, column: Any) -> list[tuple[Any, Any]]:
        """Row and column of the first element of each pair of a unit."""
        if self.count == 4:
            blocks = self.plan.accumulators // 4
            lane, block, warp = unit % 32, unit // 32 % blocks, unit // 32 // blocks
            i = row + self.rank * self.exchange.rows + warp * WARP_ROWS + lane // 4
            j = column + block * 8 + lane % 4 * 2
            return [(i, j), (i + 8, j)]
        position = let("position", self.rank * self.exchange.elements + unit * 2)
        return [(row + position // self.exchange.width, column + position % self.exchange.width)]

    def _store(self, unit: Any, row: Any, column: Any, total: Any, units: Units) -> None:
        """Store the elements of a unit, given their sums."""
        for number, (i, j) in enumerate(self._places(unit, row, column)):
            low, high = (total[2 * number],), (total[2 * number + 1],)
            self.elements.store_pair(i, j, low, high, self.warmup, units.pairs[number])

    def _announce(self) -> None:
        """Signal all CTAs that this warpgroup has multiplied its tiles, and wait for theirs."""
        thread, free = self.where.thread, self.body.memory.barrier("exchange_barriers", _FREE)
        with when(ir.script.And(self.warpgroup == 0, thread == 0)):
            # Nothing arrives before this thread too has said that the buffer is free.
            mbarrier.expect(self.received, self.size * self.plan.slice_bytes)
        with when(thread < self.size):
            address = Variable("free_in_cluster", "uint32")
            rank = self.where.rank - self.rank + thread
            mbarrier.cluster_address(address.value, free, rank)
            mbarrier.arrive_remote(address.value)
        mbarrier.wait(free, 0)

    def _push(self, part: _Slice) -> None:
        values = [self.accumulators[part.first + i] for i in range(self.count)]
        part.owner.push(part.offset, values)

    def _owner(self, rank: Any) -> mbarrier.Peer:
        """The CTA that combines a part, and where this CTA's contribution goes in its buffer."""
        linear = self.where.rank + (rank - self.rank)
        peer = mbarrier.Peer(("target", "arrival"), self.buffer(0), self.received, linear)
        offset = ir.script.Cast("uint32", self.rank * self.plan.slice_bytes)
        peer.place.set(peer.place.value + offset)
        return peer


@dataclass(frozen=True)
class _Slice:
    """Contiguous accumulators that are sent to one CTA."""

    #: The first accumulator.
    first: int
    owner: mbarrier.Peer
    #: In the slice of the owner.
    offset: Any
    #: A condition where not all threads have such elements, else None.
    exists: Any


class _Part(ConsumerPart):
    feature: SplitSum

    def ending(self, sums: TileSums) -> Ending | None:
        """The sum over the cluster."""
        return SplitReduction(sums) if sums.number in self.feature.numbers else None


@dataclass(frozen=True)
class SplitSum(Feature):
    """Each CTA of a cluster sums a part of a reduction, and adds a slice of all parts."""

    asked_by: ClassVar = "splits"
    part: ClassVar = _Part
    behind_tiles = (Piece("exchange_barriers", EXCHANGE_BARRIERS),)
    #: Phases whose reduction is split.
    numbers: tuple[int, ...]
    #: Bytes of the partial sums of all CTAs, which lie where tiles were.
    received: int

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int], device: Device) -> SplitSum:
        """Peers send to one place in all phases."""
        return cls(tuple(numbers), max(phases[each].exchanged_bytes for each in numbers))

    def events_of(self, number: int) -> tuple[str, ...]:
        """Those of the exchange."""
        return EXCHANGED if number in self.numbers else ()

    def initialise(self, body: Body) -> None:
        """Initialise both barriers."""
        for number in self.numbers:
            phase = body.plan.phases[number]
            assert phase.program.exchange is not None
            with when(body.where.thread == 0):
                arrivals = phase.program.exchange.place.extent * phase.consumers
                mbarrier.initialise(body.memory.barrier("exchange_barriers", _FREE), arrivals)
                mbarrier.initialise(body.memory.barrier("exchange_barriers", _RECEIVED), 1)


# The sum of partial tiles of several clusters, in the order of their parts.


#: Vector suffix of an instruction, by the number of neighbours.
_VECTORS = {4: "v4.", 2: "v2.", 1: ""}
# A lane for each part; what all of them saw is known to the lane that goes on.
_AWAIT = """\
__device__ __forceinline__ void crossfuse_await_parts(const void* flags, int pitch, int parts,
                                                      unsigned target) {
  for (int part = threadIdx.x & 31; part < parts; part += 32) {
    const unsigned* flag = (const unsigned*)flags + part * pitch;
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    } while (seen != target);
  }
  __syncwarp();
}
"""


def _places(body: Body, program: SumProgram) -> dict[Any, Any]:
    """Values of the places of the sum of partial tiles; each cluster has one tile."""
    return unravel(program.places, body.where.cluster, body.where.rank)


def await_parts(
    program: SumProgram, placed: PlacedFlags, launch: Any, values: Mapping[Any, Any]
) -> None:
    """Wait until all parts of this CTA's tile are stored; a whole warp calls it.

    `launch` is the number of launches before this one, `values` are those of the variables of
    places.
    """
    flags = placed.flags
    row, column = (at(each, values) for each in program.first)
    down, across = row // flags.rows, column // flags.columns
    first = down * flags.across + across
    # A tile beyond the output has no flags, and nobody adds it.
    starts = (down * flags.rows, across * flags.columns)
    inside = [
        start < extent
        for dimension, (start, extent) in enumerate(
            zip(starts, program.store.tile.extents, strict=True)
        )
        if not program.begins_inside(dimension)
    ]
    with when(ir.conjunction(inside)) if inside else nullcontext():
        run(
            ir.cuda_func_call(
                "crossfuse_await_parts",
                placed.address(first),
                ir.script.int32(flags.down * flags.across),
                ir.script.int32(flags.parts),
                (launch + ir.script.uint32(1)) * ir.script.uint32(flags.raisers),
                source_code=_AWAIT,
            )
        )


class Sum:
    """Adds a CTA's slice of all parts, and stores the epilogue's values of it.

    ::

        before, in L2                  each CTA                     after
        part 0: tile [64, 96]          adds its rows of part 0,
        part 1: tile [64, 96]          1, 2, ... in this order      out: tile [64, 96]
        ...

    `threads` are those of a CTA that multiply.
    """

    def __init__(
        self, program: SumProgram, where: Coordinates, threads: int, warmup: Warmup
    ) -> None:
        self.program = program
        self.threads = threads
        self.me = let("thread_of_sum", (where.warpgroup - 1) * WARPGROUP + where.thread)
        self.warmup = warmup
        # Rows that are no multiple of a vector begin anywhere, and a vector would leave them.
        self.width = gcd(UNIT, int(program.partial.shape[-1]))
        self.elements = Elements(program, (program.has_tail(0), program.has_tail(1)))

    def store(self, ready: Any, values: Mapping[Any, Any]) -> None:
        """Wait at the barrier `ready`, then add and store; `values` are those of places."""
        ahead = self._units(values)
        ahead.start(self.me)
        with self.warmup.skipped():
            mbarrier.wait(ready, 0)
        total = registers("total", UNIT, "float32")
        part = registers("part", UNIT, "float32")
        units = ahead.count
        with ir.script.serial(0, -(-units // self.threads)) as turn:
            ir.IRBuilder.name("turn_of_sum", turn)
            unit = let("unit", turn * self.threads + self.me)
            with when(unit < units) if units % self.threads else nullcontext():
                row, column = self._place(unit, values)
                self._add(row, column, total, part)
                for first in range(0, UNIT, 2):
                    low, high = (total[first],), (total[first + 1],)
                    pairs = ahead.pairs[first // 2]
                    self.elements.store_pair(row, column + first, low, high, self.warmup, pairs)
                ahead.advance(unit)

    def _place(self, unit: Any, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of the first element of a unit."""
        element = {self.program.element: unit * UNIT}
        row, column = (at(each, values, element) for each in self.program.index)
        return let("row", row), let("column", column)

    def _units(self, values: Mapping[Any, Any]) -> Units:
        """Prefetches the further operands of this CTA's slice."""

        def places(unit: Any) -> list[tuple[Any, Any]]:
            row, column = self._place(unit, values)
            return [(row, column + first) for first in range(0, UNIT, 2)]

        count = self.program.elements // UNIT
        return Units(self.elements, count, self.threads, UNIT // 2, places, self.warmup)

    def _add(self, row: Any, column: Any, total: Any, part: Any) -> None:
        """Add a unit of all parts; several loads are in flight at once."""
        for each in range(UNIT):
            ir.script.buffer_store(total, ir.script.float32(0), [each])
        for offset in range(0, UNIT, self.width):
            with self._existing(row, column + offset):
                self._add_neighbours(row, column, offset, total, part)

    def _add_neighbours(self, row: Any, column: Any, offset: int, total: Any, part: Any) -> None:
        """Add as many neighbours of a unit, from `offset` on, as one load takes."""
        into = range(offset, offset + self.width)
        with ir.script.unroll(0, self.program.parts) as number:
            ir.IRBuilder.name("number", number)
            self._load(part, into, self.program.partial.ptr_to([number, row, column + offset]))
            for each in into:
                ir.script.buffer_store(total, total[each] + part[each], [each])

    def _load(self, registers: Any, into: Iterable[int], place: Any) -> None:
        load = ir.script.ptx[f"ld.global.{_VECTORS[self.width]}f32"]
        run(load(*[registers[each] for each in into], place))

    @contextmanager
    def _existing(self, row: Any, column: Any) -> Iterator[None]:
        """Context for statements on what begins within the output, outside the warm-up."""
        inside = self.elements.inside(row, column)
        with self.warmup.skipped(), when(ir.conjunction(inside)) if inside else nullcontext():
            yield


class _SumPart(ConsumerPart):
    def finish(self, warmup: Warmup) -> None:
        """Add a slice of all parts."""
        body, program = self.body, self.body.plan.phases[-1].program.summed
        assert program is not None
        total = Sum(program, body.where, WARPGROUP * body.plan.consumers, warmup)
        total.store(body.memory.barrier("sum_barrier"), _places(body, program))
        body.timeline.stamp("summed")


@dataclass(frozen=True)
class SumOfParts(Feature):
    """Clusters make partial tiles of the last phase; when all are stored, each CTA adds a slice."""

    asked_by: ClassVar = "summed"
    part: ClassVar = _SumPart
    events_behind = ("summed",)
    barriers = ("sum_barrier",)
    reads_early: bool

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int], device: Device) -> SumOfParts:
        """Of the last phase."""
        summed = phases[-1].program.summed
        assert summed is not None
        return cls(bool(further_of(summed)))

    def behind_all(self, stages: int) -> tuple[Piece, ...]:
        """The barrier that completes when all parts of this CTA's tile are stored."""
        return (Piece("sum_barrier", BARRIER),)

    def loaded(self, body: Body, launch: Any) -> None:
        """Wait for all parts, where nothing is left to load."""
        phase = body.plan.phases[-1]
        flags, program = phase.raises, phase.program.summed
        assert flags is not None and program is not None
        with body.each_tile(phase) as places:
            values = places | _places(body, program)
            await_parts(program, body.placed(flags), launch, values)
            with when(body.where.lane == 0):
                mbarrier.arrive(body.memory.barrier("sum_barrier"))
