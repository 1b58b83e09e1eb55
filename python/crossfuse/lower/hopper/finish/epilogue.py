"""From accumulators to the output: the epilogue's expression in registers, then the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.finish.ahead import Ahead
from crossfuse.lower.hopper.finish.box_place import BoxPlace
from crossfuse.lower.hopper.finish.fragment import Fragment
from crossfuse.lower.hopper.multiply.matrices import scatter
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.plan.store import StoreBox
from crossfuse.lower.hopper.statements import let, registers, run, when
from crossfuse.lower.hopper.sync import mbarrier
from crossfuse.lower.hopper.sync.flags import FlagWriter
from crossfuse.lower.hopper.tma import store_name
from crossfuse.lower.hopper.warmup import Warmup
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

#: Columns of which further operands are read at once, where no box tells.
_GROUP = 32


def publish_elements(
    writer: FlagWriter, where: Coordinates, warpgroup: Any, place: tuple[Any, ...], warmup: Warmup
) -> None:
    """Raise the flag of the tile that starts at `place`, when a warpgroup's stores are done."""
    mbarrier.meet_warpgroup(warpgroup)
    with warmup.skipped(), when(where.thread == 0):
        writer.raise_flag(*place)


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
    boxes : BoxPlace | None
        Where this warpgroup's boxes are in shared memory; None without boxes.
    descriptors : Mapping
        Tensor maps by name.
    warmup : Warmup
        In which nothing is stored.
    note : Callable
        Notes an event, see `timeline`.
    """

    def __init__(
        self,
        plan: PhasePlan,
        where: Coordinates,
        warpgroup: Any,
        accumulators: Any,
        boxes: BoxPlace | None,
        descriptors: Mapping[str, Any],
        warmup: Warmup,
        note: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.where = where
        self.warpgroup = warpgroup
        self.note = note
        self.boxes = boxes
        self.descriptors = descriptors
        self.warmup = warmup
        self.fragment = Fragment(plan, where, accumulators)
        self.elements = self.fragment.elements
        self.further = Ahead(self.fragment, self._groups(), warmup)

    def _groups(self) -> tuple[tuple[int, int], ...]:
        """First column and number of columns of what is stored together.

        The columns of a block of rows follow those of the one above it, as accumulators do.
        """
        if self.plan.store.boxes:
            return tuple(
                (self._first(each) + first, min(self._span, each.columns - first))
                for each in self.plan.store.boxes
                for first in range(0, each.columns, self._span)
            )
        width = self.plan.columns
        span = _GROUP // self.plan.blocks
        return tuple(
            (block * width + first, min(span, width - first))
            for block in range(self.plan.blocks)
            for first in range(0, width, span)
        )

    @property
    def _span(self) -> int:
        """Columns of a box of which further operands are read at once.

        Those of a whole box, unless the sums of several blocks of rows leave little room.
        """
        return _GROUP if self.plan.blocks > 1 else ROW_BYTES // 2

    def _first(self, box: StoreBox) -> int:
        return box.block * self.plan.columns + box.first

    def ahead(self, values: Mapping[Any, Any]) -> None:
        """Read what is needed besides the sums of the tile at the place that `values` tell."""
        if not self._late:
            self._start(values)

    @property
    def _late(self) -> bool:
        """Whether this kernel makes what is read: it is there when left tiles are, not before."""
        rows = self.plan.program.rows
        sources = [each.load.source for each in self.elements.further]
        return rows is not None and any(o.same_as(e) for o in rows.beside for e in sources)

    def _start(self, values: Mapping[Any, Any]) -> None:
        row, column = self._origin(values)
        self.further.start(row + self.warpgroup * self.plan.warpgroups.share, column)

    def _origin(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        row, column = (at(each, dict(values)) for each in self.plan.program.store.tile.origin)
        return row, column

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
        if self._late:
            self._start(values)
        row, column = self._origin(values)
        part = self.elements.begin(values)
        first = let("first_row", row)
        row = let("row", row + self.warpgroup * self.plan.warpgroups.share)
        column = let("column", column)
        if self.boxes is not None:
            self._store_boxes(row, column, self.boxes)
            self.note("in boxes")
        else:
            self._store_elements(row, column)
        if writer is not None:
            self._publish(writer, first, column, part)

    def _publish(self, writer: FlagWriter, row: Any, column: Any, part: Any) -> None:
        """Raise the flag of the tile when all of this warpgroup's part has been written."""
        if not self.plan.store.boxes:
            if part is None:
                # What each thread stored is to be read by TMA; partial sums are not.
                run(ir.script.ptx.fence.proxy.async_.global_())
            place = (row, column) if part is None else (row, column, part)
            publish_elements(writer, self.where, self.warpgroup, place, self.warmup)
            return
        with self.warmup.skipped(), when(self.where.thread == 0):
            run(ir.script.ptx.cp.async_.bulk.wait_group(0))
            self.note("written")
            writer.raise_flag(row, column, part)

    def finish(self) -> None:
        """Wait until all boxes have left shared memory."""
        if self.plan.store.boxes:
            with when(self.where.thread == 0):
                run(ir.script.ptx.cp.async_.bulk.wait_group.read(0))

    def _store_elements(self, row: Any, column: Any) -> None:
        for first, columns in self._groups():
            self.further.advance()
            for index in range(first // 2, (first + columns) // 2, 2):
                i, j = self.fragment.place(row, column, index)
                low, high = self.fragment.sums(index), self.fragment.sums(index + 1)
                pairs = self.further.pairs(index)
                self.elements.store_pair(i, j, low, high, self.warmup, pairs)

    def _store_boxes(self, row: Any, column: Any, place: BoxPlace) -> None:
        """Boxes of 64 rows: registers, swizzled shared memory, TMA."""
        for number, batch in enumerate(self.plan.store.batches):
            place.open(number, self.where.thread)
            for box in batch:
                self._fill_box(box, row, column, place)
            run(ir.script.ptx.fence.proxy.async_.shared__cta())
            mbarrier.meet_warpgroup(self.warpgroup)
            with self.warmup.skipped(), when(self.where.thread == 0):
                for box in batch:
                    self._copy_box(box, row, column, place)
                run(ir.script.ptx.cp.async_.bulk.commit_group())

    def _fill_box(self, box: StoreBox, row: Any, column: Any, place: BoxPlace) -> None:
        # Sixteen columns are four matrices of 8 x 8 for each warp, the narrowest box's eight two.
        columns = min(16, box.columns)
        packed = registers("packed", columns // 4, "uint32")
        for first in range(0, box.columns, columns):
            if first % self._span == 0:
                self.further.advance()
            matrices = [packed[register] for register in range(columns // 4)]
            start = self._first(box) + first
            self.fragment.pack(matrices, row, column, start, self.further.pairs)
            with place.filling(self.warmup):
                self._scatter(matrices, box, first, place)

    def _copy_box(self, box: StoreBox, row: Any, column: Any, place: BoxPlace) -> None:
        call = ir.script.ptx[store_name(2)]
        address = ir.script.address_of(self.descriptors[box.map.name])
        below = row + box.block * WARPGROUP_ROWS
        run(call(address, column + box.first, below, place.address(box.offset)))

    def _scatter(self, matrices: list[Any], box: StoreBox, first: int, place: BoxPlace) -> None:
        """Store 8 x 8 matrices from a column of a box on."""

        def address(inside: Any) -> Any:
            return place.address(box.offset, inside)

        scatter(self.where, matrices, box.pitch, first, address)
