"""Converts expressions of sympy to TVM.

Numbers become constants of the wanted type, infinities true ones. Whole numbers (indices, labels,
lengths) are computed as integers as far as they go, and only then take part in floating-point
arithmetic, so that no large position is rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue

from crossfuse import _tvm as ir
from crossfuse.cascade.expressions.functions import (
    OF_FUNCTION,
    UNBOUNDED,
    Compared,
    Fence,
    Unevaluated,
    factored,
    fraction,
    magnitude,
    refused,
    rint,
    round_away,
    trunc,
)
from crossfuse.cascade.expressions.to_sympy import largest


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
        if exponent.is_number and exponent < 0:
            return self.number(sympy.S.One) / self.write(base**-exponent)
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
