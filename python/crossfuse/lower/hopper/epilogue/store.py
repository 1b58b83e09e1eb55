"""From accumulators to the output: the epilogue's expression in registers, then the store.

What the expression reads besides is prefetched while tiles are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, WARPGROUP_ROWS
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.epilogue.elements import (
    READ_TYPES,
    Elements,
    Further,
    Pair,
    Read,
    read_all,
    scatter,
)
from crossfuse.lower.hopper.features.feature import Ending, TileSums
from crossfuse.lower.hopper.flags import PlacedFlags
from crossfuse.lower.hopper.pipeline import Cursor, Release, store_name
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.plan.tiles import StoreBox, StorePlan
from crossfuse.lower.hopper.statements import Coordinates, Warmup, let, registers, run, when

# Further operands of an epilogue, prefetched into registers for the fragments of a tile.


class Fragment:
    """A warpgroup's accumulators as elements of a tile, seen from one thread.

    Indices of each block of 64 rows follow those of the block above, and stand for one sum of each
    product: `PhasePlan.first_sum` gives the registers.
    """

    def __init__(self, plan: PhasePlan, where: Coordinates, accumulators: Any) -> None:
        self.plan = plan
        self.where = where
        self.accumulators = accumulators
        self.elements = Elements(plan.program, plan.tails)

    def place(self, row: Any, column: Any, index: int) -> tuple[Any, Any]:
        """Row and column of an accumulator, in a warpgroup's tile that begins at `row`, `column`.

        Accumulator ``4 j + 2 h + q`` of a thread is element (warp * 16 + lane / 4 + 8 h, 8 j + 2
        (lane % 4) + q) of the block. PTX ISA, wgmma, register fragments for D.
        """
        below, index = divmod(index, self.plan.accumulators)
        block, half, pair = index // 4, index // 2 % 2, index % 2
        down = WARPGROUP_ROWS * below + 8 * half
        i = row + (self.where.warp * 16 + self.where.lane // 4 + down)
        return i, column + (block * 8 + self.where.lane % 4 * 2 + pair)

    def sums(self, index: int) -> tuple[Any, ...]:
        """The sum of each product at an accumulator's index."""
        below, index = divmod(index, self.plan.accumulators)
        return tuple(
            self.accumulators[self.plan.first_sum(below, number) + index]
            for number in range(len(self.plan.rights))
        )

    def pack(
        self,
        matrices: list[Any],
        row: Any,
        column: Any,
        first: int,
        read: Callable[[int], Sequence[Pair]],
    ) -> None:
        """Pack blocks of 8 columns in the order of stmatrix: both halves of the rows of each.

        The columns of a block of rows follow those of the one above it. `read` gives the further
        operands of an accumulator and the next one.
        """
        for number, register in enumerate(matrices):
            index = first // 2 + number * 2
            i, j = self.place(row, column, index)
            low, high = self.sums(index), self.sums(index + 1)
            self.elements.pack(register, i, j, low, high, read(index))


# Further operands of a fragment's epilogue are read before they are needed: a load takes as long as
# a round trip to L2, and between two boxes of a tile all warps meet. So rows and numbers are read
# before the tile is multiplied, and matrices one group of columns before the one that is stored, in
# registers of sums that have been stored; all where there are registers for them.

#: Registers that a thread can have.
_MOST_REGISTERS = 255
#: Those that addresses, one group of a matrix and the epilogue's expression need.
_OTHERS = 64

#: Number of an operand; eight columns, block of 64 rows, and half of them, if it depends on these.
_Key = tuple[int, int, int, int]

#: An address that the compiler does not take apart again.
_HIDE = """\
__device__ __forceinline__ unsigned long long crossfuse_hide_address(const void* place) {
  unsigned long long address = (unsigned long long)place;
  asm volatile("" : "+l"(address));
  return address;
}
"""


class Ahead:
    """Prefetches the further operands of a warpgroup's part of a tile.

    `groups` are first column and number of columns of what is stored together, in order.
    """

    def __init__(
        self, fragment: Fragment, groups: tuple[tuple[int, int], ...], warmup: Warmup
    ) -> None:
        self.fragment = fragment
        self.elements = fragment.elements
        self.groups = groups
        self.warmup = warmup
        room = self._room()
        self._rows_first = self._row_registers() <= room
        self._leads = room > 0
        self._bases: dict[tuple[int, int, int], Any] = {}
        self._pairs: dict[_Key, Pair] = {}
        self._next = 0

    def start(self, row: Any, column: Any) -> None:
        """Read rows and numbers, and the first group's part of matrices.

        `row` and `column` are those of this warpgroup's first element.
        """
        if not self.elements.further:
            return
        self._pairs.clear()
        self._bases.clear()
        self._next = 0
        self.row, self.column = let("row_ahead", row), let("column_ahead", column)
        if self._rows_first:
            rows = (self._needed(*group, matrices=False) for group in self.groups)
            read_all([each for group in rows for each in group], self.warmup)
        if self._leads:
            self.advance()

    def advance(self) -> None:
        """Read the operands of the next group, if there is one; called before each is stored."""
        if self.elements.further and self._next < len(self.groups):
            group = self.groups[self._next]
            rows, matrices = (self._needed(*group, matrices=each) for each in (False, True))
            read_all([*rows, *matrices], self.warmup)
            self._next += 1

    def pairs(self, index: int) -> tuple[Pair, ...]:
        """Operands of accumulators `index` and the one after it."""
        return tuple(
            self._pairs[self._key(number, each, index)]
            for number, each in enumerate(self.elements.further)
        )

    def _room(self) -> int:
        """Registers that are free while a thread holds the sums of a whole tile."""
        plan = self.fragment.plan
        return (plan.registers[1] or _MOST_REGISTERS) - plan.sums - _OTHERS

    def _row_registers(self) -> int:
        """Registers that the rows of a whole tile take."""
        rows = [each for each in self.elements.further if each.by_column and not each.by_row]
        return self.fragment.plan.columns // 8 * sum(each.registers for each in rows)

    def _needed(self, first: int, columns: int, *, matrices: bool) -> list[Read]:
        """Reads of rows and numbers, or of `matrices`, that are not there yet for some columns."""
        needed: list[Read] = []
        for index in range(first // 2, (first + columns) // 2, 2):
            for number, each in enumerate(self.elements.further):
                key = self._key(number, each, index)
                if key not in self._pairs and (each.by_row and each.by_column) == matrices:
                    self._pairs[key] = Pair(each)
                    needed.append(self._read(number, self._pairs[key], index))
        return needed

    def _read(self, number: int, pair: Pair, index: int) -> Read:
        """The read of one operand for accumulators `index` and the one after it."""
        i, j = self.fragment.place(self.row, self.column, index)
        read = self.elements.read(pair, i, j)
        if not pair.further.beside:
            return read
        base = self._base(number, pair.further, index)
        size = READ_TYPES[pair.further.dtype] // 8
        first = index % self.fragment.plan.accumulators // 4 * 8
        return replace(read, address=lambda load: base + ir.script.uint64((first + load) * size))

    def _base(self, number: int, further: Further, index: int) -> Any:
        """Address of this thread's first column in a row of an operand.

        Others are counted from it: an address each would need more registers than the elements.
        """
        below, half = self._rows_of(index) if further.by_row else (0, 0)
        if (number, below, half) not in self._bases:
            store = self.elements.program.store
            first = below * self.fragment.plan.accumulators + 2 * half
            place = further.address(store, *self.fragment.place(self.row, self.column, first))
            address = ir.cuda_func_call(
                "crossfuse_hide_address", place, source_code=_HIDE, return_type="uint64"
            )
            self._bases[number, below, half] = let("base", address)
        return self._bases[number, below, half]

    def _key(self, number: int, further: Further, index: int) -> _Key:
        """Which pair of an operand an accumulator needs: of which columns and rows."""
        columns = index % self.fragment.plan.accumulators // 4
        rows = self._rows_of(index) if further.by_row else (0, 0)
        return number, columns if further.by_column else 0, *rows

    def _rows_of(self, index: int) -> tuple[int, int]:
        """Block of 64 rows of an accumulator, and half of the rows of its warp there."""
        return index // self.fragment.plan.accumulators, index // 2 % 2


@dataclass
class BoxPlace:
    """Where a warpgroup's boxes lie in shared memory until TMA has copied them.

    A place that holds nothing else: the warm-up may fill it too, and nobody waits for it.
    """

    store: StorePlan
    #: From a byte offset to an address.
    region: Callable[[Any], Any]
    #: Bytes from the boxes of a warpgroup to those of the next.
    pitch: int
    #: Index of the multiplying warpgroup.
    warpgroup: Any

    def open(self, batch: int, thread: Any) -> None:
        """Wait until boxes of a batch may be filled; all threads of the warpgroup call it."""
        mbarrier.await_copies(thread, self.store.pending(batch))
        mbarrier.meet_warpgroup(self.warpgroup)

    def filling(self, warmup: Warmup) -> AbstractContextManager[Any]:
        """Context for statements that write boxes."""
        return nullcontext()

    def address(self, offset: int, inside: Any = 0) -> Any:
        """Address of byte `inside` of the box at an offset, see `StoreBox`."""
        return self.region(self.warpgroup * self.pitch + (offset + inside))

    def close(self, thread: Any, warmup: Warmup) -> None:
        """Release the place once all boxes have left, if somebody waits for that."""


@dataclass
class PlaceInStages(BoxPlace):
    """A warpgroup's rows of the left stages that it multiplied last.

    It multiplies all of its rows before it writes the first box, and no other warpgroup reads them.
    Stages that hold boxes are released when these have left: the loader of the next left tiles
    waits, which it does in a persistent kernel for flags anyway. In the warm-up tiles are in flight
    there. The pitch is that of the ring.
    """

    #: Of the warpgroup, behind the stage that it multiplied last.
    cursor: Cursor
    #: Emits how stages are released.
    release: Callable[[], Release]
    _starts: list[Any] = field(default_factory=list)

    def open(self, batch: int, thread: Any) -> None:
        """Wait until the warpgroup has multiplied its rows; pages begin with the last stage.

        Each batch has a place of its own, and the stages are those of this tile.
        """
        if batch > 0:
            return
        mbarrier.meet_warpgroup(self.warpgroup)
        share = self.warpgroup * self.store.page
        self._starts = [
            let("page", self.cursor.before(number + 1) * self.pitch + share)
            for number in range(self.store.pages)
        ]

    def filling(self, warmup: Warmup) -> AbstractContextManager[Any]:
        """Skips the warm-up, when tiles are in flight there."""
        context: AbstractContextManager[Any] = warmup.skipped()
        return context

    def address(self, offset: int, inside: Any = 0) -> Any:
        """Address in the page that holds the whole box: none lies in two."""
        page, rest = divmod(offset, self.store.page)
        return self.region(self._starts[page] + (rest + inside))

    def close(self, thread: Any, warmup: Warmup) -> None:
        """Release all stages with boxes once these have left."""
        with warmup.skipped():
            mbarrier.await_copies(thread)
            mbarrier.meet_warpgroup(self.warpgroup)
            release = self.release()
            for number in reversed(range(self.store.pages)):
                release(self.cursor.before(number + 1))


#: Columns of which further operands are read at once, where there are no boxes.
_GROUP = 32


def publish_elements(
    writer: PlacedFlags, where: Coordinates, warpgroup: Any, place: tuple[Any, ...], warmup: Warmup
) -> None:
    """Raise the flag of the tile that starts at `place`, once a warpgroup's stores are done."""
    mbarrier.meet_warpgroup(warpgroup)
    with warmup.skipped(), when(where.thread == 0):
        writer.raise_flag(*place)


class Epilogue(Ending):
    """The epilogue of one multiplying warpgroup, by boxes of TMA or element by element."""

    def __init__(self, sums: TileSums) -> None:
        super().__init__(sums)
        self.boxes, self.writer = sums.boxes, sums.writer
        self.fragment = Fragment(self.plan, self.where, self.accumulators)
        self.elements = self.fragment.elements
        self.further = Ahead(self.fragment, self._groups(), self.warmup)

    def _groups(self) -> tuple[tuple[int, int], ...]:
        """First column and number of columns of each group that is stored together.

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
        """Prefetch further operands of the tile that `values` place."""
        if not self._late:
            self._start(values)

    @property
    def _late(self) -> bool:
        """Whether this kernel makes the further operands: they are there when left tiles are."""
        rows = self.plan.program.rows
        sources = [each.load.source for each in self.elements.further]
        return rows is not None and any(ir.among(each, rows.beside) for each in sources)

    def _start(self, values: Mapping[Any, Any]) -> None:
        row, column = self.origin(values)
        self.further.start(row + self.warpgroup * self.plan.share, column)

    def end(self, values: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
        """Store the tile that `values` place, and raise its flag."""
        self.leave(leave)
        if self._late:
            self._start(values)
        row, column = self.origin(values)
        part = self.elements.begin(values)
        first = let("first_row", row)
        row = let("row", row + self.warpgroup * self.plan.share)
        column = let("column", column)
        if self.boxes is not None:
            self._store_boxes(row, column, self.boxes)
            self.note("in boxes")
        else:
            self._store_elements(row, column)
        if self.writer is not None:
            self._publish(self.writer, first, column, part)
        if self.boxes is not None and leave is None:
            self.boxes.close(self.where.thread, self.warmup)

    def _publish(self, writer: PlacedFlags, row: Any, column: Any, part: Any) -> None:
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
            mbarrier.await_copies(self.where.thread)

    def _store_elements(self, row: Any, column: Any) -> None:
        for first, columns in self._groups():
            self.further.advance()
            for index in range(first // 2, (first + columns) // 2, 2):
                i, j = self.fragment.place(row, column, index)
                low, high = self.fragment.sums(index), self.fragment.sums(index + 1)
                pairs = self.further.pairs(index)
                self.elements.store_pair(i, j, low, high, self.warmup, pairs)

    def _store_boxes(self, row: Any, column: Any, place: BoxPlace) -> None:
        """Store boxes of 64 rows: registers, then swizzled shared memory, then TMA."""
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
        address = ir.script.address_of(self.body.maps[box.map.name])
        below = row + box.block * WARPGROUP_ROWS
        run(call(address, column + box.first, below, place.address(box.offset)))

    def _scatter(self, matrices: list[Any], box: StoreBox, first: int, place: BoxPlace) -> None:
        """Store 8 x 8 matrices into a box from column `first` on."""

        def address(inside: Any) -> Any:
            return place.address(box.offset, inside)

        scatter(self.where, matrices, box.pitch, first, address)
