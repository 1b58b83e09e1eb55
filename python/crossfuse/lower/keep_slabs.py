"""Keeps TVM's storage rewriting away from cluster kernels."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import prim_func_pass, was_lowered


def storage_rewrite_elsewhere() -> Any:
    """Pass: TVM's ``StorageRewrite`` on every function but cluster kernels.

    It gives the memory of a dead shared buffer to the next one. A slab is not dead while peers
    may read it, and the rewrite adds no synchronisation; `place_shared_memory` shares memory
    where that is safe.

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass.
    """
    rewrite = ir.tirx.transform.StorageRewrite()

    def transform(func: Any) -> Any:
        if was_lowered(func):
            return func
        (rewritten,) = rewrite(ir.IRModule({"main": func})).functions.values()
        return rewritten

    return prim_func_pass("StorageRewriteElsewhere", transform)
