"""Partial sums of a split reduction, exchanged through distributed shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.coordinates import Coordinates
from crossfuse.lower.hopper.phase import WARP_ROWS, WARPGROUP_ROWS, PhasePlan
from crossfuse.lower.hopper.statements import Variable, let, registers, run, when

_WARPS = WARPGROUP_ROWS // WARP_ROWS


@dataclass(frozen=True)
class ExchangeBarriers:
    """Barriers of an exchange.

    Attributes
    ----------
    free : Any
        Address of the one that completes when no CTA of the cluster needs its tiles any more.
    received : Any
        Address of the one that all partial sums complete.
    """

    free: Any
    received: Any

    def initialise(self, plan: PhasePlan) -> None:
        """Set both up."""
        exchange = plan.program.exchange
        assert exchange is not None
        size = exchange.place.extent
        mbarrier.initialise(self.free, size * plan.consumers)
        mbarrier.initialise(self.received, 1)
        mbarrier.expect(self.received, (size - 1) * plan.slice_bytes)


class SplitReduction:
    """Push-and-add reduce-scatter of one warpgroup's accumulators.

    PTX has no float32 addition into remote shared memory. So each thread pushes the registers that
    belong to another CTA's slice into that CTA's receive buffer, and each CTA adds what it received
    to its own registers, in the order of the ranks behind it. The buffer lies where right tiles
    were, so nobody sends before all CTAs have multiplied theirs::

        before                 push                        after
        CTA 0: p00 p01         CTA 0 <-- p10               CTA 0: p00 + p10
        CTA 1: p10 p11         CTA 1 <-- p01               CTA 1:           p11 + p01

    Parameters
    ----------
    plan : PhasePlan
        The phase.
    where : Coordinates
        Of this thread.
    warpgroup : Any
        Index of the multiplying warpgroup.
    buffer : Any
        Function from a byte offset to an address in the receive buffer.
    barriers : ExchangeBarriers
        Of the exchange.
    """

    def __init__(
        self,
        plan: PhasePlan,
        where: Coordinates,
        warpgroup: Any,
        buffer: Any,
        barriers: ExchangeBarriers,
    ) -> None:
        exchange = plan.program.exchange
        assert exchange is not None
        self.plan = plan
        self.where = where
        self.exchange = exchange
        self.size = exchange.place.extent
        self.rank = where.places[exchange.place.var]
        self.warp = let("warp_of_tile", warpgroup * _WARPS + where.warp)
        self.buffer = buffer
        self.barriers = barriers
        self.count = 4 if plan.has_whole_warps else 2
        self.parts = self._parts()

    def _parts(self) -> list[_Part]:
        """Neighbouring accumulators with one owner, each with its place in the owner's slice."""
        if self.count == 4:
            return self._parts_of_warps()
        rows = [
            let("row_of_tile", self.warp * WARP_ROWS + self.where.lane // 4 + 8 * half)
            for half in (0, 1)
        ]
        if not self.exchange.rows:
            return [
                self._part_of_pair(rows, first) for first in range(0, self.plan.accumulators, 2)
            ]
        # A row has one owner: what depends on it is computed once.
        owners = [self._owner_of_row(row) for row in rows]
        starts = [let("start", row % self.exchange.rows * self.exchange.width * 4) for row in rows]
        parts = []
        for first in range(0, self.plan.accumulators, 2):
            half = first // 2 % 2
            column = first // 4 * 8 + self.where.lane % 4 * 2
            parts.append(_Part(first, owners[half], starts[half] + column * 4, self._has(column)))
        return parts

    def _parts_of_warps(self) -> list[_Part]:
        """Blocks of eight columns, in the layout of the fragments."""
        warps = self.exchange.rows // WARP_ROWS
        blocks = self.plan.accumulators // 4
        owner = self._owner(let("owner", self.warp // warps))
        start = let("start", self.warp % warps * (blocks * 32 * 16) + self.where.lane * 16)
        return [_Part(4 * block, owner, start + block * (32 * 16), None) for block in range(blocks)]

    def _part_of_pair(self, rows: list[Any], first: int) -> _Part:
        """Two accumulators of a row that several CTAs share."""
        column = first // 4 * 8 + self.where.lane % 4 * 2
        position = rows[first // 2 % 2] * self.exchange.width + column
        inside = position < self.exchange.elements * self.size
        known = self._has(column)
        inside = inside if known is None else ir.script.And(known, inside)
        owner = ir.script.Select(inside, position // self.exchange.elements, -1)
        return _Part(first, self._owner(owner), position % self.exchange.elements * 4, None)

    def _has(self, column: Any) -> Any:
        """Whether the tensor has a column of the tile; None if it has all."""
        full = self.exchange.width >= self.plan.columns
        return None if full else column < self.exchange.width

    def _owner_of_row(self, row: Any) -> _Owner:
        inside = row < self.exchange.rows * self.size
        return self._owner(let("owner", ir.script.Select(inside, row // self.exchange.rows, -1)))

    def _owner(self, rank: Any) -> _Owner:
        return _Owner(self, rank)

    def combine(self, accumulators: Any) -> None:
        """Send what others combine, wait for what they send, and add it."""
        self._announce()
        for part in self.parts:
            with when(part.condition(part.owner.is_other)):
                self._push(part, accumulators)
        mbarrier.wait_cluster(self.barriers.received, 0)
        received = registers("received", self.count, "float32")
        for slot in range(self.size - 1):
            for part in self.parts:
                with when(part.condition(part.owner.is_self)):
                    self._add(part, accumulators, slot, received)

    def _announce(self) -> None:
        """Tell all CTAs that this warpgroup has multiplied its tiles, and wait for theirs."""
        thread = self.where.thread
        with when(thread < self.size):
            address = Variable("free_in_cluster", "uint32")
            mbarrier.cluster_address(address.value, self.barriers.free, thread)
            mbarrier.arrive_remote(address.value)
        mbarrier.wait(self.barriers.free, 0)

    def owns(self, index: int) -> Any:
        """Whether an accumulator belongs to this CTA's slice."""
        part = self.parts[index // self.count]
        return part.condition(part.owner.is_self)

    def _push(self, part: _Part, accumulators: Any) -> None:
        call = ir.script.ptx.st_async.shared__cluster.mbarrier__complete_tx__bytes
        call = call.v4.f32 if self.count == 4 else call.v2.f32
        values = [accumulators[part.first + i] for i in range(self.count)]
        place = part.owner.buffer + ir.script.Cast("uint32", part.offset)
        run(call(place, *values, part.owner.barrier))

    def _add(self, part: _Part, accumulators: Any, slot: int, received: Any) -> None:
        address = self.buffer(slot * self.plan.slice_bytes + part.offset)
        load = ir.script.ptx[f"ld.shared.v{self.count}.f32"]
        run(load(*[received[i] for i in range(self.count)], address))
        for i in range(self.count):
            total = accumulators[part.first + i] + received[i]
            ir.script.buffer_store(accumulators, total, [part.first + i])


class _Owner:
    """The CTA that combines a part: its rank, and where this CTA's share goes in it."""

    def __init__(self, reduction: SplitReduction, rank: Any) -> None:
        size, mine = reduction.size, reduction.rank
        self.is_self = rank == mine
        self.is_other = ir.script.And(rank != mine, rank >= 0)
        # Whoever has no owner sends nothing: any rank will do for its addresses.
        known = ir.script.max(rank, 0)
        target, arrival = Variable("target", "uint32"), Variable("arrival", "uint32")
        linear = reduction.where.rank + (known - mine)
        mbarrier.cluster_address(target.value, reduction.buffer(0), linear)
        mbarrier.cluster_address(arrival.value, reduction.barriers.received, linear)
        slot = (mine - known - 1 + size) % size
        offset = ir.script.Cast("uint32", slot * reduction.plan.slice_bytes)
        target.set(target.value + offset)
        self.buffer, self.barrier = target.value, arrival.value


@dataclass(frozen=True)
class _Part:
    """Neighbouring accumulators: the first one, their owner, and their offset in its slice."""

    first: int
    owner: _Owner
    offset: Any
    exists: Any

    def condition(self, owned: Any) -> Any:
        """A condition on the owner, for accumulators that the tensor has."""
        return owned if self.exists is None else ir.script.And(owned, self.exists)
