"""Where TVM puts each buffer of a scheduled function, and how large it makes it."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir


def placement_passes() -> list[Any]:
    """TVM's passes from a scheduled function to opaque blocks with exact buffers.

    Returns
    -------
    list[tvm.ir.transform.Pass]
        The beginning of TVM's `s_tir` pipeline.
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
    """Give the buffers of a function their final places and shapes; a millisecond's work.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A scheduled function.

    Returns
    -------
    tvm.tirx.PrimFunc
        In opaque blocks, every allocation of the extent that its uses need.
    """
    module = ir.tvm.ir.transform.Sequential(placement_passes())(ir.IRModule({"main": func}))
    return module["main"]
