"""Tiles multiplied by a warpgroup, asynchronously (PTX ISA, wgmma)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.multiply.hold import clear, forget, hold
from crossfuse.lower.hopper.multiply.instruction import (
    K_BYTES,
    OPERAND_TYPES,
    multiply,
    swizzled,
    words,
)
from crossfuse.lower.hopper.multiply.left_tiles import LeftOperand
from crossfuse.lower.hopper.multiply.scale import scale
from crossfuse.lower.hopper.plan.memory import RingPlan
from crossfuse.lower.hopper.plan.operand import Operand
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import Variable, run


class Multiplier:
    """One warpgroup's products: its blocks of 64 rows of the left tile by all of each right one.

    Parameters
    ----------
    plan : PhasePlan
        The phase.
    left : LeftOperand
        Where this warpgroup's left tiles are.
    ring : RingPlan
        Of right tiles.
    region : Callable
        Function from a byte offset to an address in that ring.
    accumulators : Any
        Registers of all phases; this one uses the first.
    """

    def __init__(
        self,
        plan: PhasePlan,
        left: LeftOperand,
        ring: RingPlan,
        region: Callable[[Any], Any],
        accumulators: Any,
    ) -> None:
        self.plan = plan
        self.left = left
        self.ring = ring
        self.accumulators = accumulators
        self._left = left.open()
        self._rights = []
        start = 0
        for operand in plan.rights:
            self._rights.append(_descriptor(region(start), operand))
            start += operand.size
        self._k = OPERAND_TYPES[plan.program.contraction.left.dtype][1]

    def start(self, left: Any, right: Any, first: Any) -> None:
        """Multiply a left tile and a stage; `first` clears what was accumulated before."""
        self.hold()
        run(ir.script.ptx.wgmma.fence.sync.aligned())
        offset = right * self.ring.pitch
        count = len(self._rights)
        together = count if self.plan.is_one_product else 1
        for part in range(self.plan.program.contraction.depth // self._k):
            keep = ir.script.Cast("uint32", ir.script.Not(first)) if part == 0 else 1
            for block, number in product(range(self.plan.blocks), range(0, count, together)):
                operands = self._left(left, part, block), self._right(number, offset, part)
                which = (block, number)
                self._multiply(which, together, *operands, ir.script.Cast("uint32", keep))
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())

    def _right(self, number: int, offset: Any, part: int) -> Any:
        """The descriptor of a right tile, `offset` bytes behind that of the first stage."""
        step = _step(self.plan.rights[number])
        return self._rights[number].value + words(offset + part * step)

    def _multiply(
        self, which: tuple[int, int], together: int, left: list[Any], right: Any, keep: Any
    ) -> None:
        """One wgmma: of a block of rows, and of products from one on."""
        count, operand = together * self.plan.accumulators, self.plan.rights[which[1]]
        types = self.plan.program.contraction.left.dtype, operand.tile.dtype
        first = self.plan.first_sum(*which)
        registers = [self.accumulators[first + each] for each in range(count)]
        multiply(types, registers, left, right, keep, transposed=not operand.k_major)

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` stages are still being multiplied."""
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(pending))
        if pending == 0:
            self.hold()
            self.left.hold()

    def scale(self, above: Any, below: Any) -> None:
        """Multiply the sums of either row of a thread, of which none are under way, by a factor."""
        scale(self.accumulators, self.plan.sums, above, below)
        self.hold()

    def hold(self) -> None:
        """Keep the compiler from moving the accumulators across this place."""
        hold(self.accumulators, self.plan.sums)

    def forget(self) -> None:
        """Tell the compiler that what the accumulators held is of no use any more."""
        forget(self.accumulators, self.plan.sums)

    def clear(self) -> None:
        """Set the accumulators to zero."""
        clear(self.accumulators, self.plan.sums)


def _descriptor(address: Any, operand: Operand) -> Variable:
    """Matrix descriptor of a right operand's first stage.

    Tiles stored as [k, n] repeat every 8 rows of k and, by the leading offset, with every box.
    """
    width = operand.row_bytes
    if operand.k_major:
        return swizzled("right_tile", address)
    return swizzled("right_tile", address, operand.tile.shape[0] * width, width)


def _step(operand: Operand) -> int:
    """Bytes from one wgmma to the next along k: 16 rows, if it is stored as [k, n]."""
    return K_BYTES if operand.k_major else 16 * operand.row_bytes
