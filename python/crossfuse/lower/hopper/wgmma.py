"""Asynchronous products of tiles by a warpgroup (PTX ISA, wgmma)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.plan.memory import RingPlan
from crossfuse.lower.hopper.plan.operands import CHUNK, GROUP, GROUP_REGISTERS, Operand, share_bytes
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.program.tile import Gather
from crossfuse.lower.hopper.statements import Variable, run
from crossfuse.lower.hopper.wgmma_instruction import (
    CORE_MATRIX,
    K_BYTES,
    NO_SWIZZLE,
    OPERAND_TYPES,
    clear,
    described,
    forget,
    hold,
    multiply,
    swizzled,
    words,
)
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS


def scale(registers: Any, count: int, above: Any, below: Any) -> None:
    """Multiply a thread's sums of one block of 64 rows by a factor for each of its two rows.

    Sums ``4 j + 2 h + q`` are of row h: `above` is the factor of the first row, `below` that of the
    row 8 further down.
    """
    name = f"crossfuse_scale_{count}"
    source = (
        f"__device__ __forceinline__ void {name}(float* sums, float above, float below) {{\n"
        f"#pragma unroll\n  for (int i = 0; i < {count}; ++i) "
        "sums[i] *= i / 2 % 2 ? below : above;\n}\n"
    )
    run(ir.cuda_func_call(name, registers.data, above, below, source_code=source))


# Left operands of wgmma: registers, or tiles in shared memory named by matrix descriptors.

#: What names the operand of one wgmma: a tile, the number of the wgmma in it, and the block of 64
#: rows.
Operands = Callable[[Any, int, int], list[Any]]


@dataclass(frozen=True)
class LeftOperand:
    """Where one warpgroup's left tiles are."""

    #: Emits what is needed once; returns a function to the operand of each wgmma.
    open: Callable[[], Operands]
    #: Registers that hold all of them, and their number; none of tiles in shared memory, which
    #: barriers guard.
    registers: Any = None
    count: int = 0


def _left_tiles(descriptor: Callable[[], Variable], pitch: int, step: int) -> LeftOperand:
    """Left tiles in shared memory, K-major: `pitch` bytes apart, and each wgmma's part `step`.

    `descriptor` emits that of the first tile.
    """

    def open_tiles() -> Operands:
        first = descriptor()

        def operands(tile: Any, part: int, block: int) -> list[Any]:
            start = part * step + block * (WARPGROUP_ROWS * ROW_BYTES)
            return [first.value + words(tile * pitch + start)]

        return operands

    return LeftOperand(open_tiles)


def left_registers(registers: Any, count: int, depth: int) -> LeftOperand:
    """Left tiles of `depth` columns in registers, in the order of the columns; see `KeptTile`."""

    def operands(tile: Any, part: int, block: int) -> list[Any]:
        first = (tile * (depth // GROUP) + part) * GROUP_REGISTERS
        return [registers[first + each] for each in range(GROUP_REGISTERS)]

    return LeftOperand(lambda: operands, registers, count)


def ring_tiles(
    ring: RingPlan, region: Callable[[Any], Any], warpgroup: Any, rows: int
) -> LeftOperand:
    """Tiles of a ring, one in each stage, with the rows that the warpgroup multiplies."""
    start = warpgroup * (rows * ROW_BYTES)
    return _left_tiles(lambda: swizzled("left_tile", region(start)), ring.pitch, K_BYTES)


def gathered_tiles(
    gather: Gather, depth: int, region: Callable[[Any], Any], warpgroup: Any
) -> LeftOperand:
    """Tiles of the intermediate that a cluster has gathered, one for each `depth` columns."""

    def descriptor() -> Variable:
        address = region(warpgroup * share_bytes(gather))
        return described("left_tile", address, CHUNK, CORE_MATRIX, NO_SWIZZLE)

    return _left_tiles(descriptor, depth // 8 * CHUNK, 2 * CHUNK)


class Multiplier:
    """One warpgroup's products: its blocks of 64 rows of the left tile by all of each right one.

    `ring` holds right tiles, and `region` maps a byte offset in it to an address. `accumulators`
    are registers of all phases, of which this one uses the first.
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
        """Multiply a left tile by a stage; `first` discards what was accumulated before."""
        self.hold()
        run(ir.script.ptx.wgmma.fence.sync.aligned())
        offset = right * self.ring.pitch
        count = len(self._rights)
        together = count if self.plan.is_one_product else 1
        for part in range(self.plan.program.contraction.depth // self._k):
            keep = ir.script.Cast("uint32", ir.script.Not(first)) if part == 0 else 1
            for block, number in product(range(self.plan.blocks), range(0, count, together)):
                operand = self.plan.rights[number]
                # Along k: 16 rows, if it is stored as [k, n].
                step = K_BYTES if operand.k_major else 16 * operand.row_bytes
                first_sum = self.plan.first_sum(block, number)
                multiply(
                    (self.plan.program.contraction.left.dtype, operand.tile.dtype),
                    [
                        self.accumulators[first_sum + each]
                        for each in range(together * self.plan.accumulators)
                    ],
                    self._left(left, part, block),
                    self._rights[number].value + words(offset + part * step),
                    ir.script.Cast("uint32", keep),
                    transposed=not operand.k_major,
                )
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` stages are still in flight."""
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(pending))
        if pending == 0:
            self.hold()
            if self.left.count:
                hold(self.left.registers, self.left.count)

    def scale(self, above: Any, below: Any) -> None:
        """Multiply the sums of either row of a thread by a factor; none may be in flight."""
        scale(self.accumulators, self.plan.sums, above, below)
        self.hold()

    def hold(self) -> None:
        """Keep the compiler from moving the accumulators across this place."""
        hold(self.accumulators, self.plan.sums)

    def forget(self) -> None:
        """Declare that the values of the accumulators are dead."""
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
