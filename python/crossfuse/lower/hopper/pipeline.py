"""TVM's pipeline of TIRx functions, with what keeps its passes right.

The passes of ``tvm.tirx.compilation_pipeline.tirx_pipeline`` (TVM 0.27) in their order.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.flatten_buffers import flatten_buffers
from crossfuse.lower.hopper.divisions import round_towards_zero
from crossfuse.lower.pack_registers import pack_registers


def kernel_pipeline() -> Any:
    """Passes from TIRx to kernels and their host functions.

    Returns
    -------
    tvm.ir.transform.Pass
        A module pass.
    """
    s, x = ir.s_tir.transform, ir.tirx.transform
    return ir.tvm.ir.transform.Sequential(
        [
            x.LowerTIRx(),
            s.UnifyThreadBinding(),
            x.StmtSimplify(),
            x.LowerTIRxOpaque(),
            *flatten_buffers(),
            x.BF16ComputeLegalize(),
            x.NarrowDataType(32),
            x.VectorizeLoop(True),
            x.UnrollLoop(),
            x.StmtSimplify(),
            pack_registers(),
            round_towards_zero(),
            x.CommonSubexprElim(),
            x.FP8ComputeLegalize(),
            x.VerifyMemory(),
            x.AnnotateEntryFunc(),
            x.SplitHostDevice(),
            _cuda_passes().LowerIket(),
            x.MakePackedAPI(),
            x.FP8StorageLegalize(),
            x.BF16StorageLegalize(),
        ]
    )


def _cuda_passes() -> Any:
    from tvm.backend.cuda import transforms

    return transforms
