"""Partial sums of a split reduction, exchanged through distributed shared memory."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.coordinates import Coordinates
from crossfuse.lower.hopper.plan import WARP_ROWS, WARPGROUP_ROWS, KernelPlan, has_whole_warps
from crossfuse.lower.hopper.statements import Variable, let, registers, run, when

_WARPS = WARPGROUP_ROWS // WARP_ROWS


def initialise_exchange(plan: KernelPlan, barrier: Any) -> None:
    """Set up the barrier that completes when all partial sums have arrived."""
    exchange = plan.program.exchange
    assert exchange is not None
    mbarrier.initialise(barrier, 1)
    mbarrier.expect(barrier, (exchange.place.extent - 1) * plan.slice_bytes)


class SplitReduction:
    """Push-and-add reduce-scatter of one warpgroup's accumulators.

    PTX has no float32 addition into remote shared memory. So each thread pushes the registers that
    belong to another CTA's slice into that CTA's receive buffer, and each CTA adds what it received
    to its own registers, in the order of the ranks behind it::

        before                 push                        after
        CTA 0: p00 p01         CTA 0 <-- p10               CTA 0: p00 + p10
        CTA 1: p10 p11         CTA 1 <-- p01               CTA 1:           p11 + p01

    Parameters
    ----------
    plan : KernelPlan
        The kernel.
    where : Coordinates
        Of this thread.
    warpgroup : Any
        Index of the multiplying warpgroup.
    buffer : Any
        Function from a byte offset to an address in the receive buffer.
    barrier : Any
        Address of the barrier that its bytes complete.
    """

    def __init__(
        self, plan: KernelPlan, where: Coordinates, warpgroup: Any, buffer: Any, barrier: Any
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
        self.barrier = barrier
        self.whole_warps = has_whole_warps(plan.program, plan.consumers)
        parts = range(0, plan.accumulators, 4 if self.whole_warps else 2)
        self.parts = [_Part(self, index) for index in parts]

    def combine(self, accumulators: Any) -> None:
        """Send what others combine, wait for what they send, and add it."""
        target, barrier = Variable("target", "uint32"), Variable("arrival", "uint32")
        for part in self.parts:
            part.push(accumulators, target, barrier)
        mbarrier.wait(self.barrier, 0)
        received = registers("received", 4, "float32")
        for slot in range(self.size - 1):
            for part in self.parts:
                part.add(accumulators, slot, received)

    def owns(self, index: int) -> Any:
        """Whether an accumulator belongs to this CTA's slice."""
        per_part = 4 if self.whole_warps else 2
        return self.parts[index // per_part].owner == self.rank


class _Part:
    """Neighbouring accumulators of one owner: four of a block of 8 columns, or two of a row."""

    def __init__(self, reduction: SplitReduction, first: int) -> None:
        self.reduction = reduction
        self.first = first
        exchange, where = reduction.exchange, reduction.where
        if reduction.whole_warps:
            warps = exchange.rows // WARP_ROWS
            blocks = reduction.plan.accumulators // 4
            self.owner = reduction.warp // warps
            start = reduction.warp % warps * (blocks * 32 * 16) + first // 4 * (32 * 16)
            self.offset = start + where.lane * 16
            self.count = 4
            return
        row = reduction.warp * WARP_ROWS + where.lane // 4 + 8 * (first // 2 % 2)
        column = first // 4 * 8 + where.lane % 4 * 2
        position = row * exchange.width + column
        # Outside the tensor nobody owns it.
        inside = ir.script.And(
            column < exchange.width, position < exchange.elements * reduction.size
        )
        self.owner = ir.script.Select(inside, position // exchange.elements, -1)
        self.offset = position % exchange.elements * 4
        self.count = 2

    def push(self, accumulators: Any, target: Variable, barrier: Variable) -> None:
        """Send to the owner, if that is another CTA."""
        reduction = self.reduction
        others = ir.script.And(self.owner != reduction.rank, self.owner >= 0)
        with when(others):
            rank = reduction.where.rank + (self.owner - reduction.rank)
            mbarrier.cluster_address(target.value, reduction.buffer(0), rank)
            mbarrier.cluster_address(barrier.value, reduction.barrier, rank)
            slot = (reduction.rank - self.owner - 1 + reduction.size) % reduction.size
            place = slot * reduction.plan.slice_bytes + self.offset
            call = ir.script.ptx.st_async.shared__cluster.mbarrier__complete_tx__bytes
            call = call.v4.f32 if self.count == 4 else call.v2.f32
            values = [accumulators[self.first + i] for i in range(self.count)]
            run(call(target.value + ir.script.Cast("uint32", place), *values, barrier.value))

    def add(self, accumulators: Any, slot: int, received: Any) -> None:
        """Add what the CTA of a slot sent, if this one is the owner."""
        reduction = self.reduction
        with when(self.owner == reduction.rank):
            address = reduction.buffer(slot * reduction.plan.slice_bytes + self.offset)
            load = ir.script.ptx[f"ld.shared.v{self.count}.f32"]
            run(load(*[received[i] for i in range(self.count)], address))
            for i in range(self.count):
                total = accumulators[self.first + i] + received[i]
                ir.script.buffer_store(accumulators, total, [self.first + i])
