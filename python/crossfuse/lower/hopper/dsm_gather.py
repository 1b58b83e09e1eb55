"""All-gather of an intermediate through distributed shared memory, from registers to wgmma."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP, WARPGROUP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.epilogue.prefetch import Ahead, Fragment
from crossfuse.lower.hopper.plan.operands import (
    CHUNK,
    GROUP,
    barrier_count,
    share_bytes,
    slice_bytes,
)
from crossfuse.lower.hopper.plan.phase import WARP_ROWS, PhasePlan
from crossfuse.lower.hopper.program.tile import Gather
from crossfuse.lower.hopper.statements import Variable, let, registers, run, when
from crossfuse.lower.hopper.warmup import Warmup
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS

_WARPS = WARPGROUP // WARP
_COPY = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"


@dataclass(frozen=True)
class GatherBarriers:
    """Barriers that complete when other CTAs' slices of a multiplying warpgroup's rows are there.

    One barrier for all slices, or one for each slice in ring order.
    """

    gather: Gather
    #: From the number of a barrier to its address.
    address: Callable[[Any], Any]

    def of(self, warpgroup: Any, owner: Any) -> Any:
        """Address of the barrier that the slice of CTA `owner` completes."""
        if not self.gather.ring:
            return self.address(warpgroup)
        return self.address(warpgroup * self.gather.place.extent + owner)

    def initialise(self, consumers: int, thread: Any) -> None:
        """Initialise all barriers, spread over the threads of a warp."""
        count = barrier_count(self.gather, consumers)
        for first in range(0, count, WARP):
            with when(thread < count - first):
                mbarrier.initialise(self.address(thread + first), 1)

    def expect(self, warpgroup: Any, thread: Any, rank: Any) -> None:
        """Announce the bytes that will arrive; some may have before. A whole warpgroup calls it."""
        slices, size = self.gather.place.extent, slice_bytes(self.gather)
        if not self.gather.ring:
            with when(thread == 0):
                mbarrier.expect(self.address(warpgroup), size * (slices - 1))
            return
        with when(ir.script.And(thread < slices, thread != rank)):
            mbarrier.expect(self.of(warpgroup, thread), size)


class Giver:
    """Sends a warpgroup's part of a slice to the same warpgroup of all CTAs of the cluster.

    Each warp stores its 16 rows in its own CTA's shared memory by stmatrix, and sends them from
    there in pieces of 16 bytes. DSM takes stores faster than bulk copies (docs/hopper-measured.md),
    which need few instructions instead: one for each peer, when all warps have stored their rows::

        before                 push                         after, in every CTA
        CTA 0: h0              CTA 0 -- h0 --> 1, 2, 3
        CTA 1: h1              CTA 1 -- h1 --> 2, 3, 0      h0 | h1 | h2 | h3
        ...

    `plan` is the phase that makes slices; `buffer` maps a byte offset in the gathered intermediate
    to an address.
    """

    def __init__(
        self,
        plan: PhasePlan,
        where: Coordinates,
        warpgroup: Any,
        accumulators: Any,
        buffer: Any,
        barriers: GatherBarriers,
        warmup: Warmup,
    ) -> None:
        gather = plan.program.gives
        assert gather is not None
        self.plan = plan
        self.where = where
        self.gather = gather
        self.warpgroup = warpgroup
        self.buffer = buffer
        self.barriers = barriers
        self.warmup = warmup
        self.fragment = Fragment(plan, where, accumulators)
        # A slice has whole steps of the product that reads it, maybe more than the tile makes.
        self.made = min(gather.width, plan.columns)
        groups = tuple(
            (first, min(GROUP, self.made - first)) for first in range(0, self.made, GROUP)
        )
        self.further = Ahead(self.fragment, groups, warmup)
        self.rank = where.places[gather.place.var]

    def ahead(self, values: Mapping[Any, Any]) -> None:
        """Prefetch what the slice's epilogue reads besides its sums; `values` place the slice."""
        self.further.start(*self._first(values))

    def _first(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of this warpgroup's first element."""
        contraction = self.plan.program.contraction
        # The expression is written in columns of the product.
        origin = contraction.result(contraction.left.buffer).origin
        row, column = (at(each, dict(values)) for each in origin)
        return row + self.warpgroup * WARPGROUP_ROWS, column

    def give(self, values: Mapping[Any, Any]) -> None:
        """Make a slice from the sums, and send it; `values` place the slice."""
        row, column = self._first(values)
        row = let("row", row)
        column = let("column", column)
        # Of this lane's row in the slice, 8 columns for each half of a warp.
        chunks = self.gather.width // 8
        lane, warp = self.where.lane, self.where.warp
        slice_start = self.warpgroup * share_bytes(self.gather) + self.rank * (chunks * CHUNK)
        start = let(
            "piece",
            slice_start + (warp * WARP_ROWS + lane % WARP_ROWS) * 16 + lane // WARP_ROWS * CHUNK,
        )
        packed = registers("packed", 4, "uint32")
        for group in range(chunks // 2):
            self._store(packed, row, column, group, start)
        # wgmma reads the own slice through the asynchronous proxy, when the warps have met.
        run(ir.script.ptx.fence.proxy.async_.shared__cta())
        run(ir.script.cuda.warp_sync())
        if self.gather.place.extent == 1:
            mbarrier.meet_warpgroup(self.warpgroup)
        elif self.gather.bulk:
            mbarrier.meet_warpgroup(self.warpgroup)
            with self.warmup.skipped():
                self._copy(slice_start)
        else:
            with self.warmup.skipped():
                self._send(start, chunks // 2)
            mbarrier.meet_warpgroup(self.warpgroup)

    def _store(self, packed: Any, row: Any, column: Any, group: int, start: Any) -> None:
        """Store sixteen columns of the warp's rows, as four matrices of eight rows and columns."""
        first = group * GROUP
        # Two matrices for each eight columns: both halves of the rows.
        made = min(4, max(0, self.made - first) // 4)
        matrices = [packed[each] for each in range(4)]
        if made:
            self.further.advance()
            self.fragment.pack(matrices[:made], row, column, first, self.further.pairs)
        # Behind the tile there are no sums; a NaN there would pass the zero rows of the weight.
        for each in range(made, 4):
            ir.script.buffer_store(packed, ir.script.uint32(0), [each])
        run(
            ir.script.ptx.stmatrix.sync.aligned.m8n8.x4.shared.b16(
                self.buffer(start + group * (2 * CHUNK)), *matrices
            )
        )

    def _send(self, start: Any, groups: int) -> None:
        """Send this lane's pieces to all other CTAs."""
        pieces = registers("pieces", 4 * groups, "float32")
        load = ir.script.ptx["ld.shared.v4.f32"]
        for group in range(groups):
            address = self.buffer(start + group * (2 * CHUNK))
            run(load(*[pieces[4 * group + each] for each in range(4)], address))
        extent = self.gather.place.extent
        target, arrival = Variable("target", "uint32"), Variable("arrival", "uint32")
        with ir.script.serial(1, extent) as step:
            ir.IRBuilder.name("peer", step)
            self._aim(target, arrival, start, step)
            send = ir.script.ptx.st_async.shared__cluster.mbarrier__complete_tx__bytes.v4.f32
            for group in range(groups):
                place = target.value + ir.script.uint32(group * (2 * CHUNK))
                run(send(place, *[pieces[4 * group + each] for each in range(4)], arrival.value))

    def _copy(self, start: Any) -> None:
        """Send the slice to all other CTAs by bulk copies, each warp to some of them."""
        extent = self.gather.place.extent
        target, arrival = Variable("target", "uint32"), Variable("arrival", "uint32")
        with (
            when(self.where.lane == 0),
            ir.script.serial(0, -(-(extent - 1) // _WARPS)) as turn,
        ):
            ir.IRBuilder.name("turn_of_copy", turn)
            step = let("peer", turn * _WARPS + self.where.warp + 1)
            with when(step < extent):
                self._aim(target, arrival, start, step)
                size = ir.script.uint32(slice_bytes(self.gather))
                copy = ir.script.ptx[_COPY]
                run(copy(target.value, self.buffer(start), size, arrival.value))

    def _aim(self, target: Variable, arrival: Variable, start: Any, step: Any) -> None:
        """Set target and arrival barrier to those of peer number `step`.

        Each CTA begins with a neighbour: in ring order with the one that multiplies its slice next.
        """
        extent = self.gather.place.extent
        peer = self.rank + (extent - step if self.gather.ring else step)
        peer = let("peer_rank", self.where.rank - self.rank + peer % extent)
        mbarrier.cluster_address(target.value, self.buffer(start), peer)
        barrier = self.barriers.of(self.warpgroup, self.rank)
        mbarrier.cluster_address(arrival.value, barrier, peer)


def await_slices(barriers: GatherBarriers, warpgroup: Any, owner: Any) -> None:
    """Wait until a warpgroup has its rows of the slices that a barrier counts, for wgmma to read.

    In ring order `owner` is the CTA whose slice is awaited; otherwise one barrier counts all
    slices.
    """
    if barriers.gather.place.extent == 1:
        return
    mbarrier.wait_cluster(barriers.of(warpgroup, owner), 0)
    if not barriers.gather.bulk:
        # Peers cannot fence what they store here for wgmma's proxy.
        run(ir.script.ptx.fence.proxy.async_.shared__cta())
