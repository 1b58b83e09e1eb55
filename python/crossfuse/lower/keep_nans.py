"""Element-wise maxima and minima of floats as operators that are NaN where an operand is.

Chains, cascades and models are read and rewritten with TVM's own `Max` and `Min`. Before they
become loops or instructions, those that are no step of a reduction are replaced: see
`crossfuse.lower.keep_nans`. A reduction's own stay, in words and in instructions.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.files import packaged_text
from crossfuse.workload.dtypes import is_float

_ABS = "tirx.fabs"


class Kind(IntEnum):
    """What an expression can evaluate to: a number, NaN, or what reductions yield."""

    #: A number or NaN.
    ANY = 0
    #: Never NaN, such as a constant.
    NUMBER = 1
    #: Never NaN, because it stems from a reduction by `Max` or `Min`, which drop NaN.
    EXTREME = 2


class Kinds:
    """Infers which expressions of a function may be NaN.

    A fixed point over buffers and variables: each has the kind of everything that is stored to it,
    so that one which only takes part in its own maximum is an extreme. All start as extremes, and
    lose that until nothing changes.
    """

    def __init__(self, func: Any) -> None:
        self._values: dict[Any, list[tuple[Any, Any]]] = {}
        self._shared: set[Any] = set()
        ir.walk(
            func.body,
            (ir.BufferStore, self._store),
            (ir.Bind, self._bind),
            (ir.Call, self._call),
            (ir.SBlock, self._views),
        )
        self._names = {name: Kind.EXTREME for name in self._values if name not in self._shared}
        for each in func.params:
            self._check_start(each)
        while self._step():
            pass

    def _store(self, node: Any) -> None:
        if is_float(str(node.buffer.ty.dtype)):
            self._values.setdefault(node.buffer, []).append((node.value, node.buffer))

    def _bind(self, node: Any) -> None:
        if is_float(str(node.var.ty)):
            self._values.setdefault(node.var, []).append((node.value, None))

    def _call(self, node: Any) -> None:
        """A buffer whose address is passed to a call may be written there."""
        for each in node.args:
            source = each.source if isinstance(each, ir.TensorLoad) else each
            taken = not isinstance(each, ir.TensorLoad) or node.op.name == "tirx.address_of"
            if taken and isinstance(source, ir.Var) and ir.is_buffer_var(source):
                self._shared.add(source)

    def _views(self, block: Any) -> None:
        for each in block.match_buffers:
            self._shared |= {each.buffer, each.source.source}

    def _check_start(self, parameter: Any) -> None:
        """A parameter that is not set to a number first holds whatever the caller had in it."""
        values = self._values.get(parameter, [])
        if not any(isinstance(value, ir.tirx.FloatImm) for value, _ in values):
            self._names.pop(parameter, None)

    def _step(self) -> bool:
        found = {
            name: self._joined([self.of(value, buffer) for value, buffer in self._values[name]])
            for name in self._names
        }
        changed = found != self._names
        self._names = found
        return changed

    def _joined(self, kinds: list[Kind]) -> Kind:
        return max(kinds) if min(kinds) else Kind.ANY

    def reduces(self, node: Any, buffer: Any = None) -> bool:
        """Whether a maximum or minimum of floats, stored to `buffer` if given, updates a reduction.

        True also of one that reads what a reduction found.
        """
        return self._of_extreme(node, buffer) == Kind.EXTREME

    def of(self, value: Any, buffer: Any = None) -> Kind:
        """The kind of an expression, which may be what is stored to `buffer`."""
        if not is_float(str(value.ty)):
            return Kind.NUMBER
        if isinstance(value, ir.tirx.FloatImm):
            return Kind.ANY if math.isnan(value.value) else Kind.NUMBER
        if isinstance(value, ir.TensorLoad | ir.Var):
            name = value.source if isinstance(value, ir.TensorLoad) else value
            return self._names.get(name, Kind.ANY)
        if isinstance(value, ir.tirx.Cast):
            return self.of(value.value)
        if isinstance(value, ir.tirx.Max | ir.tirx.Min):
            return self._of_extreme(value, buffer)
        return self._computed(value)

    def _of_extreme(self, node: Any, buffer: Any) -> Kind:
        sides = (node.a, node.b)
        kinds = [self.of(each) for each in sides]
        if Kind.EXTREME in kinds:
            return Kind.EXTREME
        own = any(isinstance(e, ir.TensorLoad) and e.source.same_as(buffer) for e in sides)
        if own and not any(isinstance(each, ir.tirx.FloatImm) for each in sides):
            return Kind.EXTREME
        return self._joined(kinds)

    def _computed(self, value: Any) -> Kind:
        """The kind of an expression that selects or scales."""
        if isinstance(value, ir.tirx.Select):
            return self._joined([self.of(value.true_value), self.of(value.false_value)])
        if isinstance(value, ir.tirx.Mul | ir.tirx.Div | ir.tirx.Add | ir.tirx.Sub):
            number, rest = value.b, value.a
            if isinstance(rest, ir.tirx.FloatImm) and not isinstance(value, ir.tirx.Div):
                number, rest = rest, number
            # Zero times infinity is NaN, and so is the difference of two infinities.
            plain = isinstance(number, ir.tirx.FloatImm) and math.isfinite(number.value)
            return self.of(rest) if plain and number.value != 0 else Kind.ANY
        if isinstance(value, ir.Call) and isinstance(value.op, ir.Op):
            name = str(value.op.name)
            if name == ir.IF_THEN_ELSE:
                return self._joined([self.of(value.args[1]), self.of(value.args[2])])
            if name == _ABS:
                return self.of(value.args[0])
        return Kind.ANY


# Operators of TIR for maxima and minima that are NaN where an operand is, as torch's are.
#
# TVM's own `Max` and `Min` are ``fmaxf`` and ``fminf`` in CUDA, which drop NaN, and in LLVM a
# comparison, which drops it from one side.

#: Of two float32 or float64, or of vectors of them.
MAXIMUM, MINIMUM = "tirx.crossfuse_maximum", "tirx.crossfuse_minimum"
#: Numbers at once for which there is a helper in `device/extremes.cuh`.
_LANES = (1, 2, 4)


def extreme(name: str, one: Any, other: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` on operands of one float type, with a result of that type.

    Types of fewer than 32 bits are compared in float32, since the operators take none of them.
    """
    dtype = ir.tvm.DataType(str(one.ty))
    if dtype.bits >= 32:
        return _call(name, one, other)
    wide = "float32" if dtype.lanes == 1 else f"float32x{dtype.lanes}"
    return ir.tirx.Cast(str(dtype), _call(name, one.astype(wide), other.astype(wide)))


def _call(name: str, one: Any, other: Any) -> Any:
    return ir.Call(ir.Op.get(name), [one, other], ret_ty=str(one.ty))


def on_cuda(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` as one of the device helper."""
    dtype = ir.tvm.DataType(str(call.ty))
    if dtype.bits != 32 or dtype.lanes not in _LANES:
        return elsewhere(call)
    name = str(call.op.name).removeprefix("tirx.")
    text = packaged_text("crossfuse.lower", "device/extremes.cuh")
    return ir.cuda_func_call(name, *call.args, source_code=text, return_type=str(call.ty))


def on_llvm(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` as one of LLVM's intrinsic."""
    name = str(call.op.name).removeprefix("tirx.crossfuse_")
    return ir.tirx.call_llvm_pure_intrin(str(call.ty), f"llvm.{name}", *call.args)


def elsewhere(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` by comparisons, which are false for NaN.

    TVM would simplify NaN away, since ``x == x`` is true to it; nothing is simplified at that
    stage.
    """
    one, other = call.args
    further = ir.tirx.LT if str(call.op.name) == MAXIMUM else ir.tirx.GT
    number = ir.tirx.Select(ir.tirx.EQ(other, other), one, other)
    return ir.tirx.Select(further(one, other), other, number)


#: Attribute of functions that are done.
KEPT = "crossfuse.keeps_nans"
_NAMES = {ir.tirx.Max: MAXIMUM, ir.tirx.Min: MINIMUM}


def keep_nans(func: Any) -> Any:
    """Have element-wise maxima and minima of a function give NaN where an operand is NaN.

    It runs before vectors are made. What only numbers go into stays, and so does what updates or
    reads the extreme of a reduction, which is a number. Without any such operator the function
    itself is returned.
    """
    if KEPT in (func.attrs or {}) or not _has_extremes(func.body):
        return func
    body = _Rewriter(Kinds(func)).rewritten(func.body)
    return ir.with_body(func, body).with_attr(KEPT, True)


def _has_extremes(body: Any) -> bool:
    return any(is_float(str(each.ty)) for each in ir.nodes(body, *_NAMES))


class _Rewriter:
    """Replaces element-wise maxima and minima of one function."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._buffer: Any = None

    def rewritten(self, body: Any) -> Any:
        return ir.mutate(
            body,
            (ir.BufferStore, self._store),
            (ir.tirx.Cast, self._cast),
            *((each, self._extreme) for each in _NAMES),
        )

    def _store(self, node: Any, mutator: Any) -> Any:
        outer, self._buffer = self._buffer, node.buffer
        node = mutator.default_mutate(node)
        self._buffer = outer
        return node

    def _cast(self, node: Any, mutator: Any) -> Any:
        # Of what becomes an integer NaN has no meaning, and places must stay in their tensor.
        return mutator.default_mutate(node) if is_float(str(node.ty)) else node

    def _extreme(self, node: Any, mutator: Any) -> Any:
        if not is_float(str(node.ty)):
            return mutator.default_mutate(node)
        kinds = self._kinds
        if kinds.reduces(node, self._buffer) or kinds.of(node) >= Kind.NUMBER:
            # What a step chooses among is the same as where else it is made, to be made once.
            return mutator.default_mutate(node)
        return extreme(_NAMES[type(node)], mutator.mutate(node.a), mutator.mutate(node.b))
