"""Operators of TIR for maxima and minima that are NaN where an operand is, as torch's are.

TVM's own `Max` and `Min` are ``fmaxf`` and ``fminf`` in CUDA, which drop NaN, and in LLVM a
comparison, which drops it from one side.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from crossfuse import _tvm as ir

#: Of two float32 or float64, or of vectors of them.
MAXIMUM, MINIMUM = "tirx.crossfuse_maximum", "tirx.crossfuse_minimum"
#: Numbers at once for which there is a helper in `device/extremes.cuh`.
_LANES = (1, 2, 4)


def extreme(name: str, one: Any, other: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM`; of types that these do not take, in float32.

    Parameters
    ----------
    name : str
        Which of them.
    one, other : tvm.ir.Expr
        Floats of one type.

    Returns
    -------
    tvm.ir.Call
        The number, of the type of the operands.
    """
    dtype = ir.tvm.DataType(str(one.ty))
    if dtype.bits >= 32:
        return _call(name, one, other)
    wide = "float32" if dtype.lanes == 1 else f"float32x{dtype.lanes}"
    return ir.tirx.Cast(str(dtype), _call(name, one.astype(wide), other.astype(wide)))


def _call(name: str, one: Any, other: Any) -> Any:
    return ir.Call(ir.Op.get(name), [one, other], ret_ty=str(one.ty))


@cache
def _source() -> str:
    return resources.files("crossfuse.lower").joinpath("device/extremes.cuh").read_text("utf-8")


def on_cuda(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` as one of the device's helper."""
    dtype = ir.tvm.DataType(str(call.ty))
    if dtype.bits != 32 or dtype.lanes not in _LANES:
        return elsewhere(call)
    name = str(call.op.name).removeprefix("tirx.")
    return ir.cuda_func_call(name, *call.args, source_code=_source(), return_type=str(call.ty))


def on_llvm(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` as one of LLVM's intrinsic."""
    name = str(call.op.name).removeprefix("tirx.crossfuse_")
    return ir.tirx.call_llvm_pure_intrin(str(call.ty), f"llvm.{name}", *call.args)


def elsewhere(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` by comparisons, which do not hold for NaN.

    Simplified, it would lose NaN: what equals itself is true to TVM. Nothing is at that stage.
    """
    one, other = call.args
    further = ir.tirx.LT if str(call.op.name) == MAXIMUM else ir.tirx.GT
    number = ir.tirx.Select(ir.tirx.EQ(other, other), one, other)
    return ir.tirx.Select(further(one, other), other, number)
