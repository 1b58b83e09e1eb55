"""Asynchronous products of tiles by a warpgroup (PTX ISA, wgmma)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

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


class LeftOperand(Protocol):
    """Where one warpgroup's left tiles are."""

    def open(self) -> Operands:
        """Emit what is needed once; returns a function to the operand of each wgmma."""

    def hold(self) -> None:
        """Keep the compiler from reusing the operand's registers before this place."""


@dataclass(frozen=True)
class LeftTiles:
    """Left tiles of one warpgroup in shared memory, K-major."""

    #: Emits the descriptor of the first tile; returns the variable.
    descriptor: Callable[[], Variable]
    #: Bytes from one tile to the next.
    pitch: int
    #: Bytes from one wgmma to the next, along k.
    step: int

    def open(self) -> Operands:
        """Emit the first tile's descriptor."""
        first = self.descriptor()

        def operands(tile: Any, part: int, block: int) -> list[Any]:
            start = part * self.step + block * (WARPGROUP_ROWS * ROW_BYTES)
            return [first.value + words(tile * self.pitch + start)]

        return operands

    def hold(self) -> None:
        """Nothing to do: shared memory is guarded by barriers."""


@dataclass(frozen=True)
class LeftRegisters:
    """Left tiles of one warpgroup in its registers, see `KeptTile`."""

    #: Of all tiles, in the order of the columns.
    registers: Any
    #: Number of registers.
    count: int
    #: Columns of a tile.
    depth: int

    def open(self) -> Operands:
        """Nothing to emit."""

        def operands(tile: Any, part: int, block: int) -> list[Any]:
            first = (tile * (self.depth // GROUP) + part) * GROUP_REGISTERS
            return [self.registers[first + each] for each in range(GROUP_REGISTERS)]

        return operands

    def hold(self) -> None:
        """All registers are in use until here."""
        hold(self.registers, self.count)


def ring_tiles(
    ring: RingPlan, region: Callable[[Any], Any], warpgroup: Any, rows: int
) -> LeftTiles:
    """Tiles of a ring, one in each stage, with the rows that the warpgroup multiplies."""
    start = warpgroup * (rows * ROW_BYTES)
    return LeftTiles(lambda: swizzled("left_tile", region(start)), ring.pitch, K_BYTES)


def gathered_tiles(
    gather: Gather, depth: int, region: Callable[[Any], Any], warpgroup: Any
) -> LeftTiles:
    """Tiles of the intermediate that a cluster has gathered, one for each `depth` columns."""

    def descriptor() -> Variable:
        address = region(warpgroup * share_bytes(gather))
        return described("left_tile", address, CHUNK, CORE_MATRIX, NO_SWIZZLE)

    return LeftTiles(descriptor, depth // 8 * CHUNK, 2 * CHUNK)


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
                operands = self._left(left, part, block), self._right(number, offset, part)
                which = (block, number)
                self._multiply(which, together, *operands, ir.script.Cast("uint32", keep))
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())

    def _right(self, number: int, offset: Any, part: int) -> Any:
        """The descriptor of a right tile, `offset` bytes after that of the first stage."""
        step = _step(self.plan.rights[number])
        return self._rights[number].value + words(offset + part * step)

    def _multiply(
        self, which: tuple[int, int], together: int, left: list[Any], right: Any, keep: Any
    ) -> None:
        """One wgmma, for a block of rows and some consecutive products."""
        count, operand = together * self.plan.accumulators, self.plan.rights[which[1]]
        types = self.plan.program.contraction.left.dtype, operand.tile.dtype
        first = self.plan.first_sum(*which)
        registers = [self.accumulators[first + each] for each in range(count)]
        multiply(types, registers, left, right, keep, transposed=not operand.k_major)

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` stages are still in flight."""
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(pending))
        if pending == 0:
            self.hold()
            self.left.hold()

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


def _step(operand: Operand) -> int:
    """Bytes from one wgmma to the next along k: 16 rows, if it is stored as [k, n]."""
    return K_BYTES if operand.k_major else 16 * operand.row_bytes
