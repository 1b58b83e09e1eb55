"""Sums of a multiplying warp, corrected where a chunk begins."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.multiply.wgmma import Multiplier
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.rows.chunk_load import steps_of_chunk
from crossfuse.lower.hopper.statements import let, run, when

_ANY = """\
__device__ __forceinline__ int crossfuse_any_lane(int found) {
  return __any_sync(0xffffffffu, found);
}
"""


def correct_sums(
    body: Body, phase: PhasePlan, multiplier: Multiplier, stage: Any, number: Any
) -> None:
    """Multiply a warp's sums by the factors of their rows, if any row has one.

    Factors are 1 but for rows that have outgrown what they were made for: sums stay with the
    tensor cores then, and nobody waits. Warps differ, as each has rows of its own.

    Parameters
    ----------
    body : Body
        Of the kernel.
    phase : PhasePlan
        The product.
    multiplier : Multiplier
        Has the sums.
    stage : Any
        Stage of the left tile, which has come.
    number : Any
        Of the step.
    """
    chunks = phase.chunks
    if chunks is None:
        return
    where = body.where
    with when(ir.script.And(number > 0, number % steps_of_chunk(phase) == 0)):
        warp = (where.warpgroup - 1) * phase.warpgroups.share + where.warp * 16
        row = stage * chunks.tile + warp + where.lane // 4
        factors = body.elements("factors", "float32")
        halves = [let("factor", factors[row + 8 * half]) for half in range(2)]
        run(ir.script.ptx.fence.proxy.async_.shared__cta())  # TMA will overwrite them
        changed = ir.script.Or(halves[0] != 1, halves[1] != 1)
        found = ir.cuda_func_call(
            "crossfuse_any_lane",
            ir.script.Cast("int32", changed),
            source_code=_ANY,
            return_type="int32",
        )
        with when(found != 0):
            multiplier.wait(pending=0)
            multiplier.scale(*halves)
