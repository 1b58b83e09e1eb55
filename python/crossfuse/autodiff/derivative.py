"""Derivatives of scalar expressions by the loads in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, pi, sqrt
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.autodiff.program import refused
from crossfuse.blocks import access

#: Derivatives by loads; a load is named by its buffer and its indices.
_Partials = dict[tuple[Any, ...], "Partial"]


@dataclass(frozen=True, eq=False)
class Partial:
    """What a value changes by with an element that it loads.

    Loads under a choice are loads under the same choice here: the derivative may be computed
    wherever the value may.
    """

    load: Any
    value: Any


def partials(value: Any, is_active: Callable[[Any], bool], where: str) -> list[Partial]:
    """Derivatives of a value by its loads from active buffers, those of one element summed.

    Conditions, indices and roundings have none. Refused are operators without a rule.
    """
    plain = _with_plain_indices(value, is_active, where)
    return list(_Derivative(is_active, where).of(plain).values())


def _with_plain_indices(value: Any, is_active: Callable[[Any], bool], where: str) -> Any:
    """A value whose active loads have no choices in their indices."""
    # Not in the callback, through which a refusal would come as an error of TVM.
    images = {
        ir.tvm_ffi.StructuralKey(load): lifted(load, where)
        for load in ir.buffer_loads(value)
        if is_active(load.source)
    }

    def lift(load: Any, mutator: Any) -> Any:
        load = mutator.default_mutate(load)
        return images.get(ir.tvm_ffi.StructuralKey(load), load)

    return ir.mutate(value, (ir.TensorLoad, lift)) if images else value


def is_float(dtype: Any) -> bool:
    """Whether a type has derivatives."""
    return "float" in str(dtype)


class _Derivative:
    def __init__(self, is_active: Callable[[Any], bool], where: str) -> None:
        self._is_active = is_active
        self._where = where

    def of(self, value: Any) -> _Partials:
        if not is_float(value.ty) or not self._depends(value):
            return {}
        if isinstance(value, ir.TensorLoad):
            key = (value.source, *map(ir.tvm_ffi.StructuralKey, value.indices))
            return {key: Partial(value, ir.tirx.const(1.0, str(value.ty)))}
        if isinstance(value, ir.tirx.Cast):
            return self._scaled(value.value, lambda each: _no_narrower(each, str(value.ty)))
        if isinstance(value, ir.Call):
            return self._call(value)
        if isinstance(value, ir.tirx.Select):
            return self._choice(value.condition, value.true_value, value.false_value)
        rule = _OF_PAIRS.get(type(value))
        if rule is None:
            raise self._unknown(value, f"operator {type(value).__name__}")
        return self._pair(rule, value.a, value.b)

    def _depends(self, value: Any) -> bool:
        """Whether a value has an active load outside of conditions and indices, or inside."""
        return any(self._is_active(each.source) for each in ir.buffer_loads(value))

    def _unknown(self, value: Any, found: str) -> Exception:
        limit = "sums, products, quotients, maxima, minima, choices, casts, and functions " + (
            ", ".join(sorted({*_OF_FUNCTIONS, *_OF_CALLS} - _OTHER_NAMES))
        )
        instead = "write it with these, or leave the input out of wrt"
        return refused(self._where, f"{found} in {value}", limit, instead)

    def _scaled(self, value: Any, scale: Callable[[Any], Any]) -> _Partials:
        found = self.of(value)
        return {key: Partial(each.load, linear(scale, each.value)) for key, each in found.items()}

    def _pair(self, rule: _Rule, one: Any, other: Any) -> _Partials:
        by_one, by_other = rule(one, other)
        return _joined(self._scaled(one, by_one), self._scaled(other, by_other))

    def _choice(self, condition: Any, yes: Any, no: Any) -> _Partials:
        taken = {
            key: Partial(each.load, choose(condition, each.value, zero_like(each.value)))
            for key, each in self.of(yes).items()
        }
        other = {
            key: Partial(each.load, choose(condition, zero_like(each.value), each.value))
            for key, each in self.of(no).items()
        }
        return _joined(taken, other)

    def _call(self, value: Any) -> _Partials:
        if is_choice(value):
            return self._choice(*value.args)
        full = str(getattr(value.op, "name", value.op))
        name = full.rpartition(".")[2]
        if name in _FLAT:
            return {}
        if name in _OF_FUNCTIONS:
            (argument,) = value.args
            factor = _OF_FUNCTIONS[name](argument, value)
            return self._scaled(argument, lambda each: times(factor, each))
        if name in _OF_CALLS:
            return self._pair(_OF_CALLS[name], *value.args)
        raise self._unknown(value, f"function {full}")


def _joined(one: _Partials, other: _Partials) -> _Partials:
    found = dict(one)
    for key, each in other.items():
        sums = each.value
        if key in found:
            one, more = matched(found[key].value, sums)
            sums = one + more
        found[key] = Partial(each.load, sums)
    return found


def matched(one: Any, other: Any) -> tuple[Any, Any]:
    """Two factors or addends, the narrower one in the type of the other."""
    if _bits(one) < _bits(other):
        return one.astype(str(other.ty)), other
    return one, other.astype(str(one.ty))


def _bits(value: Any) -> int:
    return int(ir.tvm.DataType(str(value.ty)).bits)


def _no_narrower(value: Any, dtype: str) -> Any:
    """A derivative behind a cast, which rounds what it is of and not the derivative itself."""
    narrower = int(ir.tvm.DataType(dtype).bits) < _bits(value)
    return value if narrower else value.astype(dtype)


def times(one: Any, other: Any) -> Any:
    """A product in the wider type, where a factor of 1 is left out."""
    one, other = matched(one, other)
    if is_number(one, 1):
        return other
    return one if is_number(other, 1) else one * other


def _over(one: Any, other: Any) -> Any:
    one, other = matched(one, other)
    return one / other


# Rules for two operands: each gives, for both, what to do with the operand's own derivative.

_Scale = Callable[[Any], Any]
_Rule = Callable[[Any, Any], tuple[_Scale, _Scale]]


def _same(each: Any) -> Any:
    return each


def _negative(each: Any) -> Any:
    return zero_like(each) - each


def _by(factor: Any) -> _Scale:
    return lambda each: times(factor, each)


def _quotient(a: Any, b: Any) -> tuple[_Scale, _Scale]:
    return lambda each: _over(each, b), lambda each: _negative(times(a / b / b, each))


def _larger(a: Any, b: Any) -> tuple[_Scale, _Scale]:
    """The larger one counts; of two equal ones each half."""
    return _shared(a >= b, a, b), _shared(b >= a, a, b)


def _smaller(a: Any, b: Any) -> tuple[_Scale, _Scale]:
    return _shared(a <= b, a, b), _shared(b <= a, a, b)


def _shared(counts: Any, a: Any, b: Any) -> _Scale:
    def scale(each: Any) -> Any:
        half = times(number_like(0.5, each), each)
        return choose(counts, choose(ir.tirx.EQ(a, b), half, each), zero_like(each))

    return scale


def _power(a: Any, b: Any) -> tuple[_Scale, _Scale]:
    exponent = float(b.value) if isinstance(b, ir.tirx.FloatImm) else None
    if exponent is None:
        base = choose(ir.tirx.EQ(b, zero_like(b)), zero_like(b), b * ir.tirx.pow(a, b - 1.0))
    elif exponent in (0.0, 1.0):
        base = number_like(exponent, a)
    elif exponent == 2.0:
        base = number_like(2, a) * a
    else:
        base = b * ir.tirx.pow(a, number_like(exponent - 1, b))
    # As torch has it: 0**b is 0 for b > 0, whatever becomes of the logarithm.
    nothing = ir.tirx.And(ir.tirx.EQ(a, zero_like(a)), b >= zero_like(b))
    grown = choose(nothing, zero_like(a), ir.tirx.pow(a, b) * ir.tirx.log(a))
    return _by(base), _by(grown)


def _remainder(rounded: Callable[[Any], Any]) -> _Rule:
    return lambda a, b: (_same, lambda each: _negative(times(rounded(a / b), each)))


def _angle(a: Any, b: Any) -> tuple[_Scale, _Scale]:
    square = a * a + b * b
    return _by(b / square), lambda each: _negative(times(a / square, each))


def _hypotenuse(a: Any, b: Any) -> tuple[_Scale, _Scale]:
    found = ir.tirx.hypot(a, b)
    return _by(a / found), _by(b / found)


_OF_PAIRS: dict[Any, _Rule] = {
    ir.tirx.Add: lambda a, b: (_same, _same),
    ir.tirx.Sub: lambda a, b: (_same, _negative),
    ir.tirx.Mul: lambda a, b: (_by(b), _by(a)),
    ir.tirx.Div: _quotient,
    ir.tirx.Max: _larger,
    ir.tirx.Min: _smaller,
    ir.tirx.FloorMod: _remainder(ir.tirx.floor),
    ir.tirx.Mod: _remainder(ir.tirx.trunc),
    ir.tirx.FloorDiv: lambda a, b: (zero_like, zero_like),
}
_OF_CALLS: dict[str, _Rule] = {
    "pow": _power,
    "atan2": _angle,
    "hypot": _hypotenuse,
    "fmod": _remainder(ir.tirx.trunc),
}


# Functions of one number: from the argument x and the value y itself, the derivative.

#: Steps, whose derivative is 0.
_FLAT = frozenset({"floor", "ceil", "trunc", "round", "nearbyint"})


def _sign(x: Any) -> Any:
    plus, minus = number_like(1, x), number_like(-1, x)
    falling = choose(x < zero_like(x), minus, zero_like(x))
    return choose(x > zero_like(x), plus, falling)


def _bell(x: Any) -> Any:
    return number_like(2 / sqrt(pi), x) * ir.tirx.exp(zero_like(x) - x * x)


def _one(x: Any) -> Any:
    return number_like(1, x)


_OF_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda x, y: y,
    "exp2": lambda x, y: y * number_like(log(2), x),
    "exp10": lambda x, y: y * number_like(log(10), x),
    "log": lambda x, y: _one(x) / x,
    "log2": lambda x, y: number_like(1 / log(2), x) / x,
    "log10": lambda x, y: number_like(1 / log(10), x) / x,
    "log1p": lambda x, y: _one(x) / (_one(x) + x),
    "sqrt": lambda x, y: number_like(0.5, x) / y,
    "rsqrt": lambda x, y: number_like(-0.5, x) * y / x,
    "abs": lambda x, y: _sign(x),
    "fabs": lambda x, y: _sign(x),
    "tanh": lambda x, y: _one(x) - y * y,
    "sigmoid": lambda x, y: y * (_one(x) - y),
    "erf": lambda x, y: _bell(x),
    "sin": lambda x, y: ir.tirx.cos(x),
    "cos": lambda x, y: zero_like(x) - ir.tirx.sin(x),
    "tan": lambda x, y: _one(x) + y * y,
    "asin": lambda x, y: _one(x) / ir.tirx.sqrt(_one(x) - x * x),
    "acos": lambda x, y: number_like(-1, x) / ir.tirx.sqrt(_one(x) - x * x),
    "atan": lambda x, y: _one(x) / (_one(x) + x * x),
    "sinh": lambda x, y: ir.tirx.cosh(x),
    "cosh": lambda x, y: ir.tirx.sinh(x),
    "asinh": lambda x, y: _one(x) / ir.tirx.sqrt(x * x + _one(x)),
    "acosh": lambda x, y: _one(x) / ir.tirx.sqrt(x * x - _one(x)),
    "atanh": lambda x, y: _one(x) / (_one(x) - x * x),
}
_OTHER_NAMES = frozenset({"fabs"})


# Choices between expressions: made, simplified, and taken out of indices.


#: How often an index may choose between others: every choice doubles what is gathered.
_MOST_CHOICES = 6


def is_choice(value: Any) -> bool:
    """Whether an expression computes one of two others."""
    return isinstance(value, ir.Call) and str(getattr(value.op, "name", "")) == ir.IF_THEN_ELSE


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """A choice that computes the side that it takes, and no other.

    TVM joins the conditions of a choice in a choice where both have the same other side, and may
    then compute all of them. So one that loads is kept behind one that says whether it may: the
    outer one, which knows loop variables alone, is turned round.
    """
    if _asks_data(yes) and not ir.buffer_loads(condition):
        condition, yes, no = ir.tirx.Not(condition), no, yes
    return ir.Call(ir.Op.get(ir.IF_THEN_ELSE), [condition, yes, no], ret_ty=yes.ty)


def _asks_data(value: Any) -> bool:
    """Whether a choice, or one that it leads to, has a condition that loads."""
    if not is_choice(value):
        return False
    condition, yes, no = value.args
    return bool(ir.buffer_loads(condition)) or _asks_data(yes) or _asks_data(no)


def number_like(value: float, like: Any) -> Any:
    """A number of another expression's type."""
    return ir.tirx.const(float(value), str(like.ty))


def zero_like(like: Any) -> Any:
    """The number 0 of another expression's type."""
    return number_like(0, like)


def is_number(value: Any, number: float) -> bool:
    """Whether an expression is a certain number."""
    return isinstance(value, ir.tirx.FloatImm) and float(value.value) == number


def linear(scale: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function that leaves 0 what it is, where a choice is not 0.

    So no number is multiplied by 0, which might be infinite where the other side is taken.
    """
    if is_choice(value):
        condition, yes, no = value.args
        if is_number(no, 0):
            made = linear(scale, yes)
            return choose(condition, made, zero_like(made))
        if is_number(yes, 0):
            made = linear(scale, no)
            return choose(condition, zero_like(made), made)
    return scale(value)


def under(conditions: Sequence[Any], value: Any) -> Any:
    """A value where conditions on loop variables hold, 0 elsewhere."""
    left = [each for each in conditions if ir.constant(each) != 1]
    if not left:
        return value
    if is_choice(value) and is_number(value.args[2], 0) and not ir.buffer_loads(value.args[0]):
        left, value = [*left, *ir.terms(value.args[0])], value.args[1]
    once = {ir.tvm_ffi.StructuralKey(each): each for each in left}
    return choose(ir.conjunction(once.values()), value, zero_like(value))


def simplest(value: Any, domain: access.Domain) -> Any:
    """A value whose indices, and conditions on loop variables, are in their simplest form."""

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return ir.tirx.BufferLoad(node.source, list(access.simplified(node.indices, domain)))

    def choice(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return _settled(node, domain) if is_choice(node) else node

    return ir.mutate(value, (ir.TensorLoad, load), (ir.Call, choice))


def _settled(choice: Any, domain: access.Domain) -> Any:
    condition, yes, no = choice.args
    # What is loaded may be no number, of which TVM's rules know nothing.
    parts = [
        each if ir.buffer_loads(each) else access.simplified([each], domain)[0]
        for each in ir.terms(condition)
    ]
    if any(ir.constant(each) == 0 for each in parts):
        return no
    parts = [each for each in parts if ir.constant(each) != 1]
    return choose(ir.conjunction(parts), yes, no) if parts else yes


# Choices inside of indices: reflected and clamped edges.


def lifted(load: Any, where: str) -> Any:
    """A load whose indices choose between others as a choice between loads.

    ``X[max(i, 0)]`` becomes ``if_then_else(i >= 0, X[i], X[0])``, so that each load has indices
    that may be inverted. More than some choices in one another are refused.
    """
    return _lifted(load, where, 0)


def _lifted(load: Any, where: str, depth: int) -> Any:
    for at, index in enumerate(load.indices):
        choice = _first_choice(index)
        if choice is None:
            continue
        if depth >= _MOST_CHOICES:
            found, limit = f"an index that chooses: {load}", f"{_MOST_CHOICES} choices"
            raise refused(where, found, limit, "write the choices as separate blocks")
        condition, yes, no = _sides(choice)
        parts = [_at(load, at, _replaced(index, choice, each)) for each in (yes, no)]
        return choose(condition, *(_lifted(each, where, depth + 1) for each in parts))
    return load


def _first_choice(index: Any) -> Any:
    """The outermost choice of an index that is read first; None if there is none."""
    if isinstance(index, (ir.tirx.IntImm, ir.Var)):
        return None
    found = ir.nodes(index, ir.tirx.Select, ir.tirx.Max, ir.tirx.Min, ir.Call)
    found = [each for each in found if not isinstance(each, ir.Call) or is_choice(each)]
    # What is visited last has all others inside of it, or stands beside them.
    return found[-1] if found else None


def _sides(choice: Any) -> tuple[Any, Any, Any]:
    if isinstance(choice, ir.tirx.Select):
        return choice.condition, choice.true_value, choice.false_value
    if isinstance(choice, ir.tirx.Max):
        return ir.tirx.GE(choice.a, choice.b), choice.a, choice.b
    if isinstance(choice, ir.tirx.Min):
        return ir.tirx.LE(choice.a, choice.b), choice.a, choice.b
    return tuple(choice.args)


def _replaced(index: Any, choice: Any, side: Any) -> Any:
    """An index with one side in the place of a choice, wherever it stands."""
    if index.same_as(choice):
        return side

    def swap(node: Any, mutator: Any) -> Any:
        return side if ir.alike(node, choice) else mutator.default_mutate(node)

    return ir.mutate(index, (type(choice), swap))


def _at(load: Any, at: int, index: Any) -> Any:
    indices = list(load.indices)
    indices[at] = index
    return ir.tirx.BufferLoad(load.source, indices)
