"""Tiles multiplied by a warpgroup, asynchronously, out of shared memory (PTX ISA, wgmma)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.operand import ROW_BYTES, WARPGROUP_ROWS, Operand
from crossfuse.lower.hopper.phase import OPERAND_TYPES, PhasePlan
from crossfuse.lower.hopper.plan import RingPlan
from crossfuse.lower.hopper.statements import Variable, run

#: Bytes of eight rows of a swizzled tile: one repeat of the pattern.
_PATTERN = 8 * ROW_BYTES
#: Code of the 128-byte swizzle for `encode_matrix_descriptor`.
_SWIZZLE_128 = 3


class Multiplier:
    """One warpgroup's products: 64 rows of the left tile by all of each right one.

    Parameters
    ----------
    plan : PhasePlan
        The phase.
    rings : tuple[RingPlan, RingPlan]
        Of left and of right tiles.
    regions : tuple[Callable, Callable]
        Functions from a byte offset to an address in these rings.
    warpgroup : Any
        Index of the multiplying warpgroup.
    accumulators : Any
        Registers of all phases; this one uses the first.
    """

    def __init__(
        self,
        plan: PhasePlan,
        rings: tuple[RingPlan, RingPlan],
        regions: tuple[Callable[[Any], Any], Callable[[Any], Any]],
        warpgroup: Any,
        accumulators: Any,
    ) -> None:
        self.plan = plan
        self.rings = rings
        self.accumulators = accumulators
        left, right = regions
        rows = WARPGROUP_ROWS * ROW_BYTES
        self._left = _descriptor("left_tile", left(warpgroup * rows), plan.left)
        self._rights = []
        start = 0
        for operand in plan.rights:
            self._rights.append(_descriptor("right_tile", right(start), operand))
            start += operand.size
        self._k = OPERAND_TYPES[plan.left.tile.dtype][1]

    def start(self, left: Any, right: Any, first: Any) -> None:
        """Multiply the tiles of two stages; `first` clears what was accumulated before."""
        self.hold()
        run(ir.script.ptx.wgmma.fence.sync.aligned())
        offsets = [
            stage * ring.pitch for stage, ring in zip((left, right), self.rings, strict=True)
        ]
        for part in range(self.plan.program.contraction.depth // self._k):
            keep = ir.script.Cast("uint32", ir.script.Not(first)) if part == 0 else 1
            for number in range(len(self._rights)):
                self._multiply(number, offsets, part, ir.script.Cast("uint32", keep))
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())

    def _multiply(self, number: int, offsets: list[Any], part: int, keep: Any) -> None:
        """One wgmma."""
        plan, right = self.plan, self.plan.rights[number]
        types = [OPERAND_TYPES[each.tile.dtype][0] for each in (plan.left, right)]
        call = ir.script.ptx[
            f"wgmma.mma_async.sync.aligned.m64n{plan.columns}k{self._k}.f32.{types[0]}.{types[1]}"
        ]
        # Only 16-bit types may have operands that are not K-major.
        layouts = () if self._k == 32 else (0, 0 if right.k_major else 1)
        first = number * plan.accumulators
        run(
            call(
                *[self.accumulators[first + i] for i in range(plan.accumulators)],
                self._left.value + _words(offsets[0], part, plan.left),
                self._rights[number].value + _words(offsets[1], part, right),
                ir.script.ptx.pred(keep),
                1,
                1,
                *layouts,
            )
        )

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` stages are still being multiplied."""
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(pending))
        if pending == 0:
            self.hold()

    def hold(self) -> None:
        """Keep the compiler from moving the accumulators across this place."""
        self._touch("hold", "+f")

    def forget(self) -> None:
        """Tell the compiler that what the accumulators held is of no use any more."""
        self._touch("forget", "=f")

    def _touch(self, name: str, constraint: str) -> None:
        """An empty instruction on all accumulators."""
        count = self.plan.accumulators * len(self.plan.rights)
        name = f"crossfuse_{name}_{count}"
        source = (
            f"__device__ __forceinline__ void {name}(float* registers) {{\n#pragma unroll\n"
            f"  for (int i = 0; i < {count}; ++i) "
            f'asm volatile("" : "{constraint}"(registers[i]) :: "memory");\n}}\n'
        )
        run(ir.cuda_func_call(name, self.accumulators.data, source_code=source))


def _descriptor(name: str, address: Any, operand: Operand) -> Variable:
    """Matrix descriptor of an operand's first stage.

    K-major tiles repeat every 8 rows (the leading offset has no meaning there). Tiles stored as
    [k, n] repeat every 8 rows of k and, by the leading offset, every 64 columns.
    """
    descriptor = Variable(name, "uint64")
    leading = 1 if operand.k_major else operand.tile.shape[0] * ROW_BYTES // 16
    run(
        ir.script.cuda.wgmma.encode_matrix_descriptor(
            descriptor.address, address, leading, _PATTERN // 16, _SWIZZLE_128
        )
    )
    return descriptor


def _words(stage_offset: Any, part: int, operand: Operand) -> Any:
    """Offset of a step along k within a stage, in the descriptor's units of 16 bytes."""
    # 32 bytes of a row hold the k of one wgmma; stored as [k, n], it is 16 rows.
    step = 32 if operand.k_major else 16 * ROW_BYTES
    return ir.script.Cast("uint64", stage_offset // 16 + part * step // 16)
