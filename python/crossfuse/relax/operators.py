"""What a Relax operator does, read off its definition instead of a list of names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from tvm import relax, te, tirx, topi
from tvm.ir import Call, GenericConst, GlobalVar, Op, TensorLoad, Tuple, Var
from tvm.relax.transform.legalize_ops.binary import _binary
from tvm.s_tir import SBlock
from tvm_ffi import StructuralKey, WalkResult, structural_equal, structural_walk

from crossfuse.errors import Rule, WorkloadRefused

# ``relax.take`` as a function that reads where the index says, for ``LegalizeOps``.
#
# TVM's own is the same, but warns on standard error that indices beyond the end are not checked:
# torch, like the source of every importer, refuses such an index before a model runs.


def _take(builder: Any, call: Any) -> Any:
    """Legalise ``relax.take`` without TVM's warning."""
    data, indices = call.args
    axis, mode = call.attrs.axis, str(call.attrs.mode)
    if mode != "fast" or axis is None or not isinstance(indices.ty, relax.TensorType):
        return builder.call_te(topi.take, data, indices, axis, mode=mode)
    return builder.call_te(_gathered, data, indices, int(axis), primfunc_name_hint="take")


def _gathered(data: Any, indices: Any, axis: int) -> Any:
    at = axis % len(data.shape)
    inner = len(indices.shape)
    shape = [*data.shape[:at], *indices.shape, *data.shape[at + 1 :]]

    def read(*place: Any) -> Any:
        index = indices(*place[at : at + inner])
        return data(*place[:at], index, *place[at + inner :])

    return te.compute(shape, read, name="T_take", tag=topi.tag.INJECTIVE)


# ``relax.slice_scatter`` as one function that reads each element from where it is.
#
# TVM's own reads the part that is written at every place of the whole, beyond the part's end too,
# and leaves out what it read there: a cache of many rows that is given a few ends the process.


def _slice_scatter(builder: Any, call: Any) -> Any:
    """Legalise ``relax.slice_scatter`` without reads beyond the part."""
    axis = int(call.attrs.axis) % len(call.args[0].ty.shape.values)
    return builder.call_te(_with_part, *call.args, axis, primfunc_name_hint="slice_scatter")


def _with_part(whole: Any, part: Any, start: Any, end: Any, step: Any, axis: int) -> Any:
    def element(*place: Any) -> Any:
        ahead = place[axis] - start
        inside = [ahead >= 0, place[axis] < end, tirx.floormod(ahead, step) == 0]
        read = part(*place[:axis], tirx.floordiv(ahead, step), *place[axis + 1 :])
        return tirx.if_then_else(tirx.all(*inside), read, whole(*place))

    return te.compute(whole.shape, element, name="slice_scatter")


# Small integer powers as products, for ``LegalizeOps``.
#
# A GPU computes a general power by a logarithm and an exponential, which is slower, and with the
# fast math that TVM compiles with, the square of a negative number is NaN.

#: Exponents from 2 to this one are multiplied out.
HIGHEST = 4

Value = TypeVar("Value")


def multiplied_out(base: Value, exponent: int, multiply: Callable[[Value, Value], Value]) -> Value:
    """An integer power, 1 or more, as a chain of products of any kind of expression."""
    result = base
    for _ in range(1, exponent):
        result = multiply(result, base)
    return result


def _power(builder: Any, call: Any) -> Any:
    """Legalise ``relax.power``, small integer exponents as products."""
    base, exponent = call.args[0], scalar(call.args[1])
    if exponent is None or exponent not in range(2, HIGHEST + 1):
        if dtype_of(call.args[0]) == "bfloat16":
            return builder.call_te(_wide_power, *call.args, primfunc_name_hint="power")
        return _binary(topi.power)(builder, call)
    power = partial(multiplied_out, exponent=int(exponent), multiply=topi.multiply)
    return builder.call_te(power, base, primfunc_name_hint="power")


def _wide_power(base: Any, exponent: Any) -> te.Tensor:
    """A power of bfloat16, which TVM has none of, by way of float32."""
    if exponent.shape:
        wide = (topi.cast(each, "float32") for each in (base, exponent))
        return topi.cast(topi.power(*wide), "bfloat16")

    def power(*place: Any) -> Any:
        wide = (each.astype("float32") for each in (base(*place), exponent()))
        return tirx.pow(*wide).astype("bfloat16")

    return te.compute(base.shape, power, name="power", tag=topi.tag.ELEMWISE)


def _place(found: Callable[..., te.Tensor]) -> Callable[[Any, Any], Any]:
    """Legalise an argmax or argmin.

    TVM's is -1 where nothing is beyond the least or largest number of the type, such as in a row of
    infinities; that reads in front of a tensor.
    """

    def place(x: te.Tensor, axis: int | None, keepdims: bool) -> te.Tensor:
        at = found(x, axis, keepdims)
        return topi.maximum(at, tirx.const(0, at.dtype))

    def legal(builder: Any, call: Any) -> Any:
        options = (call.attrs.axis, call.attrs.keepdims)
        return builder.call_te(place, call.args[0], *options, primfunc_name_hint=found.__name__)

    return legal


def _instance_norm(builder: Any, call: Any) -> Any:
    """An instance norm by distances from means; see `_norm`."""
    options = (int(call.attrs.channel_axis), call.attrs.axes, call.attrs.epsilon)
    return builder.call_te(_norm, *call.args, *options, primfunc_name_hint="instance_norm")


def _group_norm(builder: Any, call: Any) -> Any:
    """A group norm by distances from means; see `_norm`."""
    groups, channel = int(call.attrs.num_groups), int(call.attrs.channel_axis)
    # Groups stand in front of their channels, which move all axes behind by one.
    axes = [channel + 1, *(int(each) + (int(each) > channel) for each in call.attrs.axes)]

    def norm(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor) -> te.Tensor:
        *outer, channels = x.shape[: channel + 1]
        parts = (groups, channels // groups)
        grouped = topi.reshape(x, (*outer, *parts, *x.shape[channel + 1 :]))
        scale, shift = (topi.reshape(each, parts) for each in (gamma, beta))
        return topi.reshape(
            _norm(grouped, scale, shift, channel, axes, call.attrs.epsilon), x.shape
        )

    return builder.call_te(norm, *call.args, primfunc_name_hint="group_norm")


def _norm(
    x: te.Tensor, gamma: te.Tensor, beta: te.Tensor, place: int, axes: Any, epsilon: float
) -> te.Tensor:
    """Elements over the deviation of some axes, scaled and moved; scales begin at an axis.

    TVM's own takes the square of the mean from the mean of squares: of elements about 1e4 with a
    deviation of 0.01 nothing is left, or a root of what is negative.
    """
    axes = [int(each) for each in axes]
    extents = tirx.const(1, "int64")
    for each in axes:
        extents = extents * x.shape[each]
    count = tirx.Cast(str(x.dtype), extents)
    apart = topi.subtract(x, topi.divide(topi.sum(x, axes, keepdims=True), count))
    squares = topi.sum(topi.multiply(apart, apart), axes, keepdims=True)
    spread = topi.add(topi.divide(squares, count), tirx.const(float(epsilon), str(x.dtype)))
    behind = [1] * (len(x.shape) - place - len(gamma.shape))
    scale, shift = (topi.reshape(each, (*each.shape, *behind)) for each in (gamma, beta))
    return topi.add(topi.multiply(topi.multiply(apart, topi.rsqrt(spread)), scale), shift)


#: For ``relax.transform.LegalizeOps``, by operator.
LEGAL = {
    "relax.nn.group_norm": _group_norm,
    "relax.nn.instance_norm": _instance_norm,
    "relax.take": _take,
    "relax.slice_scatter": _slice_scatter,
    "relax.power": _power,
    "relax.argmax": _place(topi.argmax),
    "relax.argmin": _place(topi.argmin),
}


def legal_once(values: Iterable[Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """`LEGAL` and TVM's own definitions of the operators among the values of one module's bindings.

    Equal calls share a definition, of which each takes TVM half a millisecond.
    """
    calls = (each for each in values if isinstance(each, Call) and isinstance(each.op, Op))
    own = {str(each.op.name): each.op.get_attr("FLegalize") for each in calls}
    every = {**own, **LEGAL}
    return {name: _once(every[name]) for name in own if every[name] is not None}


def _once(legal: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[Any, tuple[Any, list[int]]] = {}

    def found(builder: Any, call: Any) -> Any:
        given = [_place_of(each, call.args) for each in call.args]  # one tensor may be given twice
        key = StructuralKey([call.op, call.attrs, call.ty_args, given, *map(_kind, call.args)])
        if key in known:
            made, places = known[key]
            callee, _, *more = made.args
            taken = Tuple([call.args[each] for each in places])
            return Call(made.op, [callee, taken, *more], made.attrs, made.ty_args)
        made = legal(builder, call)
        taken = made.args[1] if isinstance(made, Call) and len(made.args) > 1 else None
        # What it calls may take other tensors than the operator, such as of several steps.
        if isinstance(taken, Tuple) and isinstance(made.args[0], GlobalVar):
            places = [_place_of(each, call.args) for each in taken.fields]
            if -1 not in places:
                known[key] = made, places
        return made

    return found


def _kind(argument: Any) -> Any:
    """What the definition of an operator depends on: numbers and constants, and types of others."""
    return argument.ty if isinstance(argument, Var) else argument


def _place_of(value: Any, given: Sequence[Any]) -> int:
    """Place of the first argument that is a value; -1 without any."""
    return next((place for place, each in enumerate(given) if each.same_as(value)), -1)


RULE = "outline"

refused = Rule(WorkloadRefused, RULE)

PRODUCT = "relax.matmul"
CAST = "relax.astype"
TRANSPOSE = "relax.permute_dims"
# Row-major order is kept, so on matrices of collapsed rows they do nothing.
RESHAPES = frozenset(
    f"relax.{name}"
    for name in ("reshape", "squeeze", "expand_dims", "flatten", "broadcast_to", "view")
)
_KNOWN = "matrix products by weights, element-wise operators, casts and reshapes"
_ALONE = "outline the feed-forward part alone"


def operator(call: Any) -> str:
    """Name of a call's operator, such as ``"relax.add"``.

    Calls of functions and of kernels that are already lowered are refused.
    """
    if isinstance(call, Call) and isinstance(call.op, Op) and call.op.name != "relax.call_tir":
        return str(call.op.name)
    found = f"a {type(call).__name__}"
    if isinstance(call, Call):
        names = (getattr(call.op, key, "") for key in ("name", "name_hint", "global_symbol"))
        found = f"a call of {next(filter(None, names), call.op)}"
    raise refused("main", found, "calls of Relax operators", "pass the model before LegalizeOps")


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """Static shape of a Relax tensor; tuples and dynamic shapes are refused, naming `where`."""
    if not isinstance(value.ty, relax.TensorType):
        found = "several results" if isinstance(value.ty, relax.TupleType) else str(value.ty)
        raise refused(where, found, "one tensor", "replace the operator by one with one result")
    extents = getattr(value.ty.shape, "values", None)
    if extents is None or not all(isinstance(extent, tirx.IntImm) for extent in extents):
        advice = "export the model with the extents it is to run at"
        found = f"the dynamic shape {value.ty.shape}"
        raise refused(where, found, "static shapes", advice)
    return tuple(int(extent) for extent in extents)


def dtype_of(value: Any) -> str:
    """Element type of a Relax tensor, such as ``"float16"``."""
    return str(value.ty.dtype)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, rather than a shape or a number."""
    return isinstance(getattr(value, "ty", None), relax.TensorType)


def scalar(value: Any) -> float | None:
    """Value of a constant with one element, else None."""
    if isinstance(value, GenericConst) and is_tensor(value):
        array = value.value.numpy()
        return float(array.reshape(())) if array.size == 1 else None
    return None


def check_elementwise(call: Call) -> None:
    """Refuse an operator unless each result element depends on those at its own place alone."""
    reason = _fault(call)
    if reason:
        raise refused(operator(call), f"an operator that {reason}", _KNOWN, _ALONE)


#: Why operators of some types are not element-wise; None of those that are. Equal layers repeat
#: their calls, and TVM takes a millisecond for a definition.
_FAULTS: dict[StructuralKey, str | None] = {}


def _fault(call: Call) -> str | None:
    given = (each.ty if is_tensor(each) or isinstance(each, Tuple) else each for each in call.args)
    key = StructuralKey([call.op, call.attrs, call.ty_args, *given])
    if key not in _FAULTS:
        _FAULTS[key] = _fault_of_definition(call)
    return _FAULTS[key]


def _fault_of_definition(call: Call) -> str | None:
    functions = _definition(call)
    if not functions:
        return "has no definition in TIR"
    blocks: list[SBlock] = []
    for function in functions:
        structural_walk(function, (SBlock, blocks.append))
    blocks = [block for block in blocks if block.iter_vars or block.name_hint != "root"]
    if any(axis.iter_type != 0 for block in blocks for axis in block.iter_vars):
        return "reduces over an axis"
    if not all(_keeps_places(block) for block in blocks):
        return "moves elements or depends on their place"
    return None


def _definition(call: Call) -> list[tirx.PrimFunc]:
    """Legalise one call in a module of its own; nothing if TVM has no definition."""
    # Some operators are not defined in bfloat16, of which TVM says on standard error that it began
    # one; all move elements as little there as in float32.
    return _legalised(call, wide=True) or _legalised(call, wide=False)


def _legalised(call: Call, wide: bool) -> list[tirx.PrimFunc]:
    tensors = [argument for argument in call.args if is_tensor(argument)]
    kinds = [_wide(tensor) if wide else tensor.ty for tensor in tensors]
    variables = [relax.Var(f"x{i}", kind) for i, kind in enumerate(kinds)]
    remaining = iter(variables)
    arguments = [next(remaining) if is_tensor(a) else a for a in call.args]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        clone = Call(call.op, arguments, call.attrs, call.ty_args)
        builder.emit_func_output(builder.emit(clone))
    try:
        mod = relax.transform.LegalizeOps(dict(LEGAL))(builder.get())
    except Exception:  # legalisers raise whatever they like; the caller names the operator
        return []
    return [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]


def _wide(tensor: Any) -> Any:
    """The type of a tensor, with float32 for bfloat16."""
    dtype = dtype_of(tensor)
    return relax.TensorType(tensor.ty.shape, "float32" if dtype == "bfloat16" else dtype)


def _keeps_places(block: SBlock) -> bool:
    """Whether all loads are at the block's own place, and the place is used for nothing else."""
    if not isinstance(block.body, tirx.BufferStore):
        return False
    axes = [axis.var for axis in block.iter_vars]
    if len(block.body.indices) != len(axes):
        return False  # one number, for which TVM makes an axis of extent one
    loads: list[Any] = []
    others: list[Any] = []

    def load(node: Any) -> WalkResult:
        loads.append(node)
        return WalkResult.SKIP

    structural_walk(block.body.value, [(TensorLoad, load), (Var, others.append)], order="pre")
    if any(other.same_as(axis) for other in others for axis in axes):
        return False
    own = all(index.same_as(axis) for index, axis in zip(block.body.indices, axes, strict=True))
    return own and all(_at_place(node, block) for node in loads)


def _at_place(load: Any, block: SBlock) -> bool:
    """Whether a load follows numpy's broadcasting to the block's domain."""
    indices, shape = list(load.indices), list(load.source.ty.shape)
    axes = list(block.iter_vars)[len(block.iter_vars) - len(indices) :]
    if len(indices) > len(axes):
        return False
    return all(
        (index.same_as(axis.var) and _equal(extent, axis.dom.extent))
        or (isinstance(index, tirx.IntImm) and int(index) == 0 and _equal(extent, 1))
        for index, extent, axis in zip(indices, shape, axes, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether two extents, perhaps dynamic, are the same; integer types do not matter."""
    numbers = (int, tirx.IntImm)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return int(one) == int(other)
    return bool(structural_equal(one, other))
