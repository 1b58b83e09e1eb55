"""From accumulators to the output: the epilogue's expression in registers, then the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.elements import Elements
from crossfuse.lower.hopper.flags import FlagWriter
from crossfuse.lower.hopper.phase import WARPGROUP_ROWS, PhasePlan
from crossfuse.lower.hopper.plan import WARPGROUP
from crossfuse.lower.hopper.statements import let, registers, run, when
from crossfuse.lower.hopper.warmup import Warmup

_TMA_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


class Epilogue:
    """The epilogue of one multiplying warpgroup.

    Parameters
    ----------
    plan : PhasePlan
        The phase.
    where : Coordinates
        Of this thread.
    warpgroup : Any
        Index of the multiplying warpgroup.
    accumulators : Any
        Its registers.
    boxes : Any
        Function from a byte offset to an address among the boxes in shared memory.
    descriptor : Any
        Tensor map of the output; None without boxes.
    warmup : Warmup
        In which nothing is stored.
    """

    def __init__(
        self,
        plan: PhasePlan,
        where: Coordinates,
        warpgroup: Any,
        accumulators: Any,
        boxes: Any,
        descriptor: Any,
        warmup: Warmup,
    ) -> None:
        self.plan = plan
        self.where = where
        self.warpgroup = warpgroup
        self.accumulators = accumulators
        self.boxes = boxes
        self.descriptor = descriptor
        self.warmup = warmup
        self.elements = Elements(plan)

    def store(
        self,
        values: Mapping[Any, Any],
        writer: FlagWriter | None = None,
    ) -> None:
        """Store the tile at the place that `values` tell.

        Parameters
        ----------
        values : Mapping
            Values of the variables of the tile's origin.
        writer : FlagWriter | None
            Tells others once it is stored.
        """
        row, column = (at(each, dict(values)) for each in self.plan.program.store.tile.origin)
        part = self.elements.begin(values)
        first = let("first_row", row)
        row = let("row", row + self.warpgroup * WARPGROUP_ROWS)
        column = let("column", column)
        if self.plan.store.map is None:
            self._store_elements(row, column)
        else:
            self._store_boxes(row, column)
        if writer is not None:
            self._publish(writer, first, column, part)

    def _publish(self, writer: FlagWriter, row: Any, column: Any, part: Any) -> None:
        """Raise the flag of the tile when all of this warpgroup's part has been written."""
        if self.plan.store.map is None:
            # What each thread stored is to be read by TMA.
            run(ir.script.ptx.fence.proxy.async_())
            self._meet()
        with self.warmup.skipped(), when(self.where.thread == 0):
            if self.plan.store.map is not None:
                run(ir.script.ptx.cp.async_.bulk.wait_group(0))
            writer.raise_flag(row, column, part)

    def finish(self) -> None:
        """Wait until all boxes have left shared memory."""
        if self.plan.store.map is not None:
            with when(self.where.thread == 0):
                run(ir.script.ptx.cp.async_.bulk.wait_group.read(0))

    def _place(self, row: Any, column: Any, index: int) -> tuple[Any, Any]:
        """Where an accumulator belongs.

        Accumulator ``4 j + 2 h + q`` of a thread is element (warp * 16 + lane / 4 + 8 h,
        8 j + 2 (lane % 4) + q) of the tile. PTX ISA, wgmma, register fragments for D.
        """
        block, half, pair = index // 4, index // 2 % 2, index % 2
        i = row + (self.where.warp * 16 + self.where.lane // 4 + 8 * half)
        return i, column + (block * 8 + self.where.lane % 4 * 2 + pair)

    def _sums(self, index: int) -> tuple[Any, ...]:
        """An accumulator of each product."""
        count = self.plan.accumulators
        return tuple(
            self.accumulators[number * count + index] for number in range(len(self.plan.rights))
        )

    def _store_elements(self, row: Any, column: Any) -> None:
        for index in range(0, self.plan.accumulators, 2):
            i, j = self._place(row, column, index)
            low, high = self._sums(index), self._sums(index + 1)
            self.elements.store_pair(i, j, low, high, self.warmup)

    def _store_boxes(self, row: Any, column: Any) -> None:
        """Boxes of 64 rows: registers, swizzled shared memory, TMA."""
        store = self.plan.store
        boxes = self.plan.columns // store.box_columns
        # With room for all of them they go at once; else one is filled while another is copied.
        together = boxes if store.slots >= boxes else 1
        for first in range(0, boxes, together):
            # An odd number of boxes ends with the slot that the next tile begins with.
            again = first == 0 and (together > 1 or boxes % store.slots)
            with when(self.where.thread == 0):
                run(ir.script.ptx.cp.async_.bulk.wait_group.read(0 if again else store.slots - 1))
            self._meet()
            for number in range(first, first + together):
                self._fill_box(number, row, column)
            run(ir.script.ptx.fence.proxy.async_.shared__cta())
            self._meet()
            with self.warmup.skipped(), when(self.where.thread == 0):
                for number in range(first, first + together):
                    self._copy_box(number, row, column)
                run(ir.script.ptx.cp.async_.bulk.commit_group())

    def _slot(self, number: int) -> Any:
        """Offset of a box's place among those of this warpgroup."""
        store = self.plan.store
        size = WARPGROUP_ROWS * store.box_columns * 2
        return (self.warpgroup * store.slots + number % store.slots) * size

    def _fill_box(self, number: int, row: Any, column: Any) -> None:
        packed = registers("packed", 4, "uint32")
        base = let("box", self._slot(number))
        for group in range(self.plan.store.box_columns // 16):
            self._pack(packed, row, column, number * self.plan.store.box_columns + group * 16)
            self._scatter(packed, base, group)

    def _copy_box(self, number: int, row: Any, column: Any) -> None:
        call = ir.script.ptx[_TMA_STORE]
        address = ir.script.address_of(self.descriptor)
        column = column + number * self.plan.store.box_columns
        run(call(address, column, row, self.boxes(self._slot(number))))

    def _pack(self, packed: Any, row: Any, column: Any, first: int) -> None:
        """Sixteen columns in the order of stmatrix: two blocks of 8, each with both halves."""
        for register in range(4):
            index = first // 2 + register * 2
            i, j = self._place(row, column, index)
            self.elements.pack(packed[register], i, j, self._sums(index), self._sums(index + 1))

    def _scatter(self, packed: Any, base: Any, group: int) -> None:
        """Store four 8 x 8 matrices; rows are swizzled as the tensor map says."""
        pitch = self.plan.store.box_columns * 2
        lane, warp = self.where.lane, self.where.warp
        row = warp * 16 + lane % 16
        chunk = group * 2 + lane // 16
        pattern = row * pitch // WARPGROUP % (pitch // 16)
        run(
            ir.script.ptx.stmatrix.sync.aligned.m8n8.x4.shared.b16(
                self.boxes(base + row * pitch + (chunk ^ pattern) * 16),
                *[packed[register] for register in range(4)],
            )
        )

    def _meet(self) -> None:
        """The threads of this warpgroup meet; barrier 0 is that of the whole CTA."""
        barrier = ir.script.Cast("uint32", 1 + self.warpgroup)
        run(ir.script.ptx.bar.sync(barrier, ir.script.uint32(WARPGROUP)))
