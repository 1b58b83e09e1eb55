"""What of floats TVM's LLVM code generator computes otherwise than a GPU does.

That is some operators, numbers of few bits, and long sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import combiner_of, is_reduction
from crossfuse.workload.dtypes import float_type, is_float

_TANH, _REINTERPRET = "tirx.tanh", "tirx.reinterpret"
#: The C library's, by type.
_OF_C = {"float32": "tanhf", "float64": "tanh"}


def as_on_gpu(func: Any) -> Any:
    """Replace operators of a function for LLVM; one without any of them is returned as it is.

    NaN is unequal to everything, itself too: TVM's ``!=`` is false of it. ``tanh`` has all digits
    of small numbers, of which TVM's, a quotient of exponentials, leaves 0.
    """
    if not any(map(_is_wrong, ir.nodes(func.body, ir.tirx.NE, ir.Call))):
        return func
    return ir.with_body(func, ir.mutate(func.body, (ir.tirx.NE, _unequal), (ir.Call, _call)))


def _is_wrong(node: Any) -> bool:
    return _is_tanh(node) if isinstance(node, ir.Call) else is_float(str(node.a.ty))


def _is_tanh(call: Any) -> bool:
    return str(getattr(call.op, "name", "")) == _TANH


def _unequal(node: Any, mutator: Any) -> Any:
    node = mutator.default_mutate(node)
    if not is_float(str(node.a.ty)):
        return node
    # By way of an integer: of the opposite of a comparison TVM makes the other comparison.
    return ir.tirx.EQ(ir.tirx.Cast("int8", ir.tirx.EQ(node.a, node.b)), ir.tirx.const(0, "int8"))


def _call(node: Any, mutator: Any) -> Any:
    node = mutator.default_mutate(node)
    dtype = str(node.ty)
    if not _is_tanh(node):
        return node
    wide = dtype if dtype in _OF_C else "float32"
    (x,) = node.args
    made = ir.tirx.call_pure_extern(wide, _OF_C[wide], x if wide == dtype else x.astype(wide))
    return made if wide == dtype else made.astype(dtype)


# Numbers of few bits, which TVM's LLVM code generator gets wrong, by their bits.
#
# Its conversions to and from 8-bit floats are wrong of zeros, denormals and infinities; and what is
# rounded to bfloat16 or to 8 bits and widened at once is not rounded at all. So 8-bit floats are
# their bits wherever a function has them: it is given and gives what it did before.


_WIDE, _HALF, _BITS, _BYTE = "float32", "float16", "uint16", "uint8"
_BFLOAT16 = "bfloat16"
#: TVM's attribute of functions that it joins with no other, and its value.
_PATTERN, _OPAQUE = "op_pattern", 8
#: Half precision has the exponents of the one type, and five bits of those of the other.
_E5M2, _E4M3 = "float8_e5m2", "float8_e4m3fn"
_NARROW = (_E5M2, _E4M3)
_E4M3_SCALE = 2.0**8
_E4M3_NAN, _E4M3_SIGN = 0x7F, 0x80
_COMPUTED = ("Add", "Sub", "Mul", "Div", "Min", "Max")
_COMPARED = ("EQ", "NE", "LT", "LE", "GT", "GE")
#: A float32: bits of its exponent, and those but its sign.
_EXPONENT, _MAGNITUDE = 0x7F800000, 0x7FFFFFFF


def by_bits(func: Any) -> Any:
    """Write numbers of 8 bits, and conversions, by bits; a function without any is left alone.

    TVM joins it with no other: of tensors between two functions it makes wider ones.
    """
    inside = [e for block in ir.nodes(func.body, ir.SBlock) for e in block.alloc_buffers]
    images = {
        each: ir.tirx.decl_buffer(list(each.ty.shape), _BYTE, each.name, scope=str(each.scope()))
        for each in inside
        if str(each.ty.dtype) in _NARROW
    }
    operators = [getattr(ir.tirx, each) for each in (*_COMPUTED, *_COMPARED)]
    if not images and not any(map(_converts, ir.nodes(func.body, ir.tirx.Cast, *operators))):
        return func

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if node.source not in images:
            return node
        stored = ir.tirx.BufferLoad(images[node.source], list(node.indices))
        return ir.tirx.reinterpret(str(node.ty), stored)

    def store(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if node.buffer not in images:
            return node
        return ir.BufferStore(images[node.buffer], _byte(node.value), list(node.indices))

    body = ir.mutate(
        func.body,
        (ir.tirx.Cast, _cast),
        (ir.TensorLoad, load),
        (ir.BufferStore, store),
        (ir.SBlock, of_buffers(images)),
        (ir.tirx.Select, _chosen),
        (ir.Call, _chosen),
        *((each, _operated) for each in operators),
    )
    return ir.with_body(func, body).with_attr(_PATTERN, _OPAQUE)


def of_buffers(images: Mapping[Any, Any]) -> Callable[[Any, Any], Any]:
    """A callback of `crossfuse._tvm.mutate` for blocks: other buffers take the place of some."""

    def block(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        reads, writes = (
            [ir.tirx.BufferRegion(images.get(e.source, e.source), e.region) for e in regions]
            for regions in (node.reads, node.writes)
        )
        allocated = [images.get(each, each) for each in node.alloc_buffers]
        return ir.block_like(node, reads=reads, writes=writes, alloc_buffers=allocated)

    return block


def _converts(node: Any) -> bool:
    """Whether a cast is of few bits, or an operator of 8."""
    if isinstance(node, ir.tirx.Cast):
        return bool({str(node.ty), str(node.value.ty)} & {*_NARROW, _BFLOAT16})
    return str(node.a.ty) in _NARROW


def _is_widened(cast: Any) -> bool:
    inner = cast.value
    rounds = isinstance(inner, ir.tirx.Cast) and str(inner.ty) == _BFLOAT16
    return rounds and str(cast.ty) == str(inner.value.ty) == _WIDE


def _cast(node: Any, mutator: Any) -> Any:
    if _is_widened(node):
        return _to_bfloat16(mutator.mutate(node.value.value))
    return _as(_wide(mutator.mutate(node.value)), str(node.ty))


def _operated(node: Any, mutator: Any) -> Any:
    """An operator on 8-bit floats, as float32 and rounded again."""
    dtype = str(node.a.ty)
    node = mutator.default_mutate(node)
    if dtype not in _NARROW:
        return node
    made = type(node)(_wide(node.a), _wide(node.b))
    return made if str(made.ty) != _WIDE else _as(made, dtype)


def _chosen(node: Any, mutator: Any) -> Any:
    """A choice between 8-bit floats: one between their bits."""
    dtype = str(node.ty)
    node = mutator.default_mutate(node)
    if dtype not in _NARROW:
        return node
    if isinstance(node, ir.tirx.Select):
        sides = _byte(node.true_value), _byte(node.false_value)
        return ir.tirx.reinterpret(dtype, ir.tirx.Select(node.condition, *sides))
    if node.op.same_as(ir.Op.get(ir.IF_THEN_ELSE)):
        condition, *values = node.args
        return ir.tirx.reinterpret(dtype, ir.tirx.if_then_else(condition, *map(_byte, values)))
    return node


def _to_bfloat16(value: Any) -> Any:
    """A float32 rounded to nearest even at 16 bits."""
    t = ir.tirx
    bits = t.reinterpret("uint32", value)
    half = t.const(0x7FFF, "uint32") + ((bits >> t.const(16, "uint32")) & t.const(1, "uint32"))
    nearest = t.reinterpret(_WIDE, (bits + half) & t.const(0xFFFF0000, "uint32"))
    return t.Select(t.isnan(value), value, nearest)


def _byte(value: Any) -> Any:
    """The bits of an 8-bit float."""
    if isinstance(value, ir.tirx.FloatImm):
        import numpy as np

        number = np.asarray(value.value, float_type(str(value.ty)).numpy)
        return ir.tirx.const(int(number.view(np.uint8)), _BYTE)
    made = isinstance(value, ir.Call) and value.op.same_as(ir.Op.get(_REINTERPRET))
    if made and str(value.args[0].ty) == _BYTE:
        return value.args[0]
    return ir.tirx.reinterpret(_BYTE, value)


def _wide(value: Any) -> Any:
    """The float32 that an 8-bit float is; any other value as it is."""
    t, dtype = ir.tirx, str(value.ty)
    if dtype not in _NARROW:
        return value
    bits = t.Cast(_BITS, _byte(value))
    if dtype == _E5M2:
        return t.Cast(_WIDE, t.reinterpret(_HALF, bits << _number(8)))
    magnitude, sign = bits & _number(_E4M3_NAN), bits & _number(_E4M3_SIGN)
    half = t.reinterpret(_HALF, (sign << _number(8)) | (magnitude << _number(7)))
    number = t.Cast(_WIDE, half) * t.FloatImm(_WIDE, _E4M3_SCALE)
    return t.Select(t.EQ(magnitude, _number(_E4M3_NAN)), t.FloatImm(_WIDE, float("nan")), number)


def _as(value: Any, dtype: str) -> Any:
    """A number in another type; of an 8-bit float the next one, saturating as in CUDA."""
    if dtype not in _NARROW:
        return converted(value, dtype)
    t = ir.tirx
    near = _rounded(value, dtype)
    if dtype == _E5M2:
        bits = t.reinterpret(_BITS, t.Cast(_HALF, near)) >> _number(8)
    else:
        half = t.reinterpret(_BITS, t.Cast(_HALF, near * t.FloatImm(_WIDE, 1 / _E4M3_SCALE)))
        sign, magnitude = (half >> _number(8)), (half >> _number(7))
        number = (sign & _number(_E4M3_SIGN)) | (magnitude & _number(_E4M3_NAN))
        bits = t.Select(t.isnan(near), _number(_E4M3_NAN), number)
    return t.reinterpret(dtype, t.Cast(_BYTE, bits))


def _rounded(value: Any, dtype: str) -> Any:
    """A number rounded to an 8-bit float type, as a float32.

    To nearest even; what is too large becomes the largest number, as CUDA's conversions saturate.
    """
    kind, t = float_type(dtype), ir.tirx
    value = converted(value, _WIDE)
    largest = t.FloatImm(_WIDE, kind.largest)
    bounded = t.Max(t.Min(value, largest), -largest)
    # A power of two: the exponent alone. Below the least one distances are those of denormals.
    power = t.reinterpret(_WIDE, t.bitwise_and(t.reinterpret("uint32", bounded), _word(_EXPONENT)))
    step = t.Max(power * t.FloatImm(_WIDE, 2 * kind.unit), t.FloatImm(_WIDE, kind.smallest))
    magnitude = t.bitwise_and(t.reinterpret("uint32", value), _word(_MAGNITUDE))
    nearest = t.nearbyint(bounded / step) * step
    return t.Select(t.GT(magnitude, _word(_EXPONENT)), value, nearest)


def converted(value: Any, dtype: str) -> Any:
    """A value cast to a type, unless it has it already."""
    return value if str(value.ty) == dtype else ir.tirx.Cast(dtype, value)


def _number(value: int) -> Any:
    return ir.tirx.const(value, _BITS)


def _word(number: int) -> Any:
    return ir.tirx.const(number, "uint32")


# Long sums that LLVM computes for TVM, in float64, where a GPU adds them up in parts.
#
# TVM's loops add one term after the other. Their errors grow with the number of terms, those of
# torch and of a GPU's threads with its logarithm.


_SUMMED, _SUMS = "float32", "float64"
#: Terms from which on a sum is long.
_LONG = 16


def exact_sums(func: Any) -> Any:
    """Take the long sums of float32 of an unscheduled function in float64, and round them once."""
    names = [each.name_hint for each in ir.nodes(func.body, ir.SBlock) if _is_long(each)]
    if not names:
        return func
    sch = ir.Schedule(func)
    wide: dict[Any, Any] = {}
    for name in names:
        block = sch.get_sblock(name)
        sch.cache_write(block, 0, "global")
        sums = sch.get(block).writes[0].source
        wide[sums] = ir.tirx.decl_buffer(list(sums.ty.shape), _SUMS, sums.name)
    return ir.with_body(func, _widened(sch.mod["main"].body, wide))


def _is_long(block: Any) -> bool:
    summed = [each.dom.extent for each in block.iter_vars if is_reduction(each)]
    if not summed or combiner_of(block) != "sum":
        return False
    terms = prod(ir.constant(each) or _LONG for each in summed)  # a symbolic extent may be any
    return terms >= _LONG and str(block.body.buffer.ty.dtype) == _SUMMED


def _widened(body: Any, wide: dict[Any, Any]) -> Any:
    """Have buffers that only sums and copies of them use hold wider numbers."""

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if node.source not in wide:
            return node
        return ir.tirx.Cast(_SUMMED, ir.tirx.BufferLoad(wide[node.source], list(node.indices)))

    def store(node: Any, mutator: Any) -> Any:
        if node.buffer not in wide:
            return mutator.default_mutate(node)
        buffer, indices = wide[node.buffer], list(node.indices)
        value = node.value
        if not isinstance(value, ir.tirx.Add):  # what the sum starts with
            return ir.BufferStore(buffer, ir.tirx.Cast(_SUMS, mutator.mutate(value)), indices)
        own = isinstance(value.a, ir.TensorLoad) and value.a.source.same_as(node.buffer)
        term = mutator.mutate(value.b if own else value.a)
        so_far = ir.tirx.BufferLoad(buffer, indices)
        return ir.BufferStore(buffer, so_far + ir.tirx.Cast(_SUMS, term), indices)

    callbacks = ((ir.TensorLoad, load), (ir.BufferStore, store), (ir.SBlock, of_buffers(wide)))
    return ir.mutate(body, *callbacks)
