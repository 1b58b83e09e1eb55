"""CUDA's fast functions of float32, for values that are rounded to a shorter type.

A warp takes 16 cycles for the two instructions of a sigmoid that count; with the exact exponential
and division it took 66 (docs/hopper-measured.md).
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir

#: Output types that hide the error of CUDA's fast exponential and division, about 1e-5.
FAST_TYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_FAST_EXP = """\
__device__ __forceinline__ float crossfuse_fast_exp(float x) { return __expf(x); }
"""
_FAST_EXP2 = """\
__device__ __forceinline__ float crossfuse_fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""
_FAST_DIVIDE = """\
__device__ __forceinline__ float crossfuse_fast_divide(float x, float y) {
  return __fdividef(x, y);
}
"""


def fast(value: Any) -> Any:
    """The same expression with CUDA's fast exponential and division of float32."""

    def call(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        name = str(node.op.name) if isinstance(node.op, ir.Op) else ""
        if str(node.ty) != "float32":
            return node
        if name == "tirx.exp":
            return _exp(node.args[0])
        if name == "tirx.exp2":
            return exp2(node.args[0])
        if name == "tirx.sigmoid":
            one = ir.tirx.FloatImm("float32", 1.0)
            return _divide(one, one + _exp(-node.args[0]))
        return node

    def divide(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return _divide(node.a, node.b) if str(node.ty) == "float32" else node

    return ir.mutate(value, (ir.Call, call), (ir.tirx.Div, divide))


def fast_tanh(value: Any) -> Any:
    """The same expression with the hyperbolic tangent of float32 by fast functions.

    The error is about 1e-6, of values from -1 to 1; the instruction's own is 5e-4.
    """

    def call(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        name = str(node.op.name) if isinstance(node.op, ir.Op) else ""
        if name != "tirx.tanh" or str(node.ty) != "float32":
            return node
        one, two = (ir.tirx.FloatImm("float32", float(each)) for each in (1, 2))
        return one - _divide(two, one + _exp(two * node.args[0]))

    return ir.mutate(value, (ir.Call, call))


def exp2(x: Any) -> Any:
    """Two to the power of a float32, by one instruction that flushes subnormal results to zero."""
    return ir.cuda_func_call(
        "crossfuse_fast_exp2", x, source_code=_FAST_EXP2, return_type="float32"
    )


def _exp(x: Any) -> Any:
    return ir.cuda_func_call("crossfuse_fast_exp", x, source_code=_FAST_EXP, return_type="float32")


def _divide(x: Any, y: Any) -> Any:
    return ir.cuda_func_call(
        "crossfuse_fast_divide", x, y, source_code=_FAST_DIVIDE, return_type="float32"
    )
