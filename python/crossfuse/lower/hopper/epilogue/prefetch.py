"""What an epilogue reads besides sums: loaded ahead of its use, a fragment in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates
from crossfuse.lower.hopper.epilogue.elements import Elements
from crossfuse.lower.hopper.epilogue.operands import READ_TYPES, Further, Pair, Read, read_all
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.rows.plan import registers_beside
from crossfuse.lower.hopper.statements import let
from crossfuse.lower.hopper.warmup import Warmup
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS

# The registers that wgmma leaves a tile in, seen from one thread.


class Fragment:
    """A warpgroup's accumulators as elements of a tile.

    The indices of each block of 64 rows follow those of the block above.

    Parameters
    ----------
    plan : PhasePlan
        The phase.
    where : Coordinates
        Of this thread.
    accumulators : Any
        Registers, those of each product after those of the one before.
    """

    def __init__(self, plan: PhasePlan, where: Coordinates, accumulators: Any) -> None:
        self.plan = plan
        self.where = where
        self.accumulators = accumulators
        self.elements = Elements(plan)

    def place(self, row: Any, column: Any, index: int) -> tuple[Any, Any]:
        """Where an accumulator belongs, in a tile of this warpgroup that begins at row and column.

        Accumulator ``4 j + 2 h + q`` of a thread is element (warp * 16 + lane / 4 + 8 h,
        8 j + 2 (lane % 4) + q) of the block. PTX ISA, wgmma, register fragments for D.
        """
        below, index = divmod(index, self.plan.accumulators)
        block, half, pair = index // 4, index // 2 % 2, index % 2
        down = WARPGROUP_ROWS * below + 8 * half
        i = row + (self.where.warp * 16 + self.where.lane // 4 + down)
        return i, column + (block * 8 + self.where.lane % 4 * 2 + pair)

    def sums(self, index: int) -> tuple[Any, ...]:
        """An accumulator of each product."""
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
        """Blocks of 8 columns in the order of stmatrix: both halves of the rows of each.

        The columns of a block of rows follow those of the one above it.
        `read` tells of an accumulator what it and the next one read besides their sums.
        """
        for number, register in enumerate(matrices):
            index = first // 2 + number * 2
            i, j = self.place(row, column, index)
            low, high = self.sums(index), self.sums(index + 1)
            self.elements.pack(register, i, j, low, high, read(index))


# Further operands of a fragment's epilogue, read before they are needed.
#
# A load takes as long as a round trip to L2, and between two boxes of a tile all warps meet. So
# rows and numbers are read before the tile is multiplied, and matrices one group of columns ahead
# of the one that is stored, in the registers of sums that have been; all where there are registers
# for them.

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
    """What a warpgroup's part of a tile reads besides its sums.

    Parameters
    ----------
    fragment : Fragment
        The accumulators.
    groups : tuple
        First column and number of columns of what is stored together, in order.
    warmup : Warmup
        In which nothing is read.
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
            read_all([each for group in self.groups for each in self._rows(*group)], self.warmup)
        if self._leads:
            self.advance()

    def advance(self) -> None:
        """Read what a group needs besides, if there is one left; called before each is stored."""
        if self.elements.further and self._next < len(self.groups):
            group = self.groups[self._next]
            read_all([*self._rows(*group), *self._matrices(*group)], self.warmup)
            self._next += 1

    def pairs(self, index: int) -> tuple[Pair, ...]:
        """What accumulators `index` and the one after it read."""
        return tuple(
            self._pairs[self._key(number, each, index)]
            for number, each in enumerate(self.elements.further)
        )

    def _room(self) -> int:
        """Registers that are free while the sums of a whole tile are held."""
        plan = self.fragment.plan
        held = registers_beside(plan.program.rows)[plan.consumers][1] or _MOST_REGISTERS
        return held - plan.sums - _OTHERS

    def _row_registers(self) -> int:
        """Registers for the rows of a whole tile."""
        rows = [each for each in self.elements.further if each.by_column and not each.by_row]
        return self.fragment.plan.columns // 8 * sum(each.registers for each in rows)

    def _rows(self, first: int, columns: int) -> list[Read]:
        """What some columns need of rows and numbers, if it is not there yet."""
        return self._needed(first, columns, matrices=False)

    def _matrices(self, first: int, columns: int) -> list[Read]:
        return self._needed(first, columns, matrices=True)

    def _needed(self, first: int, columns: int, matrices: bool) -> list[Read]:
        needed: list[Read] = []
        for index in range(first // 2, (first + columns) // 2, 2):
            for number, each in enumerate(self.elements.further):
                key = self._key(number, each, index)
                if key not in self._pairs and (each.by_row and each.by_column) == matrices:
                    self._pairs[key] = Pair(each)
                    needed.append(self._read(number, self._pairs[key], index))
        return needed

    def _read(self, number: int, pair: Pair, index: int) -> Read:
        """What accumulators `index` and the one after it need of an operand."""
        i, j = self.fragment.place(self.row, self.column, index)
        read = self.elements.read(pair, i, j)
        if not pair.further.beside:
            return read
        base = self._base(number, pair.further, index)
        size = READ_TYPES[pair.further.dtype] // 8
        first = index % self.fragment.plan.accumulators // 4 * 8
        return replace(read, address=lambda load: base + ir.script.uint64((first + load) * size))

    def _base(self, number: int, further: Further, index: int) -> Any:
        """Address of what this thread's first column of a row needs.

        Others are counted from it: an address each would need more registers than the elements.
        """
        below, half = self._rows_of(index) if further.by_row else (0, 0)
        if (number, below, half) not in self._bases:
            store = self.elements.plan.program.store
            first = below * self.fragment.plan.accumulators + 2 * half
            place = further.address(store, *self.fragment.place(self.row, self.column, first))
            address = ir.cuda_func_call(
                "crossfuse_hide_address", place, source_code=_HIDE, return_type="uint64"
            )
            self._bases[number, below, half] = let("base", address)
        return self._bases[number, below, half]

    def _key(self, number: int, further: Further, index: int) -> _Key:
        """An operand, and which of its pairs an accumulator needs: of which columns and rows."""
        columns = index % self.fragment.plan.accumulators // 4
        rows = self._rows_of(index) if further.by_row else (0, 0)
        return number, columns if further.by_column else 0, *rows

    def _rows_of(self, index: int) -> tuple[int, int]:
        """Block of 64 rows of an accumulator, and half of the rows of its warp there."""
        return index // self.fragment.plan.accumulators, index // 2 % 2
