"""All-gather of an intermediate through distributed shared memory, from registers to wgmma."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.ahead import Ahead
from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.fragment import Fragment
from crossfuse.lower.hopper.gathered import CHUNK, share_bytes
from crossfuse.lower.hopper.operand import WARPGROUP_ROWS
from crossfuse.lower.hopper.phase import WARP_ROWS, PhasePlan
from crossfuse.lower.hopper.statements import Variable, let, registers, run
from crossfuse.lower.hopper.tile import Gather
from crossfuse.lower.hopper.warmup import Warmup

#: Columns of a slice that a warp stores at once: four matrices of eight rows and columns.
_GROUP = 16


@dataclass(frozen=True)
class GatherBarriers:
    """A barrier for each multiplying warpgroup: all other CTAs' slices of its rows are there.

    Attributes
    ----------
    of : Callable
        Function from a warpgroup to the address of its barrier.
    """

    of: Callable[[Any], Any]

    def initialise(self, warpgroup: Any) -> None:
        """Set one up."""
        mbarrier.initialise(self.of(warpgroup), 1)

    def expect(self, gather: Gather, warpgroup: Any) -> None:
        """Say what will arrive; some of it may have arrived before. One thread calls it."""
        slices = gather.place.extent
        mbarrier.expect(self.of(warpgroup), share_bytes(gather) // slices * (slices - 1))


class Giver:
    """Sends a warpgroup's part of a slice to the same warpgroup of all CTAs of the cluster.

    Each warp stores its 16 rows in its own CTA's shared memory by stmatrix, and sends them from
    there in pieces of 16 bytes. DSM takes stores faster than bulk copies (docs/hopper.md)::

        before                 push                         after, in every CTA
        CTA 0: h0              CTA 0 -- h0 --> 1, 2, 3
        CTA 1: h1              CTA 1 -- h1 --> 2, 3, 0      h0 | h1 | h2 | h3
        ...

    Parameters
    ----------
    plan : PhasePlan
        The phase that makes slices.
    where : Coordinates
        Of this thread.
    warpgroup : Any
        Index of the multiplying warpgroup.
    accumulators : Any
        Its registers.
    buffer : Any
        Function from a byte offset to an address in what is gathered.
    barriers : GatherBarriers
        Of the gather.
    warmup : Warmup
        In which nothing is sent.
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
        groups = tuple((first, _GROUP) for first in range(0, gather.width, _GROUP))
        self.further = Ahead(self.fragment, groups, warmup)
        self.rank = where.places[gather.place.var]

    def ahead(self, values: Mapping[Any, Any]) -> None:
        """Read what the slice at the place that `values` tell needs besides its sums."""
        self.further.start(*self._first(values))

    def _first(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of this warpgroup's first element."""
        contraction = self.plan.program.contraction
        # The expression is written in columns of the product.
        origin = contraction.result(contraction.left.buffer).origin
        row, column = (at(each, dict(values)) for each in origin)
        return row + self.warpgroup * WARPGROUP_ROWS, column

    def give(self, values: Mapping[Any, Any]) -> None:
        """Make the slice at the place that `values` tell, and send it."""
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
        if self.gather.place.extent > 1:
            with self.warmup.skipped():
                self._send(start, chunks // 2)
        mbarrier.meet_warpgroup(self.warpgroup)

    def _store(self, packed: Any, row: Any, column: Any, group: int, start: Any) -> None:
        """Sixteen columns of the warp's rows, as four matrices of eight rows and columns."""
        self.further.advance()
        matrices = [packed[each] for each in range(4)]
        self.fragment.pack(matrices, row, column, group * _GROUP, self.further)
        run(
            ir.script.ptx.stmatrix.sync.aligned.m8n8.x4.shared.b16(
                self.buffer(start + group * (2 * CHUNK)), *matrices
            )
        )

    def _send(self, start: Any, groups: int) -> None:
        """Send this lane's pieces to all other CTAs, each beginning with its neighbour."""
        pieces = registers("pieces", 4 * groups, "float32")
        load = ir.script.ptx["ld.shared.v4.f32"]
        for group in range(groups):
            address = self.buffer(start + group * (2 * CHUNK))
            run(load(*[pieces[4 * group + each] for each in range(4)], address))
        extent = self.gather.place.extent
        target, arrival = Variable("target", "uint32"), Variable("arrival", "uint32")
        with ir.script.serial(1, extent) as step:
            ir.IRBuilder.name("peer", step)
            peer = let("peer_rank", self.where.rank - self.rank + (self.rank + step) % extent)
            mbarrier.cluster_address(target.value, self.buffer(start), peer)
            mbarrier.cluster_address(arrival.value, self.barriers.of(self.warpgroup), peer)
            send = ir.script.ptx.st_async.shared__cluster.mbarrier__complete_tx__bytes.v4.f32
            for group in range(groups):
                place = target.value + ir.script.uint32(group * (2 * CHUNK))
                run(send(place, *[pieces[4 * group + each] for each in range(4)], arrival.value))


def await_slices(barriers: GatherBarriers, gather: Gather, warpgroup: Any) -> None:
    """Wait until a warpgroup has all slices of its rows, for wgmma to read."""
    if gather.place.extent == 1:
        return
    mbarrier.wait_cluster(barriers.of(warpgroup), 0)
    # Peers cannot fence what they store here for wgmma's proxy.
    run(ir.script.ptx.fence.proxy.async_.shared__cta())
