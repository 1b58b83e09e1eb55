"""What of floats TVM's LLVM code generator computes otherwise than a GPU does.

That is some operators, conversions to few bits, functions on 8-bit floats, and long sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import combiner_of, is_reduction
from crossfuse.workload.dtypes import float_type, is_float

_TANH = "tirx.tanh"
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


# Conversions that TVM's LLVM code generator gets wrong, by the bits, for functions of models.
#
# Those to and from 8-bit floats are wrong of zeros, denormals and infinities; and what is rounded
# to bfloat16 or to 8 bits and widened at once is not rounded at all. `widen` gives the sequential
# check float32 tensors instead, which a model's other functions would not take.


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

    def block(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        reads, writes = (
            [ir.tirx.BufferRegion(wide.get(e.source, e.source), e.region) for e in regions]
            for regions in (node.reads, node.writes)
        )
        allocated = [wide.get(each, each) for each in node.alloc_buffers]
        return ir.block_like(node, reads=reads, writes=writes, alloc_buffers=allocated)

    callbacks = ((ir.TensorLoad, load), (ir.BufferStore, store), (ir.SBlock, block))
    return ir.mutate(body, *callbacks)


# Functions on 8-bit floats as the same functions on float32, for the sequential check.
#
# TVM's conversions to and from 8-bit floats on the CPU are wrong: of zeros, denormals and
# infinities, and what is widened at once is not rounded at all. Every 8-bit float is a float32,
# so what copies, compares and widens them computes the same on float32 buffers, with roundings as
# arithmetic.

_EIGHT_BITS = "float8"
_COMPARED = ("Min", "Max", "EQ", "NE", "LT", "LE", "GT", "GE")
_COMPUTED = ("Add", "Sub", "Mul", "Div")
#: A float32: bits of its exponent, and those but its sign.
_EXPONENT, _MAGNITUDE = 0x7F800000, 0x7FFFFFFF


def widen(func: Any) -> Any:
    """Give the 8-bit floating-point buffers of a function float32 elements.

    The function is unchanged if it has none, or computes with such numbers without converting them.
    """
    if _computes(func.body):
        return func
    images: dict[Any, Any] = {}
    roundings: list[Any] = []

    def image(buffer: Any) -> Any:
        if not _is_narrow(str(buffer.ty.dtype)):
            return buffer
        if buffer not in images:
            kind, scope = buffer.ty, str(buffer.scope())
            images[buffer] = ir.tirx.decl_buffer(list(kind.shape), _WIDE, buffer.name, scope=scope)
        return images[buffer]

    def convert(value: Any, dtype: str) -> Any:
        if not _is_narrow(dtype):
            return converted(value, dtype)
        roundings.append(rounded(value, dtype))
        return roundings[-1]

    params = [image(each) if ir.is_buffer_var(each) else each for each in func.params]
    body = retyped(func.body, image, convert, rebuilt(_type_of, _COMPARED))
    if not images and not roundings:
        return func
    return ir.PrimFunc(params, body, func.ret_type, func.attrs)


def rounded(value: Any, dtype: str) -> Any:
    """A number rounded to an 8-bit float type, as a float32.

    To nearest even; what is too large becomes the largest number, as CUDA's conversions saturate.
    """
    kind, t = float_type(dtype), ir.tirx
    value = converted(value, _WIDE)
    largest = t.FloatImm(_WIDE, kind.largest)
    bounded = t.Max(t.Min(value, largest), -largest)
    # A power of two: the exponent alone. Below the least one distances are those of denormals.
    power = t.reinterpret(_WIDE, t.bitwise_and(t.reinterpret("uint32", bounded), _bits(_EXPONENT)))
    step = t.Max(power * t.FloatImm(_WIDE, 2 * kind.unit), t.FloatImm(_WIDE, kind.smallest))
    magnitude = t.bitwise_and(t.reinterpret("uint32", value), _bits(_MAGNITUDE))
    nearest = t.nearbyint(bounded / step) * step
    return t.Select(t.GT(magnitude, _bits(_EXPONENT)), value, nearest)


def converted(value: Any, dtype: str) -> Any:
    """A value cast to a type, unless it has it already."""
    return value if str(value.ty) == dtype else ir.tirx.Cast(dtype, value)


def _is_narrow(dtype: str) -> bool:
    return dtype.startswith(_EIGHT_BITS)


def _bits(number: int) -> Any:
    return ir.tirx.const(number, "uint32")


def _type_of(dtype: str) -> str:
    return _WIDE if _is_narrow(dtype) else dtype


def _computes(body: Any) -> bool:
    """Whether an 8-bit float occurs that is not just loaded, converted, compared or selected."""
    variables = (each for each in ir.nodes(body, ir.Var) if not ir.is_buffer_var(each))
    computed = ir.nodes(body, ir.Call, *(getattr(ir.tirx, each) for each in _COMPUTED))
    used = (*variables, *computed)
    return any(_is_narrow(str(each.ty)) and not _chooses(each) for each in used)


def _chooses(node: Any) -> bool:
    return isinstance(node, ir.Call) and node.op.same_as(ir.Op.get(ir.IF_THEN_ELSE))


def rebuilt(
    type_of: Callable[[str], str], operators: Sequence[str]
) -> list[tuple[type, Callable[[Any, Any], Any]]]:
    """Callbacks of `crossfuse._tvm.mutate` that rebuild expressions from operands of other types.

    `type_of` maps a type to its replacement; `operators` names binary operators.
    """

    def number(node: Any, _: Any) -> Any:
        return ir.tirx.FloatImm(type_of(str(node.ty)), float(node.value))

    def operator(node: Any, mutator: Any) -> Any:
        return type(node)(mutator.mutate(node.a), mutator.mutate(node.b))

    def select(node: Any, mutator: Any) -> Any:
        parts = (node.condition, node.true_value, node.false_value)
        return ir.tirx.Select(*map(mutator.mutate, parts))

    def call(node: Any, mutator: Any) -> Any:
        arguments = [mutator.mutate(each) for each in node.args]
        return ir.Call(node.op, arguments, ret_ty=type_of(str(node.ty)))

    return [
        (ir.tirx.FloatImm, number),
        *((getattr(ir.tirx, each), operator) for each in operators),
        (ir.tirx.Select, select),
        (ir.Call, call),
    ]


def retyped(
    body: Any,
    image: Callable[[Any], Any],
    convert: Callable[[Any, str], Any],
    callbacks: Sequence[tuple[type, Any]] = (),
) -> Any:
    """Give the buffers of a statement other types.

    `image` gives the replacement of a buffer, or the buffer itself. `convert` makes the value of a
    cast to a type. `callbacks` handle other nodes, as in `crossfuse._tvm.mutate`.
    """

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return ir.tirx.BufferLoad(image(node.source), list(node.indices))

    def store(node: Any, mutator: Any) -> Any:
        value = mutator.mutate(node.value)
        indices = [mutator.mutate(each) for each in node.indices]
        return ir.BufferStore(image(node.buffer), value, indices)

    def cast(node: Any, mutator: Any) -> Any:
        return convert(mutator.mutate(node.value), str(node.ty))

    def block(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        reads, writes = (
            [ir.tirx.BufferRegion(image(each.source), each.region) for each in regions]
            for regions in (node.reads, node.writes)
        )
        allocated = [image(each) for each in node.alloc_buffers]
        return ir.block_like(node, reads=reads, writes=writes, alloc_buffers=allocated)

    return ir.mutate(
        body,
        (ir.TensorLoad, load),
        (ir.BufferStore, store),
        (ir.tirx.Cast, cast),
        (ir.SBlock, block),
        *callbacks,
    )
