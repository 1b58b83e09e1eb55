"""Functions on 8-bit floats as the same functions on float32, for the sequential check.

TVM's conversions to and from 8-bit floats on the CPU are wrong: of zeros, denormals and infinities,
and what is widened at once is not rounded at all. Every 8-bit float is a float32, so what copies,
compares and widens them computes the same on float32 buffers, with roundings as arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.workload.dtypes import float_type

_WIDE = "float32"
_NARROW = "float8"
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
    return dtype.startswith(_NARROW)


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
