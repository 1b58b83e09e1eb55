"""Intermediates that stay on the chip: gathered by a cluster, or in registers of a CTA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP_ROWS, Device
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.epilogue.store import Ahead, Fragment
from crossfuse.lower.hopper.features.feature import ConsumerPart, Ending, Feature, TileSums
from crossfuse.lower.hopper.plan.phase import WARP_ROWS, PhasePlan
from crossfuse.lower.hopper.plan.tiles import (
    CHUNK,
    GROUP,
    GROUP_REGISTERS,
    kept_registers,
    share_bytes,
    slice_bytes,
)
from crossfuse.lower.hopper.program.tile import Gather
from crossfuse.lower.hopper.statements import Variable, at, let, registers, run, when
from crossfuse.lower.hopper.wgmma import LeftOperand, gathered_tiles, hold, left_registers
from crossfuse.planner.kernels.memory import ALIGNMENT, BARRIER, Piece

if TYPE_CHECKING:
    from crossfuse.lower.hopper.roles import Body

# All-gather through distributed shared memory, from registers to wgmma.


def _barrier(at: Giver | _GatherPart) -> Any:
    """The barrier that completes when other CTAs' slices of a warpgroup's rows are there."""
    return at.body.memory.barrier("gather_barriers", at.warpgroup)


class _Packing(Ending):
    """Rounds a warpgroup's sums, 16 columns of them after the other, as a left operand of wgmma."""

    def __init__(self, sums: TileSums, width: int) -> None:
        super().__init__(sums)
        self.fragment = Fragment(self.plan, self.where, self.accumulators)
        groups = tuple((first, min(GROUP, width - first)) for first in range(0, width, GROUP))
        self.further = Ahead(self.fragment, groups, self.warmup)

    def ahead(self, values: Mapping[Any, Any]) -> None:
        """Prefetch further operands of the tile that `values` place."""
        self.further.start(*self._first(values))

    def _first(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of this warpgroup's first element."""
        row, column = self.origin(values)
        return row + self.warpgroup * WARPGROUP_ROWS, column


class Giver(_Packing):
    """Sends a warpgroup's part of a slice to the same warpgroup of all CTAs of the cluster.

    Each warp stores its 16 rows in its own CTA's shared memory by stmatrix, and sends them from
    there in pieces of 16 bytes: DSM takes stores faster than bulk copies, see calibration.md::

        before                 push                         after, in every CTA
        CTA 0: h0              CTA 0 -- h0 --> 1, 2, 3
        CTA 1: h1              CTA 1 -- h1 --> 2, 3, 0      h0 | h1 | h2 | h3
        ...
    """

    def __init__(self, sums: TileSums) -> None:
        gather = sums.phase.program.gives
        assert gather is not None
        self.gather = gather
        # A slice has whole steps of the product that reads it, maybe more than the tile makes.
        self.made = min(gather.width, sums.phase.columns)
        super().__init__(sums, self.made)
        self.buffer = self.body.memory.region("gathered")
        self.rank = self.where.places[gather.place.var]

    def origin(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of the first element of the slice that `values` place."""
        contraction = self.plan.program.contraction
        # The expression is written in columns of the product.
        row, column = contraction.result(contraction.left.buffer).origin
        return at(row, values), at(column, values)

    def end(self, values: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
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

    def _aim(self, target: Variable, arrival: Variable, start: Any, step: Any) -> None:
        """Set target and arrival barrier to those of peer number `step`; a neighbour is first."""
        peer = (self.rank + step) % self.gather.place.extent
        peer = let("peer_rank", self.where.rank - self.rank + peer)
        mbarrier.cluster_address(target.value, self.buffer(start), peer)
        mbarrier.cluster_address(arrival.value, _barrier(self), peer)


class _GatherPart(ConsumerPart):
    feature: Gathering

    def begin(self) -> None:
        """Announce the bytes that the cluster will gather; some may have arrived before."""
        gather, where = self.feature.gather, self.body.where
        slices, size = gather.place.extent, slice_bytes(gather)
        with when(where.thread == 0):
            mbarrier.expect(_barrier(self), size * (slices - 1))

    def left(self, number: int) -> LeftOperand | None:
        """Left tiles lie among what is gathered."""
        if number != self.feature.number:
            return None
        depth = self.body.plan.phases[number].program.contraction.depth
        return gathered_tiles(
            self.feature.gather, depth, self.body.memory.region("gathered"), self.warpgroup
        )

    def ending(self, sums: TileSums) -> Ending | None:
        """The phase before sends what it makes."""
        return None if sums.phase.program.gives is None else Giver(sums)

    def tile(self, number: int, places: dict[Any, Any]) -> None:
        """Wait until a warpgroup has its rows of all slices, for wgmma."""
        if number != self.feature.number or self.feature.gather.place.extent == 1:
            return
        mbarrier.wait_cluster(_barrier(self), 0)
        # Peers cannot fence what they store here for wgmma's proxy.
        run(ir.script.ptx.fence.proxy.async_.shared__cta())


@dataclass(frozen=True)
class Gathering(Feature):
    """An intermediate stays in the cluster: each CTA makes a slice, and gathers all of them."""

    asked_by: ClassVar = "takes"
    part: ClassVar = _GatherPart
    #: The phase that multiplies it; the one before makes it.
    number: int
    gather: Gather
    before_tiles: tuple[Piece, ...]

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int], device: Device) -> Gathering:
        """One intermediate stays in the cluster."""
        (number,) = numbers
        gather = phases[number].program.takes
        assert gather is not None
        consumers = phases[number].consumers
        intermediate = Piece("gathered", consumers * share_bytes(gather), ALIGNMENT)
        barriers = Piece("gather_barriers", BARRIER * consumers)
        return cls(number, gather, (intermediate, barriers))

    def initialise(self, body: Body) -> None:
        """Initialise the barriers of all warpgroups."""
        thread = body.where.thread
        with when(thread < body.plan.consumers):
            mbarrier.initialise(body.memory.barrier("gather_barriers", thread), 1)


# An intermediate that stays in registers, as the left operand of the next product.


class Keeper(_Packing):
    """Rounds a warpgroup's sums to the left operand of its next product, in registers.

    ::

        sums of 16 columns in a thread        registers of the operand
        row g      c c+1        c+8 c+9        0           2
        row g + 8  c c+1        c+8 c+9        1           3

    Each thread holds just the elements that wgmma wants of it. `kept` are the registers that hold
    the operand.
    """

    def __init__(self, sums: TileSums, kept: Any) -> None:
        self.kept, self.width = kept, sums.phase.program.store.tile.shape[1]
        super().__init__(sums, self.width)

    def end(self, values: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
        """Round the tile that `values` place."""
        row, column = self._first(values)
        row, column = let("row", row), let("column", column)
        for group in range(self.width // GROUP):
            self.further.advance()
            first = group * GROUP_REGISTERS
            operand = [self.kept[first + each] for each in range(GROUP_REGISTERS)]
            self.fragment.pack(operand, row, column, group * GROUP, self.further.pairs)
        hold(self.kept, kept_registers(self.width))


class _KeptPart(ConsumerPart):
    def __init__(self, feature: KeptLeft, body: Body, warpgroup: Any) -> None:
        super().__init__(feature, body, warpgroup)
        self.kept = registers("kept", feature.held, "uint32")

    def left(self, number: int) -> LeftOperand | None:
        """The registers, if a phase multiplies what they hold."""
        phase = self.body.plan.phases[number]
        if not phase.program.reuses:
            return None
        return left_registers(self.kept, phase.kept, phase.program.contraction.depth)

    def ending(self, sums: TileSums) -> Ending | None:
        """The phase before rounds its sums."""
        return Keeper(sums, self.kept) if sums.phase.program.keeps else None


@dataclass(frozen=True)
class KeptLeft(Feature):
    """A phase multiplies what the one before has left in registers."""

    asked_by: ClassVar = "reuses"
    part: ClassVar = _KeptPart
    #: Registers of a thread that hold it.
    held: int

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int], device: Device) -> KeptLeft:
        """All phases have the same registers."""
        return cls(max(phases[each].kept for each in numbers))
