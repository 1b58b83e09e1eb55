"""The exchange in a cluster whose CTAs each sum a part of a reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP, WARPGROUP_ROWS, Device
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.epilogue.elements import Elements, Units
from crossfuse.lower.hopper.features.feature import ConsumerPart, Ending, Feature, TileSums
from crossfuse.lower.hopper.plan.phase import WARP_ROWS, PhasePlan
from crossfuse.lower.hopper.statements import Variable, let, registers, run, when
from crossfuse.planner.kernels.memory import EXCHANGE_BARRIERS, Piece

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
