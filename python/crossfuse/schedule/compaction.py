"""Places the buffers of a scheduled function, and sizes them, as TVM does."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.markers import MERGE

#: TVM's name of the pass that lowers reductions over threads.
_REDUCTIONS = "s_tir.LowerCrossThreadReduction"


def placement_passes() -> list[Any]:
    """TVM's passes from a scheduled function to opaque blocks with exact buffers.

    They are the beginning of TVM's `s_tir` pipeline.
    """
    s = ir.s_tir.transform
    return [
        s.CanonicalizeLoop(),
        s.LowerCrossThreadReduction(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        s.LiftThreadBinding(),
        s.ManifestSharedMemoryLocalStage(),
        s.CompactBufferAllocation(),
    ]


def compacted(func: Any) -> Any:
    """Give the buffers of a scheduled function their final places and shapes.

    The result is in opaque blocks, every allocation of the extent that its uses need. It takes a
    millisecond.
    """
    passes = placement_passes()
    if _merges(func):
        # TVM refuses merges of states over threads, which the lowering makes shuffles of. What they
        # allocate is the same without.
        passes = [each for each in passes if each.info.name != _REDUCTIONS]
    module = ir.tvm.ir.transform.Sequential(passes)(ir.IRModule({"main": func}))
    return module["main"]


def _merges(func: Any) -> bool:
    """Whether a function has blocks that merge states."""
    found: list[Any] = []
    ir.walk(func.body, (ir.SBlock, found.append))
    return any(MERGE in each.annotations for each in found)
