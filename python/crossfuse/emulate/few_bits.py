"""Conversions that TVM's LLVM code generator gets wrong, by the bits, for functions of models.

Those to and from 8-bit floats are wrong of zeros, denormals and infinities; and what is rounded to
bfloat16 or to 8 bits and widened at once is not rounded at all. `crossfuse.emulate.widen` gives the
sequential check float32 tensors instead, which a model's other functions would not take.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.emulate.widen import converted, rounded

_WIDE, _HALF, _BITS = "float32", "float16", "uint16"
_BFLOAT16 = "bfloat16"
#: TVM's attribute of functions that it joins with no other, and its value.
_PATTERN, _OPAQUE = "op_pattern", 8
#: Half precision has the exponents of the one type, and five bits of those of the other.
_E5M2, _E4M3 = "float8_e5m2", "float8_e4m3fn"
_E4M3_SCALE = 2.0**8
_E4M3_NAN, _E4M3_SIGN = 0x7F, 0x80


def by_bits(func: Any) -> Any:
    """Write conversions of a function by bits; one without any of them is returned as it is.

    TVM joins it with no other: of tensors between two functions it makes wider ones.
    """
    if not any(map(_converts, ir.nodes(func.body, ir.tirx.Cast))):
        return func
    body = ir.mutate(func.body, (ir.tirx.Cast, _cast))
    return ir.with_body(func, body).with_attr(_PATTERN, _OPAQUE)


def _converts(cast: Any) -> bool:
    return bool({str(cast.ty), str(cast.value.ty)} & {_E5M2, _E4M3, _BFLOAT16})


def _is_widened(cast: Any) -> bool:
    inner = cast.value
    rounds = isinstance(inner, ir.tirx.Cast) and str(inner.ty) == _BFLOAT16
    return rounds and str(cast.ty) == str(inner.value.ty) == _WIDE


def _cast(node: Any, mutator: Any) -> Any:
    source, target = str(node.value.ty), str(node.ty)
    if _is_widened(node):
        return _to_bfloat16(mutator.mutate(node.value.value))
    if isinstance(node.value, ir.tirx.Cast) and source in (_E5M2, _E4M3):
        return converted(rounded(mutator.mutate(node.value.value), source), target)
    value = mutator.mutate(node.value)
    if source in (_E5M2, _E4M3):
        value = _decoded(value)
    return _encoded(value, target) if target in (_E5M2, _E4M3) else converted(value, target)


def _to_bfloat16(value: Any) -> Any:
    """A float32 rounded to nearest even at 16 bits."""
    t = ir.tirx
    bits = t.reinterpret("uint32", value)
    half = t.const(0x7FFF, "uint32") + ((bits >> t.const(16, "uint32")) & t.const(1, "uint32"))
    nearest = t.reinterpret(_WIDE, (bits + half) & t.const(0xFFFF0000, "uint32"))
    return t.Select(t.isnan(value), value, nearest)


def _decoded(value: Any) -> Any:
    """The float32 that an 8-bit float is."""
    t = ir.tirx
    bits = t.Cast(_BITS, t.reinterpret("uint8", value))
    if str(value.ty) == _E5M2:
        return t.Cast(_WIDE, t.reinterpret(_HALF, bits << _number(8)))
    magnitude, sign = bits & _number(_E4M3_NAN), bits & _number(_E4M3_SIGN)
    half = t.reinterpret(_HALF, (sign << _number(8)) | (magnitude << _number(7)))
    number = t.Cast(_WIDE, half) * t.FloatImm(_WIDE, _E4M3_SCALE)
    return t.Select(t.EQ(magnitude, _number(_E4M3_NAN)), t.FloatImm(_WIDE, float("nan")), number)


def _encoded(value: Any, dtype: str) -> Any:
    """The 8-bit float next to a number, saturating as in CUDA."""
    t = ir.tirx
    near = rounded(value, dtype)
    if dtype == _E5M2:
        bits = t.reinterpret(_BITS, t.Cast(_HALF, near)) >> _number(8)
    else:
        half = t.reinterpret(_BITS, t.Cast(_HALF, near * t.FloatImm(_WIDE, 1 / _E4M3_SCALE)))
        sign, magnitude = (half >> _number(8)), (half >> _number(7))
        number = (sign & _number(_E4M3_SIGN)) | (magnitude & _number(_E4M3_NAN))
        bits = t.Select(t.isnan(near), _number(_E4M3_NAN), number)
    return t.reinterpret(dtype, t.Cast("uint8", bits))


def _number(value: int) -> Any:
    return ir.tirx.const(value, _BITS)
