"""Statements of a chunk by instructions that two warps can do while others multiply.

Two warps have as long for a chunk as the tensor cores for its products. What general lowering
makes of a quotient (a call, for numbers of any size) and of 8-bit floats (one conversion each) is
too much for that.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir

_FLOAT8 = {"float8_e4m3fn": "__nv_fp8x2_e4m3", "float8_e5m2": "__nv_fp8x2_e5m2"}
# Of large divisors __fdividef makes 0 (CUDA C++ programming guide): a sixteenth of none is.
_QUOTIENT = """\
__device__ __forceinline__ float crossfuse_quotient(float a, float b) {
  return __fdividef(a * 0.0625f, b * 0.0625f);
}
"""


def quick(statement: Any) -> Any:
    """Statements with quotients of two units in the last place, and 8-bit floats made in pairs.

    Parameters
    ----------
    statement : Any
        Of a function whose arithmetic may be approximate.
    """
    return ir.mutate(statement, (ir.tirx.Div, _quotient), (ir.For, _pairs))


def _quotient(node: Any, mutator: Any) -> Any:
    node = mutator.default_mutate(node)
    if not isinstance(node, ir.tirx.Div) or str(node.ty) != "float32":
        return node
    return ir.cuda_func_call(
        "crossfuse_quotient", node.a, node.b, source_code=_QUOTIENT, return_type="float32"
    )


def _pairs(loop: Any, mutator: Any) -> Any:
    """``for lane: out[lane] = Cast(float8, x)``, two lanes at a time."""
    loop = mutator.default_mutate(loop)
    store, extent = loop.body, ir.constant(loop.extent)
    cast = getattr(store, "value", None)
    if not isinstance(cast, ir.tirx.Cast) or not isinstance(store, ir.BufferStore):
        return loop
    kind = _FLOAT8.get(str(cast.ty))
    plain = len(store.indices) == 1 and store.indices[0].same_as(loop.loop_var)
    if kind is None or not plain or extent is None or extent % 2 or str(cast.value.ty) != "float32":
        return loop
    pair = ir.Var("pair", str(loop.loop_var.ty))

    def value(offset: int) -> Any:
        lane = pair * 2 + offset
        return ir.substitute(cast.value, lambda var: lane if var.same_as(loop.loop_var) else var)

    name = f"crossfuse_pair_of_{cast.ty}"
    call = ir.cuda_func_call(
        name, store.buffer.ptr_to([pair * 2]), value(0), value(1), source_code=_pair(name, kind)
    )
    return ir.For(pair, 0, extent // 2, ir.ForKind.UNROLLED, ir.tirx.Evaluate(call))


def _pair(name: str, kind: str) -> str:
    return (
        f"__device__ __forceinline__ void {name}(void* to, float low, float high) {{\n"
        f"  *({kind}*)to = {kind}(make_float2(low, high));\n}}\n"
    )
