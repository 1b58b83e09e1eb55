"""Converts expressions of TVM to sympy, real numbers without types, and back to TVM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue

from crossfuse import _tvm as ir
from crossfuse.cascade.expressions.functions import (
    OF_FUNCTION,
    OF_OPERATOR,
    UNBOUNDED,
    Compared,
    Fence,
    Unevaluated,
    factored,
    fenced_product,
    fenced_sum,
    fraction,
    magnitude,
    refused,
    rint,
    round_away,
    settled,
    trunc,
    with_flags,
)

#: From a load or a variable to its value.
Leaf = Callable[[Any], sympy.Expr]
#: From a type and a value that is rounded to it to the rounded value.
Rounded = Callable[[str, sympy.Expr], sympy.Expr]
#: From a part to its value, if it is not to be taken apart; None for all others.
Whole = Callable[[Any], "sympy.Expr | None"]


def to_sympy(
    expression: Any, leaf: Leaf, rounded: Rounded | None = None, whole: Whole | None = None
) -> sympy.Basic:
    """Convert an expression of TVM to mathematics: a Boolean for a condition, else an Expr.

    Conversions between types are dropped, but that of a number to an integer, which cuts it off.
    Additions stay in their order; see `crossfuse.cascade.expressions.functions`. A condition that
    is used as a number is 1 or 0; of a load or variable of type bool, `leaf` gives a number that is
    not 0 where it holds. `rounded` is called for each conversion to a floating-point type with
    fewer digits or range, `whole` for each part before what is below it. Operators without a
    counterpart, and NaN, are refused.
    """
    return settled(_Reader(leaf, rounded, whole).read(expression))


def number(immediate: Any) -> sympy.Expr:
    """The number that a constant of TVM stands for.

    It is the shortest decimal that the type rounds to the constant: 1e-5, not 9.99999974737875e-06.
    """
    if isinstance(immediate, ir.tirx.IntImm):
        return sympy.Integer(int(immediate.value))
    value = float(immediate.value)
    if np.isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    if np.isnan(value):
        limit, instead = "numbers and infinities", "mask with -inf, or with 0 in the term"
        raise refused("constant", "nan", limit, instead)
    shortest = repr(value) if str(immediate.ty) == "float64" else str(np.float32(value))
    return sympy.Rational(shortest)


class _Reader:
    def __init__(self, leaf: Leaf, rounded: Rounded | None, whole: Whole | None) -> None:
        self.leaf = leaf
        self.rounded = rounded
        self.whole = whole

    def read(self, node: Any) -> sympy.Basic:
        """Convert a value by its type: to a condition or a number."""
        known = self.whole(node) if self.whole is not None else None
        if known is not None:
            return sympy.Ne(Compared(known), 0) if _is_condition(node) else known
        if isinstance(node, ir.tirx.IntImm) and _is_condition(node):
            return sympy.true if int(node.value) else sympy.false
        if isinstance(node, ir.tirx.IntImm | ir.tirx.FloatImm):
            return number(node)
        if isinstance(node, ir.TensorLoad | ir.Var):
            value = self.leaf(node)
            return sympy.Ne(value, 0) if _is_condition(node) else value
        if isinstance(node, ir.tirx.Cast):
            return self.cast(node)
        if isinstance(node, ir.tirx.Select):
            return self.choice(node.condition, node.true_value, node.false_value)
        if isinstance(node, ir.Call):
            return self.call(node)
        rule = _NUMBERS.get(type(node))
        if "int" in str(node.ty):
            rule = _WHOLE.get(type(node), rule)
        if rule is not None:
            if str(node.ty) in _WRAPPING and rule not in (sympy.Max, sympy.Min):
                limit, instead = "numbers that do not wrap around", "convert the operands before"
                raise refused(f"arithmetic in {node.ty}", node, limit, instead)
            return rule(self.number(node.a), self.number(node.b))
        if isinstance(node, ir.tirx.Div):
            return self.division(node)
        compared = _COMPARISONS.get(type(node))
        if compared is not None:
            return self.comparison(compared, node)
        logical = _CONDITIONS.get(type(node)) if _is_condition(node) else None
        if logical is not None:
            return logical(*(self.condition(each) for each in _operands(node)))
        raise _unknown(type(node).__name__, node)

    def number(self, node: Any) -> sympy.Expr:
        found = self.read(node)
        return sympy.Piecewise((1, found), (0, True)) if _is_condition(node) else found

    def condition(self, node: Any) -> sympy.Basic:
        """Convert a value to a condition."""
        found = self.read(node)
        return found if _is_condition(node) else sympy.Ne(Compared(found), 0)

    def cast(self, node: Any) -> sympy.Basic:
        source, target = str(node.value.ty), str(node.ty)
        if target == "bool":
            return self.condition(node.value)
        value = self.number(node.value)
        if "int" in target and "float" in source:
            return trunc(value)
        if self.rounded is not None and narrows(source, target):
            return self.rounded(target, value)
        return value

    def choice(self, condition: Any, chosen: Any, otherwise: Any) -> sympy.Basic:
        test = self.condition(condition)
        if _is_condition(chosen):
            return _either(test, self.condition(chosen), self.condition(otherwise))
        return _choice(self.number(chosen), test, self.number(otherwise))

    def call(self, node: Any) -> sympy.Basic:
        full = str(getattr(node.op, "name", node.op))
        name = full.rpartition(".")[2]
        if full == ir.IF_THEN_ELSE:
            return self.choice(*node.args)
        if name not in OF_OPERATOR:
            raise _unknown(full, node)
        return OF_OPERATOR[name](*(self.number(each) for each in node.args))

    def division(self, node: Any) -> sympy.Expr:
        left, right = self.number(node.a), self.number(node.b)
        if "int" not in str(node.ty):
            return _product(left, 1 / right)
        whole = left.is_nonnegative and right.is_positive
        return sympy.floor(left / right) if whole else trunc(left / right)

    def comparison(self, compared: Callable[..., sympy.Basic], node: Any) -> sympy.Basic:
        if _is_condition(node.a):
            one, other = self.condition(node.a), self.condition(node.b)
            alike = _either(one, other, sympy.Not(other))
            return sympy.Not(alike) if compared is sympy.Ne else alike
        sides = (self.number(node.a), self.number(node.b))
        strict = compared in (sympy.StrictLessThan, sympy.StrictGreaterThan)  # false of NaN too
        if sides[0] == sides[1] and not (strict or sides[0].is_integer):
            limit, instead = "comparisons of two values", "compute it in a block of its own before"
            raise refused("a test for NaN", node, limit, f"{instead} the cascade")
        return compared(*(Compared(each.xreplace(_INFINITIES)) for each in sides))


#: Types whose sums and products leave them, and are not what they are in more bits.
_WRAPPING = ("int8", "uint8", "int16", "uint16")
_INFINITIES = {sympy.oo: UNBOUNDED, -sympy.oo: -UNBOUNDED}


def narrows(source: str, target: str) -> bool:
    """Whether a conversion between floating-point types loses digits or range."""
    if "float" not in source or "float" not in target:
        return False
    one, other = _digits_and_range(source), _digits_and_range(target)
    return other[0] < one[0] or other[1] < one[1]


def largest(dtype: str) -> float:
    """The largest finite number of a floating-point type."""
    return _digits_and_range(dtype)[1]


@functools.lru_cache(maxsize=32)
def _digits_and_range(dtype: str) -> tuple[int, float]:
    import ml_dtypes

    known = getattr(ml_dtypes, dtype, dtype)
    found = ml_dtypes.finfo(known)
    return int(found.nmant), float(found.max)


@functools.lru_cache(maxsize=4096, typed=True)
def _choice(chosen: sympy.Expr, test: sympy.Basic, otherwise: sympy.Expr) -> sympy.Expr:
    """A choice by a condition, cached because sympy solves the condition for it.

    What is left out stands last, so that masks by a flag and by its opposite are one.
    """
    if chosen == sympy.S.NegativeInfinity != otherwise and _has_opposite(test):
        chosen, test, otherwise = otherwise, sympy.Not(test), chosen
    return sympy.Piecewise((chosen, test), (otherwise, True))


def _has_opposite(test: sympy.Basic) -> bool:
    """Whether a condition holds where its opposite does not: sympy's of ``x < 1`` fails for NaN."""
    orders = test.atoms(sympy.Rel) - test.atoms(sympy.Eq, sympy.Ne)
    return all(side.is_integer for order in orders for side in order.args)


def _either(test: sympy.Basic, chosen: sympy.Basic, otherwise: sympy.Basic) -> sympy.Basic:
    return sympy.Or(sympy.And(test, chosen), sympy.And(sympy.Not(test), otherwise))


def _product(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """A product without infinite constants, of which sympy does not know that 0 makes NaN."""
    if left.is_infinite or right.is_infinite:
        other = right if left.is_infinite else left
        if other.is_number and other.is_nonzero and other.is_finite:
            return left * right
        limit, instead = "finite factors", "mask with a choice; of one element torch divides by 0"
        raise refused("an infinite factor", f"oo * ({other})", limit, instead)
    whole = left.is_integer and right.is_integer
    if left.free_symbols and right.free_symbols and not whole:
        # Of what may be infinite a condition makes NaN, where a choice would hide it.
        left, right = with_flags(left), with_flags(right)
    return fenced_product(left, right)


def _operands(node: Any) -> tuple[Any, ...]:
    return (node.a,) if isinstance(node, ir.tirx.Not | ir.tirx.BitwiseNot) else (node.a, node.b)


def _is_condition(node: Any) -> bool:
    return str(node.ty) == "bool"


def _unknown(name: str, node: Any) -> Exception:
    limit = "arithmetic, comparisons, choices and " + ", ".join(sorted(OF_OPERATOR))
    instead = "spell it out by these, or compute it in a block of its own before the cascade"
    return refused(f"operator {name}", node, limit, instead)


_NUMBERS: dict[type, Callable[..., sympy.Expr]] = {
    ir.tirx.Add: fenced_sum,
    ir.tirx.Sub: lambda a, b: fenced_sum(a, fenced_product(sympy.S.NegativeOne, b)),
    ir.tirx.Mul: _product,
    ir.tirx.Max: sympy.Max,
    ir.tirx.Min: sympy.Min,
    ir.tirx.FloorDiv: lambda a, b: sympy.floor(a / b),
    ir.tirx.FloorMod: sympy.Mod,
}
#: Sums and products of integers, which are exact in any order.
_WHOLE: dict[type, Callable[..., sympy.Expr]] = {
    ir.tirx.Add: lambda a, b: a + b,
    ir.tirx.Sub: lambda a, b: a - b,
    ir.tirx.Mul: lambda a, b: a * b,
}
_COMPARISONS: dict[type, Callable[..., sympy.Basic]] = {
    ir.tirx.EQ: sympy.Eq,
    ir.tirx.NE: sympy.Ne,
    ir.tirx.LT: sympy.StrictLessThan,
    ir.tirx.LE: sympy.LessThan,
    ir.tirx.GT: sympy.StrictGreaterThan,
    ir.tirx.GE: sympy.GreaterThan,
}
_CONDITIONS: dict[type, Callable[..., sympy.Basic]] = {
    ir.tirx.And: sympy.And,
    ir.tirx.Or: sympy.Or,
    ir.tirx.Not: sympy.Not,
    ir.tirx.BitwiseAnd: sympy.And,
    ir.tirx.BitwiseOr: sympy.Or,
    ir.tirx.BitwiseNot: sympy.Not,
    ir.tirx.BitwiseXor: lambda a, b: _either(a, sympy.Not(b), b),
}


# From sympy to TVM.
#
# Numbers become constants of the wanted type, infinities true ones. Whole numbers (indices,
# labels, lengths) are computed as integers as far as they go, and only then take part in
# floating-point arithmetic, so that no large position is rounded.


def type_of(value: Any) -> str:
    """The element type of an expression of TVM."""
    return str(value.ty)


#: Functions that give whole numbers of others.
_CUT = sympy.floor | sympy.ceiling | trunc | rint | round_away
#: Largest exponent that becomes multiplications.
_LARGEST_POWER = 16


def to_tir(expression: sympy.Expr, values: Mapping[sympy.Symbol, Any], dtype: str) -> Any:
    """Convert an expression of sympy to TVM, computed in one type.

    The type is a floating-point type, or an integer type for an expression that is whole; a
    condition has type bool whatever it is. ``2**x`` becomes ``exp2``; ``exp`` stays ``exp``. A
    Piecewise becomes selects, all of whose sides may be evaluated; where sides load from memory,
    only the chosen one is. Sub-expressions that occur twice are written twice; see
    `crossfuse.cascade.expressions.functions.shared`. Refused are symbols without a value, and
    functions that TVM has no operator for.
    """
    return _Writer(values, dtype).write(sympy.sympify(expression))


class _Writer:
    """Writes expressions in one type, and whole parts of them as integers."""

    def __init__(self, values: Mapping[sympy.Symbol, Any], dtype: str) -> None:
        self.values = values
        self.dtype = dtype
        self.float = "float" in dtype

    def value(self, symbol: sympy.Symbol) -> Any:
        """The expression that a symbol stands for; a symbol without one is refused."""
        if symbol not in self.values:
            known = ", ".join(sorted(each.name for each in self.values)) or "none"
            limit, instead = f"symbols with a value: {known}", "pass its value"
            raise refused(f"symbol {symbol}", "no value", limit, instead)
        return self.values[symbol]

    def is_whole(self, expression: sympy.Basic) -> bool:
        """Whether an expression is made of integers only, by operators that keep them so."""
        if isinstance(expression, sympy.Symbol):
            kind = type_of(self.value(expression))
            return "int" in kind or kind == "bool"
        if isinstance(expression, sympy.Integer):
            return True
        if isinstance(expression, sympy.floor | trunc):
            return all(self.is_whole(each) for each in expression.args[0].as_numer_denom())
        kept = sympy.Add | sympy.Mul | sympy.Mod | sympy.Max | sympy.Min | sympy.Abs
        return isinstance(expression, kept) and all(self.is_whole(each) for each in expression.args)

    def of_integers(self, *expressions: sympy.Basic) -> _Writer:
        """A writer in the integer type that holds all integers of expressions."""
        symbols = {each for one in expressions for each in one.free_symbols}
        wide = any(type_of(self.value(each)) in ("int64", "uint64", "uint32") for each in symbols)
        return _Writer(self.values, "int64" if wide else "int32")

    def write(self, expression: sympy.Basic) -> Any:
        if isinstance(expression, Boolean) and not isinstance(expression, sympy.Symbol):
            return self.condition(expression)
        if expression.is_number:
            return self.number(expression)
        if self.float and self.is_whole(expression):
            return self.of_integers(expression).write(expression).astype(self.dtype)
        if isinstance(expression, sympy.Symbol):
            return self.leaf(expression)
        if isinstance(expression, _CUT) and not self.float and not self.is_whole(expression):
            return _Writer(self.values, "float32").write(expression).astype(self.dtype)
        for kind, rule in _RULES.items():
            if isinstance(expression, kind):
                return rule(self, expression)
        name = type(expression).__name__
        limit = "sums, products, powers, comparisons and " + ", ".join(sorted(OF_FUNCTION.values()))
        raise refused(f"function {name}", expression, limit, "spell it out by these")

    def leaf(self, symbol: sympy.Symbol) -> Any:
        value = self.value(symbol)
        if type_of(value) != self.dtype:
            value = value.astype(self.dtype)
        return value

    def number(self, number: sympy.Expr) -> Any:
        signed = number.is_extended_real  # a quotient by 0 is infinite, and has no sign
        if number in (UNBOUNDED, -UNBOUNDED) or (signed and number.is_infinite):
            return ir.tirx.const(float("inf" if number > 0 else "-inf"), self.dtype)
        if not number.is_real:
            raise refused("number", number, "real numbers and infinities", "leave it out")
        if self.float:
            # The least number of a type, which masks scores, is beyond it in units of an exponent.
            most = largest(self.dtype)
            return ir.tirx.const(min(max(float(number), -most), most), self.dtype)
        return ir.tirx.const(int(number), self.dtype)

    def condition(self, condition: sympy.Basic) -> Any:
        if isinstance(condition, BooleanTrue | BooleanFalse):
            return ir.tirx.const(bool(condition), "bool")
        if isinstance(condition, Relational):
            return self.comparison(condition)
        joined = {sympy.And: ir.tirx.And, sympy.Or: ir.tirx.Or}
        for kind, node in joined.items():
            if isinstance(condition, kind):
                # Sorted, because sympy's own order changes from process to process.
                parts = sorted(condition.args, key=sympy.default_sort_key)
                return functools.reduce(node, [self.condition(each) for each in parts])
        if isinstance(condition, sympy.ITE):
            return _chosen(*(self.condition(each) for each in condition.args))
        if isinstance(condition, sympy.Not):
            return ir.tirx.Not(self.condition(condition.args[0]))
        limit = "comparisons, joined by and, or and not"
        raise refused("condition", condition, limit, "spell it out by these")

    def comparison(self, condition: Relational) -> Any:
        left, right = condition.args
        flag = self.flag(left) if right.is_zero else None
        if flag is not None and isinstance(condition, sympy.Ne):
            return flag
        if flag is not None and isinstance(condition, sympy.Eq):
            return ir.tirx.Not(flag)
        writer = self
        if self.is_whole(left) and self.is_whole(right):
            writer = self.of_integers(left, right)
        elif not self.float:
            writer = _Writer(self.values, "float32")
        return _COMPARED[type(condition)](writer.write(left), writer.write(right))

    def flag(self, expression: sympy.Basic) -> Any:
        if not isinstance(expression, sympy.Symbol):
            return None
        value = self.value(expression)
        return value if type_of(value) == "bool" else None

    def product(self, expression: sympy.Mul) -> Any:
        above, below = fraction(expression)
        coefficient, above = _leading_number(above)
        first, *others = map(self.write, above or [sympy.S.One])
        result = first if coefficient is None else self._scaled(coefficient, first)
        # In turns: a product of factors or of divisors may be out of range where the whole is not.
        for number in range(max(len(others), len(below))):
            result = result / self.write(below[number]) if number < len(below) else result
            result = result * others[number] if number < len(others) else result
        return result

    def _scaled(self, coefficient: sympy.Expr, result: Any) -> Any:
        if coefficient == -1:
            return ir.tirx.const(0, self.dtype) - result if not self.float else -result
        if not self.float and not coefficient.is_integer:
            raise refused("number", coefficient, "whole numbers in whole expressions", "use floor")
        return self.number(coefficient) * result

    def total(self, expression: sympy.Add) -> Any:
        """Write a sum, with differences in place of added negative products."""
        plus: list[sympy.Expr] = []
        minus: list[sympy.Expr] = []
        for each in expression.as_ordered_terms():
            negative = each.could_extract_minus_sign() and not each.is_Add
            (minus if negative else plus).append(-each if negative else each)
        written = [self.write(each) for each in plus]
        result = functools.reduce(lambda a, b: a + b, written) if written else None
        for each in minus:
            part = self.write(each)
            if result is None:
                result = -part if self.float else ir.tirx.const(0, self.dtype) - part
            else:
                result = result - part
        return result

    def power(self, expression: sympy.Pow) -> Any:
        base, exponent = expression.args
        if exponent.is_Integer and 0 < exponent <= _LARGEST_POWER:
            return _repeated(self.write(base), int(exponent))
        if exponent == sympy.S.Half:
            return ir.tirx.sqrt(self.write(base))
        if exponent == -sympy.S.Half:
            return ir.tirx.rsqrt(self.write(base))
        if exponent.is_Rational and exponent < 0 and exponent.q <= 2:
            # In turns, as in a product: of a variance of 1e26 the power 3/2 is infinite.
            return self.product(expression)
        if base == 2:
            return ir.tirx.exp2(self.write(exponent))
        return ir.tirx.pow(self.write(base), self.write(exponent))

    def folded(self, expression: sympy.Basic, node: Any) -> Any:
        """Write a function of any number of arguments, two by two; numbers last."""
        order = sorted(expression.args, key=lambda each: (each.is_number, str(each)))
        return functools.reduce(node, [self.write(each) for each in order])

    def pieces(self, expression: sympy.Piecewise) -> Any:
        *chosen, (last, otherwise) = expression.args
        if otherwise != sympy.true:
            limit, instead = "a value for every case", "end it with (value, True)"
            raise refused("Piecewise", expression, limit, instead)
        result = self.write(last)
        for value, condition in reversed(chosen):
            result = _chosen(self.condition(condition), self.write(value), result)
        return result

    def quotient(self, expression: sympy.Function) -> Any:
        """Write a floor, or a rounding towards zero."""
        floors = isinstance(expression, sympy.floor)
        if self.float:
            return (ir.tirx.floor if floors else ir.tirx.trunc)(self.write(expression.args[0]))
        top, bottom = (self.write(each) for each in expression.args[0].as_numer_denom())
        return (ir.tirx.floordiv if floors else ir.tirx.truncdiv)(top, bottom)

    def remainder(self, expression: sympy.Mod) -> Any:
        left, right = (self.write(each) for each in expression.args)
        if not self.float:
            return ir.tirx.floormod(left, right)
        return left - ir.tirx.floor(left / right) * right

    def function(self, expression: sympy.Function) -> Any:
        if isinstance(expression, sympy.exp):
            factor, rest = factored(expression.args[0])
            power = self.write(rest)
            return ir.tirx.exp(power if factor == 1 else self.number(factor) * power)
        written = [self.write(each) for each in expression.args]
        return getattr(ir.tirx, OF_FUNCTION[type(expression)])(*written)


def _chosen(test: Any, one: Any, other: Any) -> Any:
    """A choice; if a side loads from memory, only the chosen side is computed.

    A load that a condition guards may lie beyond its tensor. Both sides of a `Select` are computed,
    and TVM drops conditions of loads that are implied by that of a choice around them.
    """
    if any(str(each.source.scope()) == "global" for each in ir.buffer_loads(one, other)):
        return ir.tirx.if_then_else(test, one, other)
    return ir.tirx.Select(test, one, other)


def _leading_number(factors: list[sympy.Expr]) -> tuple[sympy.Expr | None, list[sympy.Expr]]:
    numbers = [each for each in factors if each.is_number]
    if not numbers:
        return None, factors
    return sympy.Mul(*numbers), [each for each in factors if not each.is_number]


def _repeated(base: Any, times: int) -> Any:
    half = _repeated(base, times // 2) if times > 1 else None
    square = half * half if half is not None else None
    if square is None:
        return base
    return square * base if times % 2 else square


_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    sympy.Eq: ir.tirx.EQ,
    sympy.Ne: ir.tirx.NE,
    sympy.StrictLessThan: ir.tirx.LT,
    sympy.LessThan: ir.tirx.LE,
    sympy.StrictGreaterThan: ir.tirx.GT,
    sympy.GreaterThan: ir.tirx.GE,
}
_RULES: dict[type, Callable[[_Writer, Any], Any]] = {
    sympy.Add: _Writer.total,
    sympy.Mul: _Writer.product,
    sympy.Pow: _Writer.power,
    sympy.Max: lambda writer, each: writer.folded(each, ir.tirx.Max),
    sympy.Min: lambda writer, each: writer.folded(each, ir.tirx.Min),
    sympy.Abs | magnitude: lambda writer, each: ir.tirx.abs(writer.write(each.args[0])),
    sympy.Piecewise: _Writer.pieces,
    sympy.floor: _Writer.quotient,
    trunc: _Writer.quotient,
    sympy.Mod: _Writer.remainder,
    Fence | Compared: lambda writer, each: writer.write(each.args[0]),
    # Keeps a quotient together where its parts would leave the range of numbers.
    Unevaluated: lambda writer, each: writer.write(each.args[0]),
} | dict.fromkeys(OF_FUNCTION.keys() - {sympy.floor, trunc}, _Writer.function)
