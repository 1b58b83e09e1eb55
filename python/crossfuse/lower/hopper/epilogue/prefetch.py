"""Further operands of an epilogue, prefetched into registers for the fragments of a tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.epilogue.elements import (
    READ_TYPES,
    Elements,
    Further,
    Pair,
    Read,
    read_all,
)
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import Coordinates, Warmup, let
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS


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
