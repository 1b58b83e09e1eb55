"""The pass that makes exponentials to the base of two single instructions."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import prim_func_pass
from crossfuse.lower.tree import is_call
from crossfuse.markers import FAST


@cache
def _source() -> str:
    return resources.files("crossfuse.lower").joinpath("device/math.cuh").read_text("utf-8")


def fast_exponentials() -> Any:
    """Pass: ``exp2`` of a float32 becomes ``ex2.approx.ftz``, right to 2 units in the last place.

    CUDA's own ``exp2f`` scales arguments so that results below 2^-126 are right too, which takes
    three more instructions (CUDA Math API, single precision functions).

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass; functions without `FAST` pass through untouched.
    """

    def change(call: Any, mutator: Any) -> Any:
        call = mutator.default_mutate(call)
        if not is_call(call, "tirx.exp2") or str(call.ty) != "float32":
            return call
        return ir.cuda_func_call(
            "crossfuse_exp2", call.args[0], source_code=_source(), return_type="float32"
        )

    def transform(func: Any) -> Any:
        if func.attrs is None or FAST not in func.attrs:
            return func
        return ir.with_body(func, ir.mutate(func.body, (ir.Call, change)))

    return prim_func_pass("FastExponentials", transform)
